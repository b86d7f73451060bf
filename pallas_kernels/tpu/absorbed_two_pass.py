"""Absorbed attention on TPU in two passes over x, where its sums do not fit VMEM or its scores want
a sum over devices: scores, softmax in XLA, sums. And what those of one pass share with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.batch import RIGHT, AttentionBatch
from jaxserve.pallas_kernels.sharding import sum_as_far
from jaxserve.pallas_kernels.tpu import softmax, tuning
from jaxserve.pallas_kernels.tpu import stream as tpu_stream
from jaxserve.pallas_kernels.tpu.common import (
    ANY,
    BEGIN,
    END,
    HBM,
    ROW,
    Chunk,
    Options,
    Work,
    compiler,
    interpreted,
    make_chunk,
    make_work,
)
from jaxserve.pallas_kernels.tpu.softmax import dot
from jaxserve.pallas_kernels.tpu.stream import Signals, Stream, clean_ends
from jaxserve.pallas_kernels.tpu.tuning import Sizes

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


class Shares(NamedTuple):
    """Items cut over a chip's cores. cuts: int32 [cores + 1], the first item of each core's share,
    and the end of the last one's; steps: int32 [], items of the largest share."""

    work: Work
    cuts: jax.Array
    steps: jax.Array


def share(
    items: jax.Array, number: jax.Array, batch: AttentionBatch, width: int, cores: int
) -> tuple[Shares, Shares]:
    """Items of rows [7, R], of which so many count, and the same work in items of one chunk each,
    of which a row has up to `width`. A row is one core's, which adds its chunks up in its own
    memory; each core has about as many chunks, and some where there are as many rows as cores."""
    cores = min(cores, batch.max_rows)
    chunks = jnp.where(jnp.arange(batch.max_rows) < number, items[END] - items[BEGIN], 0)
    ends = jnp.cumsum(chunks, dtype=jnp.int32)
    parts = ends[-1] * jnp.arange(1, cores)
    inner = jnp.sum((2 * ends - chunks) * cores < 2 * parts[:, None], axis=1, dtype=jnp.int32)
    zero = jnp.zeros(1, jnp.int32)
    cuts = jnp.minimum(jnp.concatenate([zero, inner, number[None]]), number)
    split = _split(items, number, width)
    return _shares(items, number, batch, cuts), _shares(
        *split, batch, jnp.concatenate([zero, ends])[cuts]
    )


def _shares(items: jax.Array, number: jax.Array, batch: AttentionBatch, cuts: jax.Array) -> Shares:
    return Shares(make_work(items, number, batch), cuts, jnp.max(cuts[1:] - cuts[:-1]))


def _split(items: jax.Array, number: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Items of rows [7, R] as items of one chunk each [7, R * chunks], and their number."""
    rows = items.shape[1]
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), chunks)
    j = jnp.tile(jnp.arange(chunks, dtype=jnp.int32), rows)
    live = (row < number) & (j >= items[BEGIN, row]) & (j < items[END, row])
    order = jnp.argsort(~live, stable=True)
    row, j = row[order], j[order]
    split = items[:, row].at[BEGIN].set(j).at[END].set(j + 1)
    return split, live.sum(dtype=jnp.int32)


def turn(core: jax.Array, step: jax.Array, items: Any, cuts: Any) -> jax.Array:
    """The item of a core's step, whose parts of the operands are in VMEM then: its last one once it
    has no more, and the last of all, which is of no row that counts, where it has none."""
    first, end = cuts[core], cuts[core + 1]
    return jnp.where(first == end, items.shape[1] - 1, jnp.minimum(first + step, end - 1))


def each_item(cuts: Any, one: Callable[[jax.Array], None]) -> None:
    """one(i) in the step that item i has; nothing in a step without."""
    core, step = pl.program_id(0), pl.program_id(1)

    @pl.when(cuts[core] + step < cuts[core + 1])
    def _() -> None:
        one(cuts[core] + step)


def stream(
    chunk: Chunk,
    window: int | None,
    prefetched: tuple[Any, Any, Any],
    tables: Any,
    pool: Any,
    x: Any,
    signals: Signals,
) -> Stream:
    """Of the share of the program's core."""
    items, layer, cuts = prefetched
    ends = cuts[pl.program_id(0)], cuts[pl.program_id(0) + 1]
    return Stream(chunk, window, (items, layer), tables, pool, (x,), signals, 0, *ends)


def by_item(shape: tuple[int, ...], *fields: int) -> pl.BlockSpec:
    """A block of an array whose first indices are these fields of an item."""

    def index(core: jax.Array, step: jax.Array, items: Any, _: Any, cuts: Any) -> tuple[Any, ...]:
        i = turn(core, step, items, cuts)
        return (*(items[field, i] for field in fields), *[0] * (len(shape) - len(fields)))

    return pl.BlockSpec(shape, index)


def launch(
    kernel: Any,
    shares: Shares,
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
    """pallas_call over the shares' items, of which one brings its part of `given`. specs: of that
    and of the result, an index being of an item."""
    work, cuts, steps = shares
    call = pl.pallas_call(
        functools.partial(kernel, chunk=chunk, options=options),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(cuts) - 1, steps),
            in_specs=[specs[0], HBM, ANY],
            out_specs=specs[1],
            scratch_shapes=[
                pltpu.VMEM((2, *chunk.shape), pool.dtype),
                *scratch,
                tpu_stream.signals(chunk),
            ],
        ),
        compiler_params=compiler(sizes, 1),
        interpret=interpreted(options.interpret),
        name=f"absorbed{kernel.__name__}",
    )
    return call(*work.scalars(layer), cuts, given, work.tables, pool)


