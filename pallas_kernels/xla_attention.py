"""Paged attention and pool writes in plain XLA operations: the backend that runs everywhere.

Shaped by what XLA's CPU compiler does well: gathers that copy long contiguous runs (whole blocks,
as the root of a computation of their own, so that no reshape is fused into them), matmuls batched
over leading dimensions, and few operations a loop step. Loops have traced bounds: padding rows and
the unused part of a table cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch

DECODE_GROUP = 8  # rows that step through their context together
DECODE_CONTEXT = 64  # tokens of context a step
TILE_QUERIES = 128  # a prefill tile: so many queries, times so many tokens of context
TILE_CONTEXT = 128
# Finite, so that the running maximum of a row that has seen nothing yet gives no NaN.
NOTHING_SEEN = -1e30
BATCH_AND_HEAD = ((0, 1), (0, 1))


def write_kv(
    pool: jax.Array, layer: jax.Array | int, k: jax.Array, v: jax.Array, batch: AttentionBatch
) -> jax.Array:
    """See `attention.write_kv`."""
    blocks, block_size = pool.shape[1], pool.shape[3]
    rows = jnp.minimum(batch.token_row, batch.max_rows - 1)
    index = jnp.arange(batch.max_tokens, dtype=jnp.int32) - batch.query_start[rows]
    position = batch.context_lens[rows] - batch.query_lens[rows] + index
    offset = position % block_size
    slot = jnp.where(batch.direction[rows] == RIGHT, block_size - 1 - offset, offset)
    entry = jnp.clip(position // block_size, 0, batch.table_width - 1)
    ids = batch.tables[rows, :, entry]
    # Padding tokens go to a block that does not exist: the scatter drops them.
    ids = jnp.where((batch.token_row < batch.max_rows)[:, None], ids, blocks)
    values = jnp.stack([k, v], axis=1).astype(pool.dtype)
    return pool.at[layer, ids, :, slot[:, None]].set(values, mode="drop")


class _Options(TypedDict):
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class _Softmax(NamedTuple):
    """A running softmax over chunks of context."""

    peak: jax.Array  # [N, kv_heads, M, 1], the highest score so far
    total: jax.Array  # [N, kv_heads, M, 1], sum of weights
    acc: jax.Array  # [N, kv_heads, M, D], weighted sum of values


def _start(shape: tuple[int, int, int], head_dim: int) -> _Softmax:
    return _Softmax(
        jnp.full((*shape, 1), NOTHING_SEEN, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )


def _finish(state: _Softmax) -> jax.Array:
    """The attention output [N, kv_heads, M, D]; zeros where nothing was seen. A row's own NaN
    stays NaN."""
    return jnp.where(state.total == 0, 0, state.acc / state.total)


def _step(
    state: _Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    soft_cap: float | None,
) -> _Softmax:
    """One chunk of context: q [N, kv_heads, M, D] (scaled), k, v [N, kv_heads, S, D]; seen, bool,
    broadcasts to [N, kv_heads, M, S]. v is finite where a row with anything seen does not look."""
    scores = lax.dot_general(
        q, k, (((3,), (3,)), BATCH_AND_HEAD), preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    fade = jnp.exp(state.peak - peak)
    out = lax.dot_general(
        weights.astype(v.dtype),
        v,
        (((3,), (2,)), BATCH_AND_HEAD),
        preferred_element_type=jnp.float32,
    )
    total = state.total * fade + weights.sum(axis=-1, keepdims=True)
    return _Softmax(peak, total, state.acc * fade + out)


def _take(flat: jax.Array, ids: jax.Array) -> jax.Array:
    """flat [X, E], ids [N] in [0, X) -> [N, E], a copy of N contiguous runs."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    promise = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(flat, ids[:, None], numbers, (1, flat.shape[1]), mode=promise)


