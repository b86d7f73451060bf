"""Absorbed attention on TPU in two passes over x, if its sums do not fit in VMEM or its scores have
to be summed over devices: scores, softmax in XLA, sums. Also functions that it shares with one
pass.
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
from jaxserve.pallas_kernels.pool import Pool
from jaxserve.pallas_kernels.sharding import sum_as_far
from jaxserve.pallas_kernels.tpu import common, softmax, tuning
from jaxserve.pallas_kernels.tpu import stream as tpu_stream
from jaxserve.pallas_kernels.tpu.softmax import dot
from jaxserve.pallas_kernels.tpu.stream import Buffer, Signals, Stream, clean_ends, own_scales
from jaxserve.pallas_kernels.tpu.tuning import Sizes

TOGETHER = 8  # parts of x whose products the compiler may interleave


def by_parts(parts: int, one: Any) -> None:
    """Runs one(part) for each part, up to `TOGETHER` of them in an iteration of the loop."""
    step = max(n for n in range(1, TOGETHER + 1) if parts % n == 0)

    @pl.loop(0, parts // step)
    def _(turn: jax.Array) -> None:
        for n in range(step):
            one(turn * step + n)


def products(q: Any, x: Buffer, half: jax.Array, sums: Any) -> jax.Array:
    """Products qx . x, summed over all parts.

    Args:
        q: VMEM [1, parts, H, head_dim].
        x: The buffer.
        half: int32 [], the half of x in use.
        sums: VMEM float32 [H, tokens], scratch.

    Returns:
        float32 [H, tokens].
    """
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def one(part: jax.Array) -> None:
        product = dot(q[0, part], x.vectors((half, part), q.dtype), transposed=True)
        sums[...] += softmax.scaled(product, _scales(x, half, part))

    by_parts(x.values.shape[1], one)
    return sums[...]


def weighted(
    weights: jax.Array, x: Buffer, half: jax.Array, part: jax.Array, own: jax.Array, dtype: Any
) -> jax.Array:
    """The weighted sum of a part of x.

    Args:
        weights: float32 [H, tokens].
        x: The buffer.
        half: int32 [], the half of x in use.
        part: int32 [], the part.
        own: bool [1, tokens], the row's own slots; scales of other slots are ignored.
        dtype: Dtype to compute in.

    Returns:
        float32 [H, head_dim].
    """
    mine = softmax.scaled(weights, own_scales(_scales(x, half, part), own))
    return dot(mine.astype(dtype), x.vectors((half, part), dtype))


def _scales(x: Buffer, half: jax.Array, part: jax.Array) -> jax.Array | None:
    """The scales of a part, float32 [1, tokens]; None for 1."""
    scales = x.scales_of(half, pl.ds(part, 1))
    return None if scales is None else scales[0]


class Shares(NamedTuple):
    """Items cut over a chip's cores.

    Attributes:
        work: The items.
        cuts: int32 [cores + 1], the first item of each core's share, then the end of the last
            share.
        steps: int32 [], items of the largest share.
    """

    work: common.Work
    cuts: jax.Array
    steps: jax.Array


def share(
    items: jax.Array, number: jax.Array, batch: AttentionBatch, width: int, cores: int
) -> tuple[Shares, Shares]:
    """Cuts rows over a chip's cores, by about as many chunks each.

    A row belongs to one core, which sums its chunks in its own memory. Every core has some if there
    are as many rows as cores.

    Args:
        items: int32 [7, R], an item per row.
        number: int32 [], number of items.
        batch: The batch that will attend.
        width: Most chunks of a row.
        cores: TensorCores of the chip.

    Returns:
        The shares with an item per row, and the same work with an item per chunk.
    """
    cores = min(cores, batch.max_rows)
    chunks = jnp.where(
        jnp.arange(batch.max_rows) < number, items[common.END] - items[common.BEGIN], 0
    )
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
    return Shares(common.make_work(items, number, batch), cuts, jnp.max(cuts[1:] - cuts[:-1]))


def _split(items: jax.Array, number: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Items of rows [7, R] as items of one chunk each [7, R * chunks], and their number."""
    rows = items.shape[1]
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), chunks)
    j = jnp.tile(jnp.arange(chunks, dtype=jnp.int32), rows)
    live = (row < number) & (j >= items[common.BEGIN, row]) & (j < items[common.END, row])
    order = jnp.argsort(~live, stable=True)
    row, j = row[order], j[order]
    split = items[:, row].at[common.BEGIN].set(j).at[common.END].set(j + 1)
    return split, live.sum(dtype=jnp.int32)


