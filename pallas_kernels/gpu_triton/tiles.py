"""Chunks of queries as tiles, for Pallas-Triton: which queries a program takes, and which context
they see."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import tuning
from jaxserve.pallas_kernels.gpu_triton.common import BatchRefs, Ref, cdiv
from jaxserve.pallas_kernels.gpu_triton.stream_k import Shares, cut


class QueryTiles(NamedTuple):
    """Query tiles: tile i is a static number of tokens of row[i], from first[i] on.

    Attributes:
        row: int32 [N], R for none.
        first: int32 [N], index among the row's tokens of this step.
    """

    row: Any
    first: Any


class Work(NamedTuple):
    """Query tiles, and each program's share of their contexts: arrays, or refs."""

    tiles: QueryTiles
    shares: Shares


class Sizes(NamedTuple):
    """Static sizes of tiles.

    Attributes:
        tokens: Query tokens of a query tile.
        context: Tokens of a tile of context.
        longest: Tokens of context that a row's table has room for.
        sliding_window: Positions that a token sees; None for all.
    """

    tokens: int
    context: int
    longest: int
    sliding_window: int | None


def query_tiles(lengths: jax.Array, max_tokens: int, tokens: int) -> QueryTiles:
    """Tiles of `tokens` queries that cover rows of lengths int32 [R], in order. There are as many
    as the worst case of rows with max_tokens together needs."""
    rows = lengths.shape[0]
    count = min(max_tokens, (max_tokens + rows * (tokens - 1)) // tokens)
    ends = jnp.cumsum((lengths + tokens - 1) // tokens)
    tile = jnp.arange(count, dtype=jnp.int32)
    row = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    return QueryTiles(row, (tile - starts[row]) * tokens)


def plan_work(
    batch: AttentionBatch,
    lengths: jax.Array,
    heads: int,
    sizes: Sizes,
    launch: tuning.Launch,
    *,
    uncut: bool = False,
) -> Work:
    """Plans attention of the last tokens of each row.

    Args:
        batch: The batch that will attend.
        lengths: int32 [R], query tokens of each row; 0 for none.
        heads: KV heads.
        sizes: Of the tiles.
        launch: The sizes of the kernel.
        uncut: A program takes all context of one query tile for one head, however long it is, so
            that the order of sums does not depend on other rows.
    """
    tiles = query_tiles(lengths, batch.max_tokens, sizes.tokens)
    row = jnp.minimum(tiles.row, batch.max_rows - 1)
    context, length = batch.context_lens[row], batch.query_lens[row]
    _, lower, _, upper = seen_span(context, length, tiles.first, sizes.tokens, sizes.sliding_window)
    size = jnp.int32(sizes.context)
    count = cdiv(upper, sizes.context) - lax.div(lower, size)
    count = jnp.where(tiles.row < batch.max_rows, count, 0)
    if uncut:
        one_each = tuning.Cutting(programs=len(count) * heads, least=1, fill=1, most=1)
        return Work(tiles, cut(jnp.minimum(count, 1), heads, one_each))
    most = len(count) * cdiv(sizes.longest, sizes.context) * heads
    return Work(tiles, cut(count, heads, tuning.cutting(launch, most)))


def seen_span(
    context: jax.Array, length: jax.Array, first: jax.Array, tokens: int, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The span of positions that a query tile sees.

    Args:
        context: int32, cached tokens of the row.
        length: int32, the row's query tokens.
        first: int32, index of the tile's first query token among them.
        tokens: Query tokens of a tile.
        window: Positions that a token sees; None for all.

    Returns:
        (position of the row's first query, lower, whole, upper), int32. The tile sees nothing
        outside of [lower, upper), and without a window every query sees all of [lower, whole).
    """
    before = context - length
    lower = jnp.zeros_like(first)
    if window is not None:
        lower = jnp.maximum(before + first + 1 - window, 0)
    return before, lower, before + first + 1, before + jnp.minimum(first + tokens, length)


class Tile(NamedTuple):
    """The M queries of a tile: query i is head i % group of query token first + i // group.

    Attributes:
        row: int32 [], row of the batch.
        position: int32 [M], of each query.
        rows: int32 [M], of each query in q and the output [T * H, D].
        used: bool [M], which are queries.
        lower, whole, upper: int32 [], see `seen_span`.
    """

    row: jax.Array
    position: jax.Array
    rows: jax.Array
    used: jax.Array
    lower: jax.Array
    whole: jax.Array
    upper: jax.Array


def tile_of(
    refs: BatchRefs,
    tiles: QueryTiles,
    item: jax.Array,
    head: jax.Array,
    *,
    queries: int,
    group: int,
    num_heads: int,
    sliding_window: int | None,
) -> Tile:
    """The queries of a tile for the heads of one KV head, from refs inside a kernel.

    Args:
        refs: The batch's refs.
        tiles: All query tiles, as refs.
        item: int32 [], index of the tile.
        head: int32 [], KV head.
        queries: M, rows of the tile.
        group: Query heads of a KV head.
        num_heads: Query heads of one shard.
        sliding_window: Positions that a token sees; None for all.
    """
    row, first, tokens = tiles.row[item], tiles.first[item], queries // group
    context, length = refs.context_lens[row], refs.query_lens[row]
    before, lower, whole, upper = seen_span(context, length, first, tokens, sliding_window)
    member = jnp.arange(queries, dtype=jnp.int32)
    index = first + lax.div(member, jnp.int32(group))
    used = (index < length) & (member < tokens * group)
    token_head = head * group + lax.rem(member, jnp.int32(group))
    rows = (refs.query_start[row] + index) * num_heads + token_head
    return Tile(row, before + index, rows, used, lower, whole, upper)


def seen_by(tile: Tile, position: jax.Array, sliding_window: int | None) -> jax.Array:
    """bool [M, N]: whether each query sees positions [N]."""
    seen = position[None, :] <= tile.position[:, None]
    if sliding_window is not None:
        seen &= position[None, :] > tile.position[:, None] - sliding_window
    return seen


def place_in_tile(
    batch: BatchRefs,
    tiles: tuple[Ref, ...],
    item: jax.Array,
    head: jax.Array,
    member: jax.Array,
    *,
    group: int,
    num_heads: int,
) -> tuple[jax.Array, jax.Array]:
    """See `merge.Place`: a member is a query, as in `Tile`."""
    given = QueryTiles(*tiles)
    row, index = given.row[item], given.first[item] + lax.div(member, jnp.int32(group))
    token_head = head * group + lax.rem(member, jnp.int32(group))
    at = (batch.query_start[row] + index) * num_heads + token_head
    return at, index < batch.query_lens[row]
