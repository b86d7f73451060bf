"""Paged attention over K and V in plain XLA operations: the backend that runs everywhere.

Shaped by what XLA's CPU compiler does well: gathers that copy long contiguous runs (whole blocks,
as the root of a computation of their own, so that no reshape is fused into them), matmuls batched
over leading dimensions, and few operations per loop step. Loops have traced bounds: padding rows,
rows of the other cache kind and the unused part of a table cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.batch import KV, AttentionBatch
from jaxserve.pallas_kernels.pool import Pool, read_as
from jaxserve.pallas_kernels.xla import softmax
from jaxserve.pallas_kernels.xla.gather import chunk_blocks, gather_runs, in_token_order, runs
from jaxserve.pallas_kernels.xla.softmax import Softmax, Step

DECODE_GROUP = 8  # rows that step through their context together
DECODE_CONTEXT = 64  # tokens of context per step
SHARED_CONTEXT = 128  # if all heads share one vector: more arithmetic per token
TILE_QUERIES = 128  # of a prefill tile, times as many tokens of context
TILE_CONTEXT = 128


class Read(NamedTuple):
    """How to read a row's context in chunks.

    Attributes:
        width: Tokens of a chunk.
        chunk: (j, lower) -> k and v [1, kv_heads, width, D] of chunk j, and the positions int32
            [width] of their slots. v is finite outside of [lower, context).
    """

    width: int
    chunk: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def decode(
    queries: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    lens: jax.Array,
    step: Step,
    *,
    sliding_window: int | None,
    shared: bool = False,
    halves: int = 0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one token per row over its cached context. Rows are sorted by length and
    processed in groups. Step j of a group is chunk j of each of its rows' contexts, so a group
    costs as much as its longest row.

    Args:
        queries: [R, kv_heads, M, D], scaled, in the dtype of `read_as`; as wide as keys with
            `halves`.
        pool: [layers, blocks, kv_heads, block_size, D].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        lens: int32 [R], cached tokens of each row; 0 for none.
        step: Adds a chunk to the running softmax.
        sliding_window: Positions that a token sees; None for all.
        shared: Whether the cache has hidden vectors instead of K and V.
        halves: See `Scoring`.
        sinks: float32 [kv_heads, M, 1], see `softmax.finish`; None for none.

    Returns:
        Shape and dtype of queries.
    """
    kv_heads, block_size, head_dim = pool.shape[2:]
    rows, _, many, result_dim = queries.shape
    group = min(DECODE_GROUP, rows)
    chunk = chunk_blocks(SHARED_CONTEXT if shared else DECODE_CONTEXT, block_size, batch)
    if rows == 1 and not shared:
        chunk = 1  # whole blocks one by one are faster than joined to a chunk
    width, context = chunk * block_size, batch.table_width * block_size
    block_runs = runs(pool, layer, chunk)
    planes = 1 if shared else 2
    padded = jnp.pad(batch.tables[:, :planes], ((0, 0), (0, 0), (0, -batch.table_width % chunk)))
    order = jnp.pad(jnp.argsort(-lens), (0, -rows % group), constant_values=rows)
    shape = (group, kv_heads, width, head_dim)

    def one_group(i: jax.Array, out: jax.Array) -> jax.Array:
        picked = lax.dynamic_slice_in_dim(order, i * group, group)
        tables = padded.at[picked].get(mode="clip")
        length = lens.at[picked].get(mode="fill", fill_value=0)
        side = batch.direction.at[picked].get(mode="clip")
        query = queries.at[picked].get(mode="clip")
        slot = in_token_order(chunk, block_size, side)
        start = jnp.maximum(length - (sliding_window or context), 0)

        def one_chunk(j: jax.Array, state: Softmax) -> Softmax:
            ids = lax.dynamic_slice_in_dim(tables, j * chunk, chunk, axis=2)
            position = j * width + slot
            seen = (position < length[:, None]) & (position >= start[:, None])
            reads = (length > j * width) & (start < (j + 1) * width)
            own = seen | ~reads[:, None]
            wanted = [block_runs.of(ids[:, plane]) for plane in range(planes)]
            whole = own[:, None, :, None], own.all()
            read = gather_runs(block_runs, wanted, shape, *whole, query.dtype, halves)
            new = step(state, query, read[0], read[-1], seen[:, None, None])
            # A row that sees nothing of this chunk would add 0 times stale values: keep its state.
            return new._replace(acc=jnp.where(reads[:, None, None, None], new.acc, state.acc))

        first = jnp.where(length > 0, start, jnp.iinfo(jnp.int32).max).min() // width
        state = softmax.start((group, kv_heads, many), result_dim, shared=shared)
        state = lax.fori_loop(first, -(-length.max() // width), one_chunk, state)
        done = softmax.finish(state, sinks).astype(out.dtype)
        return out.at[picked].set(done, mode="drop")

    groups = -(-jnp.sum(lens > 0) // group)
    return lax.fori_loop(0, groups, one_group, jnp.zeros_like(queries))


def attend_row(
    out: jax.Array,
    queries: jax.Array,
    batch: AttentionBatch,
    row: jax.Array,
    read: Read,
    step: Step,
    *,
    kv_heads: int,
    tile: int,
    sliding_window: int | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Fills in the output for one row's tokens.

    Args:
        out: [T + tile, H, D], since a tile may reach past the last token.
        queries: [T + tile, H, D], scaled.
        batch: The step's rows and tokens.
        row: int32 [], row of the batch.
        read: Reads the row's context.
        step: Adds a chunk to the running softmax.
        kv_heads: KV heads of one shard.
        tile: Queries that are processed together.
        sliding_window: Positions that a token sees; None for all.
        sinks: float32 [kv_heads, H // kv_heads, 1], see `softmax.finish`; None for none.

    Returns:
        The output.
    """
    num_heads, head_dim = queries.shape[1:]
    grouped = num_heads // kv_heads
    length, context = batch.query_lens[row], batch.context_lens[row]

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        token = batch.query_start[row] + i * tile
        query = lax.dynamic_slice_in_dim(queries, token, tile, axis=0)
        query = query.reshape(tile, kv_heads, grouped, head_dim).transpose(1, 2, 0, 3)
        query = query.reshape(1, kv_heads, grouped * tile, head_dim)
        index = i * tile + jnp.arange(tile, dtype=jnp.int32)
        lower = jnp.zeros_like(context)
        if sliding_window is not None:
            lower = jnp.maximum(context - length + i * tile - sliding_window + 1, 0)
        at = jnp.where(index < length, context - length + index, -1)

        def one_chunk(j: jax.Array, state: Softmax) -> Softmax:
            k, v, position = read.chunk(j, lower)
            seen = position <= at[:, None]
            if sliding_window is not None:
                seen &= position > at[:, None] - sliding_window
            return step(state, query, k, v, jnp.tile(seen, (grouped, 1)))

        upper = context - length + jnp.minimum((i + 1) * tile, length)
        state = softmax.start((1, kv_heads, grouped * tile), head_dim)
        state = lax.fori_loop(lower // read.width, -(-upper // read.width), one_chunk, state)
        of_queries = None if sinks is None else jnp.repeat(sinks, tile, axis=1)
        done = softmax.finish(state, of_queries)
        done = done.reshape(kv_heads, grouped, tile, head_dim).transpose(2, 0, 1, 3)
        done = done.reshape(tile, num_heads, head_dim).astype(out.dtype)
        # The tile may reach into another row's tokens: keep what is there.
        old = lax.dynamic_slice_in_dim(out, token, tile, axis=0)
        done = jnp.where((index < length)[:, None, None], done, old)
        return lax.dynamic_update_slice_in_dim(out, done, token, axis=0)

    return lax.fori_loop(0, -(-length // tile), one_tile, out)


def _prefill(
    out: jax.Array,
    queries: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    step: Step,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """Fill out [T, H, D] for the tokens of KV rows in [num_decodes, num_rows)."""
    tile = min(TILE_QUERIES, len(out))
    padding = ((0, tile), (0, 0), (0, 0))
    padded = jnp.pad(queries, padding)
    # A hidden row has no tokens here.
    lens = jnp.where(batch.kind == KV, batch.query_lens, 0)
    mine = dataclasses.replace(batch, query_lens=lens)

    def one_row(row: jax.Array, out: jax.Array) -> jax.Array:
        return attend_row(
            out,
            padded,
            mine,
            row,
            _read_blocks(pool, layer, batch, row, queries.dtype, scoring.halves),
            step,
            kv_heads=pool.shape[2],
            tile=tile,
            sliding_window=scoring.sliding_window,
            sinks=sinks,
        )

    out = lax.fori_loop(batch.num_decodes, batch.num_rows, one_row, jnp.pad(out, padding))
    return out[: len(queries)]


def _read_blocks(
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    row: jax.Array,
    dtype: DTypeLike,
    halves: int,
) -> Read:
    """Reads a row's context from K and V blocks. halves: see `Scoring`."""
    kv_heads, block_size, head_dim = pool.shape[2:]
    chunk = chunk_blocks(TILE_CONTEXT, block_size, batch)
    width = chunk * block_size
    block_runs = runs(pool, layer, chunk)
    table = jnp.pad(batch.tables[row], ((0, 0), (0, -batch.table_width % chunk)))
    slot = in_token_order(chunk, block_size, batch.direction[row][None])[0]
    context = batch.context_lens[row]

    def chunk_of(j: jax.Array, lower: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        ids = lax.dynamic_slice_in_dim(table, j * chunk, chunk, axis=1)
        position = j * width + slot
        read = gather_runs(
            block_runs,
            [block_runs.of(ids[:1]), block_runs.of(ids[1:])],
            (1, kv_heads, width, head_dim),
            ((position >= lower) & (position < context))[:, None],
            (j * width >= lower) & ((j + 1) * width <= context),
            dtype,
            halves,
        )
        return read[0], read[-1], position

    return Read(width, chunk_of)


def paged_attention(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scoring: Scoring,
    decode_only: bool,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `attention.paged_attention`: q [T, H, D] -> the same, or [T, H, 2 * halves], decodes in
    groups of rows, chunks row by row."""
    out = _attend(q, pool, layer, batch, scoring, sinks, decode_only=decode_only)
    # Keys are their own values: of these what is one.
    return out[..., : 2 * scoring.halves] if scoring.halves else out


def _attend(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    scoring: Scoring,
    sinks: jax.Array | None,
    *,
    decode_only: bool,
) -> jax.Array:
    """[T, H, D]."""
    kv_heads = pool.shape[2]
    step = softmax.step(scoring.soft_cap)
    scaled = (q * scoring.scale).astype(read_as(pool.dtype, q.dtype))

    of_groups = None if sinks is None else sinks.reshape(kv_heads, -1, 1)
    masks: dict[str, Any] = {"sliding_window": scoring.sliding_window, "sinks": of_groups}
    masks["halves"] = scoring.halves

    def decodes(queries: jax.Array, lens: jax.Array) -> jax.Array:
        shape = (batch.max_rows, kv_heads, q.shape[1] // kv_heads, q.shape[2])
        done = decode(queries.reshape(shape), pool, layer, batch, lens, step, **masks)
        return done.reshape(queries.shape).astype(q.dtype)

    wanted = batch.kind == KV
    if decode_only:
        return decodes(scaled, jnp.where(wanted & (batch.query_lens > 0), batch.context_lens, 0))
    wanted &= jnp.arange(batch.max_rows, dtype=jnp.int32) < batch.num_decodes
    token = jnp.where(wanted, batch.query_start, batch.max_tokens)
    lens = jnp.where(wanted, batch.context_lens, 0)
    decoded = decodes(scaled.at[token].get(mode="fill", fill_value=0), lens)
    out = jnp.zeros_like(q).at[token].set(decoded, mode="drop")
    return _prefill(out, scaled, pool, layer, batch, step, scoring, of_groups)
