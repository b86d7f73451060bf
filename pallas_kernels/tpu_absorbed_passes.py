"""Absorbed attention on TPU in two passes over x, where its sums do not fit VMEM or its scores want
a sum over devices: scores, softmax in XLA, sums. And what those of one pass share with them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import tpu_softmax, tpu_stream, tuned_tpu
from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch
from jaxserve.pallas_kernels.tpu_common import (
    ANY,
    BEGIN,
    END,
    HBM,
    ROW,
    SIDE,
    Chunk,
    Options,
    Work,
    bounds,
    compiler,
    interpreted,
    make_chunk,
)
from jaxserve.pallas_kernels.tpu_softmax import dot
from jaxserve.pallas_kernels.tpu_stream import Signals, Stream, clean
from jaxserve.pallas_kernels.tuned_tpu import Sizes

TOGETHER = 8  # parts of x whose products the compiler may interleave


def by_parts(parts: int, one: Any) -> None:
    """one(part) for each part, `TOGETHER` of them to a turn of the loop."""
    step = max(n for n in range(1, TOGETHER + 1) if parts % n == 0)

    @pl.loop(0, parts // step)
    def _(turn: jax.Array) -> None:
        for n in range(step):
            one(turn * step + n)


def products(q: Any, x: Any, half: jax.Array, sums: Any) -> jax.Array:
    """qx . x over all parts: q VMEM [1, parts, H, head_dim], x VMEM [2, parts, tokens, head_dim]
    -> float32 [H, tokens], gathered in sums, VMEM of that shape."""
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def one(part: jax.Array) -> None:
        sums[...] += dot(q[0, part], x[half, part], transposed=True)

    by_parts(x.shape[1], one)
    return sums[...]


def clean_ends(
    chunk: Chunk,
    items: Any,
    i: jax.Array,
    j: jax.Array,
    x: Any,
    half: jax.Array,
    window: int | None,
) -> None:
    """Zero what is not the row's own in a chunk at either end of what it sees."""
    low, high = bounds(items, i, window)

    @pl.when((j * chunk.tokens < low) | ((j + 1) * chunk.tokens > high))
    def _() -> None:
        at = chunk.positions(j, items[SIDE, i], 0)
        clean(x, half, (at >= low) & (at < high))


def stream(
    chunk: Chunk,
    window: int | None,
    prefetched: tuple[Any, Any],
    tables: Any,
    pool: Any,
    x: Any,
    signals: Signals,
) -> Stream:
    """Of a kernel whose grid is its items."""
    count = pl.num_programs(0)
    return Stream(chunk, window, prefetched, tables, pool, (x,), signals, 0, count)


def launch(
    kernel: Any,
    work: Work,
    layer: jax.Array | int,
    given: jax.Array,
    pool: jax.Array,
    specs: tuple[pl.BlockSpec, pl.BlockSpec],
    out: jax.ShapeDtypeStruct,
    scratch: list[Any],
    sizes: Sizes,
    chunk: Chunk,
    options: Options,
) -> jax.Array:
    """pallas_call over the work's items, of which one brings its part of `given`."""
    call = pl.pallas_call(
        functools.partial(kernel, chunk=chunk, options=options),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(work.number,),
            in_specs=[specs[0], HBM, ANY],
            out_specs=specs[1],
            scratch_shapes=[
                pltpu.VMEM((2, *chunk.shape), pool.dtype),
                *scratch,
                tpu_stream.signals(chunk),
            ],
        ),
        compiler_params=compiler(sizes, 0),
        interpret=interpreted(options.interpret),
        name=f"absorbed{kernel.__name__}",
    )
    return call(*work.scalars(layer), given, work.tables, pool)


def _scores(
    items: Any,  # SMEM int32 [7, N]: an item is a chunk of a row
    layer: Any,  # SMEM int32 [1]
    q: Any,  # VMEM [1, parts, H, head_dim]
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, parts, block_size, head_dim]
    out: Any,  # VMEM float32 [1, 1, H, tokens]: raw products
    x: Any,  # VMEM [2, parts, tokens, head_dim]
    sums: Any,  # VMEM float32 [H, tokens]
    signals: Signals,
    *,
    chunk: Chunk,
    options: Options,
) -> None:
    i, window = pl.program_id(0), options.sliding_window

    def use(j: jax.Array, half: jax.Array) -> None:
        clean_ends(chunk, items, i, j, x, half, window)
        out[0, 0] = products(q, x, half, sums)

    stream(chunk, window, (items, layer), tables, pool, x, signals).walk(i, use)