def _take_kv(
    flat: jax.Array,
    k_ids: jax.Array,
    v_ids: jax.Array,
    shape: tuple[int, int, int, int],
    own: jax.Array,
    all_own: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """K and V runs of flat [X, E] as two arrays of `shape` [N, kv_heads, S, D].

    own: bool, broadcasts to shape: V's slots that hold the row's tokens; the others are zeroed,
    since a weight of 0 times NaN is NaN. all_own: whether `own` is true throughout, the usual
    case, where V is copied as it is. Both branches end in a flat copy, which the reshape outside
    cannot be fused into; that alone saves a quarter of the time.
    """

    def plain(_: None) -> tuple[jax.Array, jax.Array]:
        return _take(flat, k_ids), _take(flat, v_ids)

    def cleaned(_: None) -> tuple[jax.Array, jax.Array]:
        v = _take(flat, v_ids)
        clean = jnp.where(own, v.reshape(shape), 0).reshape(v.shape)
        return _take(flat, k_ids), clean

    k, v = lax.cond(all_own, plain, cleaned, None)
    return k.reshape(shape), v.reshape(shape)


def _decode(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """q [R, H, D], one token a row, row r over lens[r] cached tokens (0: none) -> [R, H, D].

    Rows are sorted by length and taken in groups; step j of a group is chunk j of each of its
    rows' contexts, so that a group costs what its longest row does.
    """
    kv_heads, block_size, head_dim = pool.shape[2:]
    rows, num_heads, _ = q.shape
    group = min(DECODE_GROUP, rows)
    # For one row, whole blocks one by one are faster than a chunk of them put together.
    chunk = _chunk_blocks(DECODE_CONTEXT, block_size, batch) if rows > 1 else 1
    width, context = chunk * block_size, batch.table_width * block_size
    flat, runs_of = _runs(pool, layer, chunk)
    padded = jnp.pad(batch.tables, ((0, 0), (0, 0), (0, -batch.table_width % chunk)))
    order = jnp.pad(jnp.argsort(-lens), (0, -rows % group), constant_values=rows)
    queries = (q * scale).astype(pool.dtype)
    queries = queries.reshape(rows, kv_heads, num_heads // kv_heads, head_dim)

    def one_group(i: jax.Array, out: jax.Array) -> jax.Array:
        picked = lax.dynamic_slice_in_dim(order, i * group, group)
        tables = padded.at[picked].get(mode="clip")
        length = lens.at[picked].get(mode="fill", fill_value=0)
        side = batch.direction.at[picked].get(mode="clip")
        query = queries.at[picked].get(mode="clip")
        slot = _in_token_order(chunk, block_size, side)
        start = jnp.maximum(length - (sliding_window or context), 0)

        def one_chunk(j: jax.Array, state: _Softmax) -> _Softmax:
            ids = lax.dynamic_slice_in_dim(tables, j * chunk, chunk, axis=2)
            position = j * width + slot
            seen = (position < length[:, None]) & (position >= start[:, None])
            reads = (length > j * width) & (start < (j + 1) * width)
            own = seen | ~reads[:, None]
            runs = runs_of(ids[:, 0]), runs_of(ids[:, 1])
            shape = (group, kv_heads, width, head_dim)
            k, v = _take_kv(flat, *runs, shape, own[:, None, :, None], own.all())
            new = _step(state, query, k, v, seen[:, None, None], soft_cap)
            # A row that this chunk is nothing to adds 0 times whatever is there: keep what it has.
            return new._replace(acc=jnp.where(reads[:, None, None, None], new.acc, state.acc))

        first = jnp.where(length > 0, start, jnp.iinfo(jnp.int32).max).min() // width
        state = _start((group, kv_heads, num_heads // kv_heads), head_dim)
        state = lax.fori_loop(first, -(-length.max() // width), one_chunk, state)
        done = _finish(state).reshape(group, num_heads, head_dim).astype(q.dtype)
        return out.at[picked].set(done, mode="drop")

    groups = -(-jnp.sum(lens > 0) // group)
    return lax.fori_loop(0, groups, one_group, jnp.zeros_like(q))


def _chunk_blocks(tokens: int, block_size: int, batch: AttentionBatch) -> int:
    """Blocks of a chunk of about so many tokens of context."""
    return min(max(1, tokens // block_size), batch.table_width)


def _in_token_order(chunk: int, block_size: int, direction: jax.Array) -> jax.Array:
    """The token that each slot of a chunk of blocks holds, counted from the chunk's first, int32
    [N, chunk * block_size], for directions [N]."""
    slot = jnp.arange(chunk * block_size, dtype=jnp.int32)
    mirrored = slot + block_size - 1 - 2 * (slot % block_size)
    return jnp.where(direction[:, None] == RIGHT, mirrored, slot)


def _runs(
    pool: jax.Array, layer: jax.Array | int, chunk: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """How to gather chunks of blocks as [N, kv_heads, chunk * block_size, D]: (flat, runs_of).

    flat [X, E] is the pool as runs to copy, runs_of(ids [N, chunk]) their indices in order. A
    single block is one run already; of more, each head's part is one.
    """
    layers, blocks, kv_heads, block_size, head_dim = pool.shape
    parts = 1 if chunk == 1 else kv_heads
    flat = pool.reshape(layers * blocks * parts, kv_heads // parts * block_size * head_dim)

    def runs_of(ids: jax.Array) -> jax.Array:
        part = jnp.arange(parts, dtype=jnp.int32)[:, None]
        return ((ids[:, None, :] + layer * blocks) * parts + part).reshape(-1)

    return flat, runs_of


def _prefill(
    out: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Fill out [T, H, D] for the tokens of rows [num_decodes, num_rows)."""
    tokens, num_heads, head_dim = q.shape
    kv_heads = pool.shape[2]
    tile = min(TILE_QUERIES, tokens)
    grouped = num_heads // kv_heads
    # A tile may reach past the last token.
    queries = jnp.pad((q * scale).astype(pool.dtype), ((0, tile), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))

    def one_row(row: jax.Array, out: jax.Array) -> jax.Array:
        length, context = batch.query_lens[row], batch.context_lens[row]
        chunk_of, width = _context_reader(pool, layer, batch, row)

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

            def one_chunk(j: jax.Array, state: _Softmax) -> _Softmax:
                k, v, position = chunk_of(j, lower)
                seen = position <= at[:, None]
                if sliding_window is not None:
                    seen &= position > at[:, None] - sliding_window
                return _step(state, query, k, v, jnp.tile(seen, (grouped, 1)), soft_cap)

            upper = context - length + jnp.minimum((i + 1) * tile, length)
            state = _start((1, kv_heads, grouped * tile), head_dim)
            done = _finish(lax.fori_loop(lower // width, -(-upper // width), one_chunk, state))
            done = done.reshape(kv_heads, grouped, tile, head_dim).transpose(2, 0, 1, 3)
            done = done.reshape(tile, num_heads, head_dim).astype(out.dtype)
            # The tile may reach into another row's tokens: keep what is there.
            old = lax.dynamic_slice_in_dim(out, token, tile, axis=0)
            done = jnp.where((index < length)[:, None, None], done, old)
            return lax.dynamic_update_slice_in_dim(out, done, token, axis=0)

        return lax.fori_loop(0, -(-length // tile), one_tile, out)

    return lax.fori_loop(batch.num_decodes, batch.num_rows, one_row, out)[:tokens]


def _context_reader(
    pool: jax.Array, layer: jax.Array | int, batch: AttentionBatch, row: jax.Array
) -> tuple[Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]], int]:
    """How to read a row's context in chunks of `width` tokens: (read, width).

    read(j, lower) -> k, v [1, kv_heads, width, D] of chunk j and the positions int32 [width] of
    their slots; v is zero outside of [lower, context).
    """
    kv_heads, block_size, head_dim = pool.shape[2:]
    chunk = _chunk_blocks(TILE_CONTEXT, block_size, batch)
    width = chunk * block_size
    flat, runs_of = _runs(pool, layer, chunk)
    table = jnp.pad(batch.tables[row], ((0, 0), (0, -batch.table_width % chunk)))
    slot = _in_token_order(chunk, block_size, batch.direction[row][None])[0]
    context = batch.context_lens[row]

    def read(j: jax.Array, lower: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        ids = lax.dynamic_slice_in_dim(table, j * chunk, chunk, axis=1)
        position = j * width + slot
        k, v = _take_kv(
            flat,
            runs_of(ids[:1]),
            runs_of(ids[1:]),
            (1, kv_heads, width, head_dim),
            ((position >= lower) & (position < context))[:, None],
            (j * width >= lower) & ((j + 1) * width <= context),
        )
        return k, v, position

    return read, width


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    decode_only: bool,
) -> jax.Array:
    """See `attention.paged_attention`."""
    options: _Options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
    }
    if decode_only:
        lens = jnp.where(batch.query_lens > 0, batch.context_lens, 0)
        return _decode(q, pool, layer, batch, lens, **options)
    is_decode = jnp.arange(batch.max_rows, dtype=jnp.int32) < batch.num_decodes
    token = jnp.where(is_decode, batch.query_start, batch.max_tokens)
    picked = q.at[token].get(mode="fill", fill_value=0)
    lens = jnp.where(is_decode, batch.context_lens, 0)
    decoded = _decode(picked, pool, layer, batch, lens, **options)
    out = jnp.zeros_like(q).at[token].set(decoded, mode="drop")
    return _prefill(out, q, pool, layer, batch, **options)