def turn(core: jax.Array, step: jax.Array, items: Any, cuts: Any) -> jax.Array:
    """The item whose operands a core has in VMEM in a step.

    Past the end of its share a core stays at its last item. A core without items gets the array's
    last item, which then belongs to no live row.

    Args:
        core: int32 [].
        step: int32 [].
        items: SMEM int32 [7, N].
        cuts: SMEM int32 [cores + 1].
    """
    first, end = cuts[core], cuts[core + 1]
    return jnp.where(first == end, items.shape[1] - 1, jnp.minimum(first + step, end - 1))


def each_item(cuts: Any, one: Callable[[jax.Array], None]) -> None:
    """Runs one(i) if this step has an item i."""
    core, step = pl.program_id(0), pl.program_id(1)

    @pl.when(cuts[core] + step < cuts[core + 1])
    def _() -> None:
        one(cuts[core] + step)


def stream(
    chunk: common.Chunk,
    window: int | None,
    prefetched: tuple[Any, Any, Any],
    tables: Any,
    pool: Any,
    x: Buffer,
    signals: Signals,
) -> Stream:
    """The stream of chunks for the items of this core's share.

    Args:
        chunk: Shape of a chunk.
        window: Sliding window, or None.
        prefetched: items, SMEM int32 [7, N]; layer, SMEM int32 [1]; cuts, SMEM int32 [cores + 1].
        tables: HBM int32 [R, 1, 2 * W].
        pool: HBM [layers, blocks, parts, block_size, head_dim].
        x: The buffer.
        signals: The kernel's.
    """
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
    pool: Pool,
    specs: tuple[pl.BlockSpec, pl.BlockSpec],
    out: jax.ShapeDtypeStruct,
    scratch: list[Any],
    sizes: Sizes,
    chunk: common.Chunk,
    options: common.Options,
) -> jax.Array:
    """Runs a kernel over the items of all shares.

    Args:
        kernel: The kernel body.
        shares: The work.
        layer: Index into the whole pool; may be traced.
        given: The array with a block for every item.
        pool: [layers, blocks, parts, block_size, head_dim].
        specs: The blocks of `given` and of the result, from `by_item`.
        out: Shape and dtype of the result.
        scratch: The kernel's scratch shapes between x and signals.
        sizes: The chip's sizes.
        chunk: Shape of a chunk.
        options: The kernel's options.
    """
    work, cuts, steps = shares
    call = pl.pallas_call(
        functools.partial(kernel, chunk=chunk, options=options),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(cuts) - 1, steps),
            in_specs=[specs[0], common.HBM, tpu_stream.pool_spec(pool)],
            out_specs=specs[1],
            scratch_shapes=[
                tpu_stream.buffer_of(chunk, pool),
                *scratch,
                tpu_stream.signals(chunk),
            ],
        ),
        compiler_params=common.compiler(sizes, 1),
        interpret=common.interpreted(options.interpret),
        name=f"absorbed{getattr(kernel, 'func', kernel).__name__}",
    )
    return call(*work.scalars(layer), cuts, given, work.tables, pool)


def _scores(  # refs are of the pool's dtype where none is named
    items: Any,  # SMEM int32 [7, N]: an item is a chunk of a row
    layer: Any,  # SMEM int32 [1]
    cuts: Any,  # SMEM int32 [cores + 1]
    q: Any,  # VMEM [1, parts, H, head_dim]
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, parts, block_size, head_dim]
    out: Any,  # VMEM float32 [1, 1, H, tokens]: raw products
    x: Buffer,
    sums: Any,  # VMEM float32 [H, tokens]
    signals: Signals,
    *,
    chunk: common.Chunk,
    options: common.Options,
) -> None:
    window = options.sliding_window
    chunks = stream(chunk, window, (items, layer, cuts), tables, pool, x, signals)

    def one_item(i: jax.Array) -> None:
        def use(j: jax.Array, half: jax.Array) -> None:
            clean_ends(chunk, items, i, j, x, half, window)
            out[0, 0] = products(q, x, half, sums)

        chunks.walk(i, use)

    each_item(cuts, one_item)


