"""Paged attention of ragged prefill chunks on Pallas-Triton (FlashAttention-2, Dao 2023).

A program takes a tile of one row's query tokens with all query heads of one kv head, so that
grouped heads share what is read, and walks that row's cached context by its block table. Tiles of
context that every query sees need no mask; only the last ones, across the diagonal, have one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxserve.pallas_kernels import online_softmax, tuned
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.online_softmax import Softmax
from jaxserve.pallas_kernels.triton_common import (
    BatchRefs,
    Geometry,
    Ref,
    as_rows,
    batch_arguments,
    cdiv,
    context_of,
    geometry_of,
    load_rows,
    power_of_two,
    store_rows,
)


class QueryTiles(NamedTuple):
    """Which queries each program takes: `tokens` queries (static) of row[i], from first[i] on.

    row: int32 [N], R for none; first: int32 [N], index in the row's tokens of this step.
    """

    row: jax.Array
    first: jax.Array


def query_tiles(lengths: jax.Array, max_tokens: int, tokens: int) -> QueryTiles:
    """Tiles of `tokens` queries that cover rows of lengths int32 [R], in order; as many as rows
    with max_tokens together can need."""
    rows = lengths.shape[0]
    count = min(max_tokens, (max_tokens + rows * (tokens - 1)) // tokens)
    ends = jnp.cumsum((lengths + tokens - 1) // tokens)
    tile = jnp.arange(count, dtype=jnp.int32)
    row = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    return QueryTiles(row, (tile - starts[row]) * tokens)


class Options(NamedTuple):
    """What a kernel is compiled for, besides shapes."""

    geometry: Geometry
    num_heads: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    queries: int  # rows of a query tile: query tokens times heads of a group, a power of two
    tile: int  # tokens of context an iteration

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.geometry.kv_heads

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a tile."""
        return self.queries // self.group


class Tile(NamedTuple):
    """One program's queries [M]: query i is head i % group of query token first + i // group."""

    row: jax.Array  # int32 []
    position: jax.Array  # int32 [M], of each query
    rows: jax.Array  # int32 [M], of each query in q and the output [T * H, D]
    used: jax.Array  # bool [M]
    lower: jax.Array  # int32 []: no query sees positions below,
    whole: jax.Array  # int32 []: every query sees [lower, whole) unless there is a window,
    upper: jax.Array  # int32 []: no query sees positions from here on


def tile_of(
    refs: BatchRefs,
    row: jax.Array,
    first: jax.Array,
    head: jax.Array,
    *,
    queries: int,
    group: int,
    num_heads: int,
    sliding_window: int | None,
) -> Tile:
    """The queries of a tile from query `first` of `row` on, for the heads of kv head `head`."""
    tokens = queries // group
    length = refs.query_lens[row]
    before = refs.context_lens[row] - length
    member = jnp.arange(queries, dtype=jnp.int32)
    index = first + lax.div(member, jnp.int32(group))
    used = (index < length) & (member < tokens * group)
    token_head = head * group + lax.rem(member, jnp.int32(group))
    rows = (refs.query_start[row] + index) * num_heads + token_head
    lower = jnp.int32(0)
    if sliding_window is not None:
        lower = jnp.maximum(before + first + 1 - sliding_window, 0)
    upper = before + jnp.minimum(first + tokens, length)
    return Tile(row, before + index, rows, used, lower, before + first + 1, upper)


def seen_by(tile: Tile, position: jax.Array, sliding_window: int | None) -> jax.Array:
    """bool [M, N]: whether each query sees positions [N]."""
    seen = position[None, :] <= tile.position[:, None]
    if sliding_window is not None:
        seen &= position[None, :] > tile.position[:, None] - sliding_window
    return seen


def _kernel(*refs: Ref, options: Options) -> None:
    """refs: the batch, the tiles' row and first [N], q [T * H, D], the pool's rows, the output so
    far (aliased) and the output [T * H, D]."""
    fields = len(BatchRefs._fields)
    batch = BatchRefs(*refs[:fields])
    row_ref, first_ref, q_ref, pool_ref, *_, out_ref = refs[fields:]
    # The last tiles of a row have the longest contexts: they start first.
    head, index = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    row = row_ref[index]

    @pl.when(row < batch.context_lens.shape[0])
    def _attend() -> None:
        _one_tile(batch, row, first_ref[index], head, q_ref, pool_ref, out_ref, options)


