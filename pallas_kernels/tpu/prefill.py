"""Paged attention of ragged prefill chunks on TPU (Mosaic).

A program takes a tile of one row's queries, for a few kv heads, over the row's context: cached
tokens and the chunk itself alike come from the pool, in the manner of flash attention (Dao et al.
2022, section 3.1). No contiguous K or V is made.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.pool import Pool, read_as
from jaxserve.pallas_kernels.tpu import common, halves, softmax, tuning
from jaxserve.pallas_kernels.tpu import stream as tpu_stream
from jaxserve.pallas_kernels.tpu.stream import (
    Buffer,
    Signals,
    Stream,
    buffer_of,
    clean_ends,
    own_scales,
    pool_spec,
)
from jaxserve.pallas_kernels.tpu.tiles import (
    ALIGNED,
    Outputs,
    Tiles,
    make_tiles,
    query_spec,
    seen_by,
)


def _kernel(  # refs are of the pool's dtype where none is named
    # Prefetched scalars.
    items: Any,  # SMEM int32 [7, N]
    layer: Any,  # SMEM int32 [1]
    # Inputs.
    # The item's queries; twice the heads with halves, as in the output.
    q: Any,  # VMEM [heads, group, tile / 16, 16, head_dim]
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, kv_heads, block_size, head_dim]
    sinks: tuple[Any, ...],  # empty, or VMEM float32 [heads, group * tile, 128]
    # Output.
    out: Any,  # HBM [kv_heads, group, units, 16, head_dim], of the output's dtype
    # Scratch: double buffers of K and V, the running softmax, semaphores.
    k: Buffer,
    v: Buffer,
    peak: Any,  # VMEM float32 [heads, group * tile, 128]
    total: Any,  # like peak
    acc: Any,  # VMEM float32 [heads, group * tile, head_dim], of as many heads as q
    done: Any,  # VMEM [heads, group, tile, head_dim], likewise, of the output's dtype
    signals: Signals,
    sent: Any,  # DMA semaphore
    pending: Any,  # SMEM int32 [1]
    *,
    chunk: common.Chunk,
    options: common.Options,
) -> None:
    h, i, window = pl.program_id(0), pl.program_id(1), options.sliding_window
    state = peak, total, acc
    group, tile = done.shape[1:3]
    share = h * chunk.heads, 0, pl.num_programs(1)
    stream = Stream(chunk, window, (items, layer), tables, pool, (k, v), signals, *share)
    outputs = Outputs(items, done, out, sent, pending, done.shape[0])
    softmax.reset(state)

    # Chunk j is in this half of the buffers, while the next one is copied to the other.
    def use(j: jax.Array, half: jax.Array) -> None:
        # The ends of the context may hold stale values, even NaN, and 0 * NaN is NaN.
        for each in (k, v) if options.halves else (v,):
            clean_ends(chunk, items, i, j, each, half, window)
        # Positions of the chunk's slots, and which of them each query sees: [1, group * tile,
        # tokens].
        at = chunk.positions(j, items[common.SIDE, i], 1)
        seen = seen_by(items, i, at, group, tile, window)[None]
        low, high = common.bounds(items, i, window)
        own = ((at >= low) & (at < high))[None]
        if options.halves:
            queries = q[...].reshape(2, group * tile, chunk.head_dim)
            halves.update(state, queries, (k, v), half, seen, own, options)
            return

        @pl.loop(0, chunk.heads)
        def _(n: jax.Array) -> None:
            one = pl.ds(n, 1)
            # One KV head at a time: [1, group * tile, head_dim] by [1, tokens, head_dim].
            queries = q[one].reshape(1, group * tile, chunk.head_dim)
            mine = pl.ds(share[0] + n, 1)
            scales = k.scales_of(half, mine), own_scales(v.scales_of(half, mine), own)
            keys, values = (each.vectors((half, one), q.dtype) for each in (k, v))
            softmax.update(state, one, queries, keys, values, seen, options, scales)

    stream.walk(i, use)
    # Waits until the previous item was sent from `done`, then sends this one.
    outputs.put(h, i, softmax.finished(state, sinks=sinks))


def _cut(
    shape: tuple[int, ...], dtype: DTypeLike, num_heads: int, width: int, interpret: bool
) -> tuple[common.Chunk, int]:
    """The chunks of a pool of this shape, for tables of `width` entries, and the queries of a
    tile."""
    sizes, kv_heads = tuning.sizes(dtype, interpret), shape[2]
    heads = common.most_a_program(kv_heads, sizes.prefill_heads, sizes.cores)
    tile = max(ALIGNED, sizes.tile // pl.next_power_of_2(num_heads // kv_heads))
    return common.make_chunk(shape, dtype, heads, width, sizes), tile


def plan(
    live: jax.Array,
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_heads: int,
    sliding_window: int | None,
    interpret: bool,
) -> Tiles:
    """Plans `prefill`.

    Args:
        live: bool [R], rows with a chunk to compute.
        batch: The batch that will attend.
        shape: The pool's.
        dtype: The pool's.
        num_heads: Query heads of one shard.
        sliding_window: Positions that a token sees; None for all.
        interpret: Run in the interpreter.
    """
    chunk, tile = _cut(shape, dtype, num_heads, batch.table_width, interpret)
    return make_tiles(batch, live, tile, chunk, sliding_window)


def prefill(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    width: int,
    tiles: Tiles,
    options: common.Options,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of the tokens in tiles.

    Args:
        q: [T, H, D], or [T, H, keys] with halves.
        pool: [layers, blocks, kv_heads, block_size, D].
        layer: Index into the whole pool; may be traced.
        width: W, entries of a table row.
        tiles: From `plan`.
        options: The kernel's options.
        sinks: float32 [H], see `attention.paged_attention`; None for none.

    Returns:
        [T, H, D], or [T, H, 2 * halves], in q's dtype; zeros for other tokens.
    """
    num_heads, (kv_heads, _, head_dim) = q.shape[1], pool.shape[2:]
    sums = 2 if options.halves else 1
    group = num_heads // kv_heads
    sizes = tuning.sizes(pool.dtype, options.interpret)
    chunk, tile = _cut(pool.shape, pool.dtype, num_heads, width, options.interpret)
    heads, (layout, work) = chunk.heads, tiles
    buffer = buffer_of(chunk, pool)
    extra, extra_specs = softmax.sinks_of(sinks, kv_heads, heads, tile)
    given = q.astype(read_as(pool.dtype, q.dtype))
    if options.halves:
        given = halves.apart(given, pool, options.halves)
    queries = layout.gather(given, sums * kv_heads)
    call = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, options=options),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(kv_heads // heads, work.number),
            in_specs=[
                query_spec(sums * heads, group, tile, head_dim),
                common.HBM,
                pool_spec(pool),
                extra_specs,
            ],
            out_specs=common.ANY,
            scratch_shapes=[
                buffer,
                buffer,
                *softmax.scratch(heads, group * tile, head_dim, sums),
                pltpu.VMEM((sums * heads, group, tile, head_dim), q.dtype),
                tpu_stream.signals(chunk),
                pltpu.SemaphoreType.DMA,
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=common.compiler(sizes, 1),
        interpret=common.interpreted(options.interpret),
        name="paged_prefill",
    )
    out = layout.scatter(call(*work.scalars(layer), queries, work.tables, pool, extra))
    return halves.together(out, options.halves) if options.halves else out