def _scores(
    items: Any,  # SMEM int32 [7, N]: an item is a chunk of a row
    layer: Any,  # SMEM int32 [1]
    cuts: Any,  # SMEM int32 [cores + 1]
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
    window = options.sliding_window
    chunks = stream(chunk, window, (items, layer, cuts), tables, pool, x, signals)

    def one_item(i: jax.Array) -> None:
        def use(j: jax.Array, half: jax.Array) -> None:
            clean_ends(chunk, items, i, j, x, half, window)
            out[0, 0] = products(q, x, half, sums)

        chunks.walk(i, use)

    each_item(cuts, one_item)


def _weighted(
    items: Any,  # SMEM int32 [7, N]: an item is a chunk of a row, in order
    layer: Any,  # SMEM int32 [1]
    cuts: Any,  # SMEM int32 [cores + 1]
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
    window = options.sliding_window
    chunks = stream(chunk, window, (items, layer, cuts), tables, pool, x, signals)

    def one_item(i: jax.Array) -> None:
        before = items[ROW, jnp.maximum(i - 1, 0)]

        @pl.when((i == cuts[pl.program_id(0)]) | (before != items[ROW, i]))
        def _() -> None:
            out[...] = jnp.zeros(out.shape, jnp.float32)

        def use(j: jax.Array, half: jax.Array) -> None:
            clean_ends(chunk, items, i, j, x, half, window)

            def one(part: jax.Array) -> None:
                out[0, part] += dot(weights[0, 0].astype(x.dtype), x[half, part])

            by_parts(chunk.heads, one)

        chunks.walk(i, use)

    each_item(cuts, one_item)


def two_passes(
    queries: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    batch: AttentionBatch,
    live: jax.Array,
    shares: Shares,
    options: Options,
    axis_name: str | None,
) -> jax.Array:
    """queries [R, parts, H, head_dim] -> float32 of the same shape. shares: of single chunks."""
    rows, parts, num_heads, head_dim = queries.shape
    sizes = tuning.sizes(pool.dtype, options.interpret)
    chunk = make_chunk(pool.shape, pool.dtype, parts, batch.table_width, sizes)
    chunks = -(-batch.table_width // chunk.blocks)
    row = by_item((1, parts, num_heads, head_dim), ROW)
    part = by_item((1, 1, num_heads, chunk.tokens), ROW, BEGIN)
    shape = jax.ShapeDtypeStruct((rows, chunks, num_heads, chunk.tokens), jnp.float32)
    sums = [pltpu.VMEM((num_heads, chunk.tokens), jnp.float32)]
    run = functools.partial(launch, sizes=sizes, chunk=chunk, options=options)
    raw = run(_scores, shares, layer, queries, pool, (row, part), shape, sums)
    seen = _seen(batch, live, chunk, chunks, options.sliding_window)
    seen = seen.reshape(rows, chunks, 1, chunk.tokens)
    # What was never written may be anything: nothing of it may reach the sum over devices.
    raw = jnp.where(seen, raw, 0)
    if axis_name is not None:
        longest = jnp.max(jnp.where(live, batch.context_lens, 0))
        raw = sum_as_far(raw, 1, 1, -(-longest // chunk.tokens), axis_name)
    scores = softmax.scored(raw, seen, options)
    # A row without anything seen has NaN here; it has no item either.
    weights = jax.nn.softmax(scores, axis=(1, 3))
    out = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    return run(_weighted, shares, layer, weights, pool, (part, row), out, [])


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