def _one_tile(
    batch: BatchRefs,
    row: jax.Array,
    first: jax.Array,
    head: jax.Array,
    q_ref: Ref,  # [T * H, D]
    pool_ref: Ref,  # [rows, D]
    out_ref: Ref,  # [T * H, D]
    options: Options,
) -> None:
    geometry, width, padded = (
        options.geometry,
        options.geometry.head_dim,
        options.geometry.padded_dim,
    )
    size, window = options.tile, options.sliding_window
    tile = tile_of(
        batch,
        row,
        first,
        head,
        queries=options.queries,
        group=options.group,
        num_heads=options.num_heads,
        sliding_window=window,
    )
    q = load_rows(q_ref, tile.rows, tile.used, width, padded).astype(pool_ref.dtype)
    context = context_of(batch, geometry, row)

    def walk(j: jax.Array, state: Softmax, masked: bool) -> Softmax:
        position = j * size + jnp.arange(size, dtype=jnp.int32)
        inside = (position >= tile.lower) & (position < tile.upper) if masked else None
        k_rows = context.pool_rows(0, head, position, inside)
        v_rows = context.pool_rows(1, head, position, inside)
        k = load_rows(pool_ref, k_rows, inside, width, padded)
        v = load_rows(pool_ref, v_rows, inside, width, padded)
        products = online_softmax.dot(q, k, transposed=True)
        scores = online_softmax.prepare(products, options.scale, options.soft_cap)
        if masked:
            scores = jnp.where(seen_by(tile, position, window), scores, -jnp.inf)
        return online_softmax.step(state, scores, v)

    state = online_softmax.start(options.queries, padded)
    begin, end = lax.div(tile.lower, jnp.int32(size)), cdiv(tile.upper, size)
    if window is None:
        unmasked = lax.div(tile.whole, jnp.int32(size))
        state = lax.fori_loop(begin, unmasked, functools.partial(walk, masked=False), state)
        begin = unmasked
    state = lax.fori_loop(begin, end, functools.partial(walk, masked=True), state)
    store_rows(out_ref, tile.rows, online_softmax.finish(state), tile.used)


def paged_prefill(
    out: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """out [T, H, D] with the tokens of the KV rows [num_decodes, num_rows) filled in: attention of
    q [T, H, D]."""
    tokens, num_heads, head_dim = q.shape
    geometry = geometry_of(pool)
    launch = tuned.launch("prefill", pool.dtype.itemsize, geometry.padded_dim)
    group = num_heads // geometry.kv_heads
    # Small buckets do not fill large tiles.
    queries = max(min(launch.queries, power_of_two(tokens * group)), 16, power_of_two(group))
    options = Options(geometry, num_heads, scale, sliding_window, soft_cap, queries, launch.tile)
    tiles = query_tiles(chunk_lengths(batch, KV), tokens, options.tile_tokens)
    flat = (tokens * num_heads, head_dim)
    arguments = (
        *batch_arguments(layer, batch),
        *tiles,
        q.reshape(flat),
        as_rows(pool),
        out.reshape(flat),
    )
    done = pl.pallas_call(
        functools.partial(_kernel, options=options),
        out_shape=jax.ShapeDtypeStruct(flat, q.dtype),
        grid=(geometry.kv_heads, tiles.row.shape[0]),
        input_output_aliases={len(arguments) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name="paged_prefill",
    )(*arguments)
    return done.reshape(q.shape)


def chunk_lengths(batch: AttentionBatch, kind: int) -> jax.Array:
    """Query tokens of each row that is a chunk of this kind, 0 for other rows: int32 [R]."""
    row = jnp.arange(batch.max_rows, dtype=jnp.int32)
    chunk = (row >= batch.num_decodes) & (row < batch.num_rows) & (batch.kind == kind)
    return jnp.where(chunk, batch.query_lens, 0)
