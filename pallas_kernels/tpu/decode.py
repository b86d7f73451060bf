"""Paged decode attention on TPU: one token per row over its cached context (Mosaic).

A row's context streams through VMEM in chunks of whole blocks, all heads of a program at once: the
kernel is memory-bound, so it does not matter that the MXU's rows are mostly idle. On two-core chips
the heads are split, which balances for any number and lengths of rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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


def _kernel(  # refs are of the pool's dtype where none is named
    # Prefetched scalars.
    items: Any,  # SMEM int32 [7, R]
    layer: Any,  # SMEM int32 [1]
    # Inputs.
    q: Any,  # VMEM [1, heads, group, head_dim], the item's row; twice the heads with halves
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, kv_heads, block_size, head_dim]
    sinks: tuple[Any, ...],  # empty, or VMEM float32 [heads, group, 128]
    # Output.
    out: Any,  # VMEM like q, of the output's dtype
    # Scratch: double buffers of K and V, the running softmax, semaphores.
    k: Buffer,
    v: Buffer,
    peak: Any,  # VMEM float32 [heads, group, 128]
    total: Any,  # like peak
    acc: Any,  # VMEM float32, the shape of q's row
    signals: Signals,
    *,
    chunk: common.Chunk,
    options: common.Options,
) -> None:
    i, state, window = pl.program_id(1), (peak, total, acc), options.sliding_window
    share = pl.program_id(0) * chunk.heads, 0, pl.num_programs(1)
    stream = Stream(chunk, window, (items, layer), tables, pool, (k, v), signals, *share)
    low, _ = common.bounds(items, i, window)
    softmax.reset(state)

    # Chunk j is in this half of the buffers, while the next one is copied to the other.
    def use(j: jax.Array, half: jax.Array) -> None:
        # The ends of the context may hold stale values, even NaN, and 0 * NaN is NaN.
        for each in (k, v) if options.halves else (v,):
            clean_ends(chunk, items, i, j, each, half, window)
        # Positions of the chunk's slots, [1, tokens], and which of them the token sees.
        at = chunk.positions(j, items[common.SIDE, i], 1)
        seen = ((at >= low) & (at <= items[common.FIRST, i]))[None]
        if options.halves:
            halves.update(state, q[0], (k, v), half, seen, seen, options)
            return
        mine = pl.ds(share[0], chunk.heads)
        scales = k.scales_of(half, mine), own_scales(v.scales_of(half, mine), seen)
        keys, values = (each.vectors((half,), q.dtype) for each in (k, v))
        # All heads of the program at once: [heads, group, head_dim] by [heads, tokens, head_dim].
        softmax.update(state, ..., q[0], keys, values, seen, options, scales)

    stream.walk(i, use)
    out[0] = softmax.finished(state, sinks=sinks).astype(out.dtype)


class Decodes(NamedTuple):
    """The work of decodes, and their rows: live, bool [R]."""

    live: jax.Array
    work: common.Work


def _chunk(shape: tuple[int, ...], dtype: DTypeLike, width: int, interpret: bool) -> common.Chunk:
    """The chunk for a pool of this shape and tables of `width` entries."""
    sizes = tuning.sizes(dtype, interpret)
    heads = common.most_a_program(shape[2], shape[2], sizes.cores)
    return common.make_chunk(shape, dtype, heads, width, sizes)


def plan(
    live: jax.Array,
    batch: AttentionBatch,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sliding_window: int | None,
    interpret: bool,
) -> Decodes:
    """Plans `decode`.

    Args:
        live: bool [R], rows that decode.
        batch: The batch that will attend.
        shape: The pool's.
        dtype: The pool's.
        sliding_window: Positions that a token sees; None for all.
        interpret: Run in the interpreter.
    """
    chunk = _chunk(shape, dtype, batch.table_width, interpret)
    items, number = common.decode_items(live, batch, chunk, sliding_window)
    return Decodes(live, common.make_work(items, number, batch))


def decode(
    q: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    width: int,
    decodes: Decodes,
    options: common.Options,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one token for each row that decodes.

    Args:
        q: [R, H, D], or [R, H, keys] with halves.
        pool: [layers, blocks, kv_heads, block_size, D].
        layer: Index into the whole pool; may be traced.
        width: W, entries of a table row.
        decodes: From `plan`.
        options: The kernel's options.
        sinks: float32 [H], see `attention.paged_attention`; None for none.

    Returns:
        [R, H, D], or [R, H, 2 * halves], in q's dtype; zeros for other rows.
    """
    kv_heads = pool.shape[2]
    group, sums = q.shape[1] // kv_heads, 2 if options.halves else 1
    given = halves.apart(q, pool, options.halves) if options.halves else q
    rows, _, head_dim = given.shape
    sizes = tuning.sizes(pool.dtype, options.interpret)
    chunk, work = _chunk(pool.shape, pool.dtype, width, options.interpret), decodes.work
    heads = chunk.heads
    row = pl.BlockSpec(
        (1, sums * heads, group, head_dim),
        lambda h, i, items, *_: (items[common.ROW, i], h, 0, 0),
    )
    buffer = buffer_of(chunk, pool)
    extra, extra_specs = softmax.sinks_of(sinks, kv_heads, heads, 1)
    call = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, options=options),
        out_shape=jax.ShapeDtypeStruct((rows, sums * kv_heads, group, head_dim), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(kv_heads // heads, work.number),
            in_specs=[row, common.HBM, pool_spec(pool), extra_specs],
            out_specs=row,
            scratch_shapes=[
                buffer,
                buffer,
                *softmax.scratch(heads, group, head_dim, sums),
                tpu_stream.signals(chunk),
            ],
        ),
        compiler_params=common.compiler(sizes, 1),
        interpret=common.interpreted(options.interpret),
        name="paged_decode",
    )
    queries = given.astype(read_as(pool.dtype, q.dtype)).reshape(rows, -1, group, head_dim)
    out = call(*work.scalars(layer), queries, work.tables, pool, extra).reshape(given.shape)
    out = halves.together(out, options.halves) if options.halves else out
    # Rows without an item were never written.
    return jnp.where(decodes.live[:, None, None], out, 0)