def _weighted(  # refs are of the pool's dtype where none is named
    items: Any,  # SMEM int32 [7, N]: an item is a chunk of a row, in order
    layer: Any,  # SMEM int32 [1]
    cuts: Any,  # SMEM int32 [cores + 1]
    weights: Any,  # VMEM float32 [1, 1, H, tokens], zeros where not seen
    tables: Any,  # HBM int32 [R, 1, 2 * W]
    pool: Any,  # HBM [layers, blocks, parts, block_size, head_dim]
    out: Any,  # VMEM float32 [1, parts, H, head_dim], the row's: adds up over its chunks
    x: Buffer,
    signals: Signals,
    *,
    chunk: common.Chunk,
    options: common.Options,
    dtype: Any,
) -> None:
    window = options.sliding_window
    chunks = stream(chunk, window, (items, layer, cuts), tables, pool, x, signals)

    def one_item(i: jax.Array) -> None:
        before = items[common.ROW, jnp.maximum(i - 1, 0)]

        @pl.when((i == cuts[pl.program_id(0)]) | (before != items[common.ROW, i]))
        def _() -> None:
            out[...] = jnp.zeros(out.shape, jnp.float32)

        def use(j: jax.Array, half: jax.Array) -> None:
            clean_ends(chunk, items, i, j, x, half, window)
            low, high = common.bounds(items, i, window)
            at = chunk.positions(j, items[common.SIDE, i], 1)
            own = (at >= low) & (at < high)

            def one(part: jax.Array) -> None:
                out[0, part] += weighted(weights[0, 0], x, half, part, own, dtype)

            by_parts(chunk.heads, one)

        chunks.walk(i, use)

    each_item(cuts, one_item)


def two_passes(
    queries: jax.Array,
    pool: Pool,
    layer: jax.Array | int,
    batch: AttentionBatch,
    live: jax.Array,
    shares: Shares,
    options: common.Options,
    axis_name: str | None,
) -> jax.Array:
    """Absorbed attention in two passes over x.

    Args:
        queries: [R, parts, H, head_dim].
        pool: [layers, blocks, parts, block_size, head_dim].
        layer: Index into the whole pool; may be traced.
        batch: The step's rows and tokens.
        live: bool [R], which rows are hidden decodes.
        shares: The work, an item per chunk of a row.
        options: The kernel's options.
        axis_name: Mesh axis to sum scores over; None for one device.

    Returns:
        float32, the shape of queries.
    """
    rows, parts, num_heads, head_dim = queries.shape
    sizes = tuning.sizes(pool.dtype, options.interpret)
    chunk = common.make_chunk(pool.shape, pool.dtype, parts, batch.table_width, sizes)
    chunks = -(-batch.table_width // chunk.blocks)
    row = by_item((1, parts, num_heads, head_dim), common.ROW)
    part = by_item((1, 1, num_heads, chunk.tokens), common.ROW, common.BEGIN)
    shape = jax.ShapeDtypeStruct((rows, chunks, num_heads, chunk.tokens), jnp.float32)
    sums = [pltpu.VMEM((num_heads, chunk.tokens), jnp.float32)]
    run = functools.partial(launch, sizes=sizes, chunk=chunk, options=options)
    raw = run(_scores, shares, layer, queries, pool, (row, part), shape, sums)
    seen = _seen(batch, live, chunk, chunks, options.sliding_window)
    seen = seen.reshape(rows, chunks, 1, chunk.tokens)
    # Unwritten memory may hold anything, and must not reach the sum over devices.
    raw = jnp.where(seen, raw, 0)
    if axis_name is not None:
        longest = jnp.max(jnp.where(live, batch.context_lens, 0))
        raw = sum_as_far(raw, 1, 1, -(-longest // chunk.tokens), axis_name)
    scores = softmax.scored(raw, seen, options)
    # A row that sees nothing has NaN here; it has no item either.
    weights = jax.nn.softmax(scores, axis=(1, 3))
    out = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    sum_up = functools.partial(_weighted, dtype=queries.dtype)
    return run(sum_up, shares, layer, weights, pool, (part, row), out, [])


def _seen(
    batch: AttentionBatch, live: jax.Array, chunk: common.Chunk, chunks: int, window: int | None
) -> jax.Array:
    """bool [R, chunks * tokens]: the slots of its context that each row's decode sees."""
    slot = jnp.arange(chunks * chunk.tokens, dtype=jnp.int32)
    mirrored = slot + chunk.block_size - 1 - 2 * (slot % chunk.block_size)
    at = jnp.where((batch.direction == RIGHT)[:, None], mirrored, slot)
    lens = jnp.where(live, batch.context_lens, 0)[:, None]
    seen = at < lens
    return seen if window is None else seen & (at >= lens - window)
