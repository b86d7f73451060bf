"""Puts vectors into slots of the pool on TPU, in place (Mosaic), by granules. The pool's layout is
tiled by 8 slots (with 8 bits by 32), so that one slot of a 16-bit pool cannot be written alone: a
granule, a tile of slots of a block, is read, changed and written back. Work items are distinct
granules, with all vectors that go there, of any row. So two rows that fill one block from both ends
share an item, and no transfer can undo another's. A chip's cores share the items.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.tpu import common, tuning
from jaxserve.pallas_kernels.tpu.common import SMEM_LIMIT

NOBODY = -1  # nothing goes to this slot
PLANES = 3  # a source is index * PLANES + array, for one of PLANES arrays


class Puts(NamedTuple):
    """Which vectors go into which slots.

    Attributes:
        target: int32 [N], distinct granules: block * granules of a block + granule.
        source: int32 [N, granule], the source for each of their slots, or NOBODY.
        span: int32 [2, N], the first slot that is written, and the end of them.
        number: int32 [], how many of the N are used.
    """

    target: jax.Array
    source: jax.Array
    span: jax.Array
    number: jax.Array


def granules(target: jax.Array, slot: jax.Array, source: jax.Array, size: int) -> Puts:
    """Groups sources by granule.

    Args:
        target: int32 [N], the granule of each of N candidates; negative for none.
        slot: int32 [N, any], slots of its granule that a candidate writes.
        source: int32 [N, any], the sources for them; NOBODY for none.
        size: Slots of a granule.
    """
    same = target[:, None] == target[None, :]
    leader = jnp.argmax(same, axis=1)
    merged = jnp.full((len(target), size), NOBODY, jnp.int32)
    merged = merged.at[leader[:, None], slot].max(source, mode="drop")
    live = (leader == jnp.arange(len(target))) & (target >= 0)
    order, number = common.live_first(live)
    merged = merged[order]
    wanted, slots = merged >= 0, jnp.arange(size, dtype=jnp.int32)
    first = jnp.where(wanted, slots, size).min(axis=1)
    end = jnp.where(wanted, slots + 1, 0).max(axis=1)
    return Puts(target[order], merged, jnp.stack([first, end]), number)


def merge(rows: list[jax.Array], wanted: jax.Array, old: jax.Array) -> jax.Array:
    """old [heads, slots, head_dim] with rows[s] [heads, head_dim] in each slot s of wanted, bool
    [slots, 1]. Transposed in float32, which is exact for narrower dtypes."""
    new = jnp.swapaxes(jnp.stack([row.astype(jnp.float32) for row in rows]), 0, 1)
    return jnp.where(wanted[None], new, old.astype(jnp.float32)).astype(old.dtype)


def slots_wanted(source: Any, i: jax.Array, size: int) -> jax.Array:
    """bool [size, 1]: the slots of item i that are written; source: SMEM int32 [N * size]."""
    slot = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    wanted = jnp.zeros((size, 1), jnp.int32)
    for s in range(size):
        wanted = jnp.where((slot == s) & (source[i * size + s] >= 0), 1, wanted)
    return wanted > 0


def _put_kernel(
    places: Any,  # SMEM int32 [4, N + 1]: block, granule, its first slot and the end of them
    source: Any,  # SMEM int32 [N * granule]
    layer: Any,  # SMEM int32 [1]
    number: Any,  # SMEM int32 [1], items
    old: Any,  # VMEM [deep, 1, heads, granule, head_dim], the item's in some layers
    *refs: Any,  # values, HBM [M, layers, heads, head_dim] each; new, VMEM like old; found, VMEM
    # [2, granule, deep, heads, head_dim]; arrived, DMA semaphores [2]
    cores: int,
) -> None:
    *values, new, found, arrived = refs
    step, steps = pl.program_id(2), pl.num_programs(2)
    size, deep = found.shape[1:3]
    layers, half = pl.ds(pl.program_id(1) * deep, deep), step & 1
    first = pl.program_id(0) * steps if cores > 1 else 0
    i = first + step

    def has(item: jax.Array | int) -> jax.Array | bool:
        return item < number[0] if cores > 1 else True

    def fetch(item: jax.Array, half: jax.Array) -> None:
        @pl.loop(places[2, item], places[3, item])
        def _(s: jax.Array) -> None:
            wanted = source[item * size + s]
            for which, value in enumerate(values):

                @pl.when((wanted >= 0) & (wanted % PLANES == which))
                def _(value: Any = value) -> None:
                    vector = value.at[wanted // PLANES, layers]
                    pltpu.make_async_copy(vector, found.at[half, s], arrived.at[half]).start()

    @pl.when((step == 0) & has(i))
    def _() -> None:
        fetch(i, half)

    @pl.when((step + 1 < steps) & has(i + 1))
    def _() -> None:
        fetch(i + 1, 1 - half)

    # In a surplus step, the last item's granule stays as it is; see `put` for a core without items.
    @pl.when(cores > 1 and jnp.logical_not(has(first)))
    def _() -> None:
        new[...] = old[...]

    @pl.when(has(i))
    def _() -> None:
        @pl.loop(places[2, i], places[3, i])
        def _(s: jax.Array) -> None:
            @pl.when(source[i * size + s] >= 0)
            def _() -> None:
                vector = values[0].at[0, layers]
                pltpu.make_async_copy(vector, found.at[half, s], arrived.at[half]).wait()

        wanted = slots_wanted(source, i, size)

        @pl.loop(0, deep)
        def _(n: jax.Array) -> None:
            rows = [found[half, s, n] for s in range(size)]
            new[n, 0] = merge(rows, wanted, old[n, 0])


def layers_at_once(pool: jax.Array, layers: int, interpret: bool) -> int:
    """Layers of a granule to move at once: a divisor of `layers`, whose quotient divides over the
    cores where possible."""
    _, _, heads, _, head_dim = pool.shape
    granule = heads * common.granule_of(pool.dtype) * common.padded(head_dim) * pool.dtype.itemsize
    sizes = tuning.sizes(pool.dtype, interpret)
    # In VMEM there are so many granules for each slot of one.
    most = max(1, sizes.stage_bytes * 8 // (granule * common.granule_of(pool.dtype)))
    return common.most_a_program(layers, most, sizes.cores)


def put_vectors(
    pool: jax.Array,
    layer: jax.Array | int,
    values: list[jax.Array],
    puts: Puts,
    *,
    interpret: bool,
) -> jax.Array:
    """Puts vectors into slots of some layers, in place, as many granules at once as scalar memory
    has room for.

    Args:
        pool: [layers, blocks, heads, block_size, head_dim].
        layer: The first layer; as many are written as the values have.
        values: Up to PLANES arrays [M, layers, heads, head_dim] in the pool's dtype.
        puts: Which vector goes where.
        interpret: Run in the interpreter.
    """
    most = SMEM_LIMIT // (4 * (4 + puts.source.shape[1]))  # places, and the sources of its slots
    for first in range(0, len(puts.target), most):
        part = slice(first, first + most)
        number = jnp.clip(puts.number - first, 0, most)
        some = Puts(puts.target[part], puts.source[part], puts.span[:, part], number)
        pool = _put(pool, layer, values, some, interpret=interpret)
    return pool


def _put(
    pool: jax.Array,
    layer: jax.Array | int,
    values: list[jax.Array],
    puts: Puts,
    *,
    interpret: bool,
) -> jax.Array:
    """Each core except the last takes equally many items, one after another. With a single item,
    the second core has none, and reads and writes back another granule."""
    heads, block_size, head_dim = pool.shape[2:]
    size = puts.source.shape[1]
    layers, parts = values[0].shape[1], block_size // size
    deep, sizes = layers_at_once(pool, layers, interpret), tuning.sizes(pool.dtype, interpret)
    steps = (puts.number + sizes.cores - 1) // sizes.cores

    def index(
        core: jax.Array, n: jax.Array, step: jax.Array, places: Any, _: Any, layer: Any, number: Any
    ) -> tuple[Any, ...]:
        i = step
        if sizes.cores > 1:
            first = core * ((number[0] + sizes.cores - 1) // sizes.cores)
            last = jnp.minimum(first + step, number[0] - 1)
            i = jnp.where(first < number[0], last, places.shape[1] - 1)
        return layer[0] + n, places[0, i], 0, places[1, i], 0

    granule = pl.BlockSpec((deep, 1, heads, size, head_dim), index)
    call = pl.pallas_call(
        functools.partial(_put_kernel, cores=sizes.cores),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(sizes.cores, layers // deep, steps),
            in_specs=[granule, *[common.ANY] * len(values)],
            out_specs=granule,
            scratch_shapes=[
                pltpu.VMEM((2, size, deep, heads, head_dim), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={4: 0},
        compiler_params=common.compiler(sizes, 1, 2),
        interpret=common.interpreted(interpret),
        name="paged_put",
    )
    spare = (puts.target[:1] + 1) % (pool.shape[1] * parts)
    target = jnp.concatenate([puts.target, spare])
    span = jnp.pad(puts.span, ((0, 0), (0, 1)))
    places = jnp.stack([target // parts, target % parts, *span])
    scalars = places, puts.source.reshape(-1), jnp.asarray(layer, jnp.int32).reshape(1)
    return call(*scalars, puts.number.reshape(1), pool, *values)