def _weighted(
    items: Any,  # SMEM int32 [7, N]: an item is a chunk of a row, in order
    layer: Any,  # SMEM int32 [1]
    weights: Any,  # VMEM float32 [1, 1, H, tokens], zeros where not seen
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, parts, block_size, head_dim]
    out: Any,  # VMEM float32 [1, parts, H, head_dim], the row's: adds up over its chunks
    x: Any,  # VMEM [2, parts, tokens, head_dim]
    signals: Signals,
    *,
    chunk: Chunk,
    options: Options,
) -> None:
    i, window = pl.program_id(0), options.sliding_window

    @pl.when((i == 0) | (items[ROW, jnp.maximum(i - 1, 0)] != items[ROW, i]))
    def _() -> None:
        out[...] = jnp.zeros(out.shape, jnp.float32)

    def use(j: jax.Array, half: jax.Array) -> None:
        clean_ends(chunk, items, i, j, x, half, window)

        def one(part: jax.Array) -> None:
            out[0, part] += dot(weights[0, 0].astype(x.dtype), x[half, part])

        by_parts(chunk.heads, one)

    stream(chunk, window, (items, layer), tables, pool, x, signals).walk(i, use)


def split(items: jax.Array, number: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Items of rows [7, R] as items of one chunk each [7, R * chunks], and their number."""
    rows = items.shape[1]
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), chunks)
    j = jnp.tile(jnp.arange(chunks, dtype=jnp.int32), rows)
    live = (row < number) & (j >= items[BEGIN, row]) & (j < items[END, row])
    order = jnp.argsort(~live, stable=True)
    row, j = row[order], j[order]
    split = items[:, row].at[BEGIN].set(j).at[END].set(j + 1)
    return split, live.sum(dtype=jnp.int32)


def two_passes(
    queries: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    live: jax.Array,
    work: Work,
    options: Options,
    axis_name: str | None,
) -> jax.Array:
    """queries [R, parts, H, head_dim] -> float32 of the same shape. work: of `split` items."""
    rows, parts, num_heads, head_dim = queries.shape
    sizes = tuned_tpu.sizes(pool.dtype, options.interpret)
    chunk = make_chunk(pool.shape, pool.dtype, parts, batch.table_width, sizes)
    chunks = -(-batch.table_width // chunk.blocks)
    row = pl.BlockSpec(
        (1, parts, num_heads, head_dim), lambda i, items, *_: (items[ROW, i], 0, 0, 0)
    )
    part = pl.BlockSpec(
        (1, 1, num_heads, chunk.tokens),
        lambda i, items, *_: (items[ROW, i], items[BEGIN, i], 0, 0),
    )
    shape = jax.ShapeDtypeStruct((rows, chunks, num_heads, chunk.tokens), jnp.float32)
    sums = [pltpu.VMEM((num_heads, chunk.tokens), jnp.float32)]
    run = functools.partial(launch, sizes=sizes, chunk=chunk, options=options)
    raw = run(_scores, work, layer, queries, pool, (row, part), shape, sums)
    seen = _seen(batch, live, chunk, chunks, options.sliding_window)
    seen = seen.reshape(rows, chunks, 1, chunk.tokens)
    # What was never written may be anything: nothing of it may reach the sum over devices.
    raw = jnp.where(seen, raw, 0)
    if axis_name is not None:
        raw = lax.psum(raw, axis_name)
    scores = tpu_softmax.scored(raw, seen, options)
    # A row without anything seen has NaN here; it has no item either.
    weights = jax.nn.softmax(scores, axis=(1, 3))
    out = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    return run(_weighted, work, layer, weights, pool, (part, row), out, [])


def _seen(
    batch: AttentionBatch, live: jax.Array, chunk: Chunk, chunks: int, window: int | None
) -> jax.Array:
    """bool [R, chunks * tokens]: the slots of its context that each row's decode sees."""
    slot = jnp.arange(chunks * chunk.tokens, dtype=jnp.int32)
    mirrored = slot + chunk.block_size - 1 - 2 * (slot % chunk.block_size)
    at = jnp.where((batch.direction == RIGHT)[:, None], mirrored, slot)
    lens = jnp.where(live, batch.context_lens, 0)[:, None]
    seen = at < lens
    return seen if window is None else seen & (at >= lens - window)
