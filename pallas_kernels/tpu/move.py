"""Slots between blocks, and to and from a staging buffer, on TPU (Mosaic): see `move`.

Everything goes by granules, for the reason in `granules`, some layers at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.tpu import tuning
from jaxserve.pallas_kernels.tpu.common import (
    ANY,
    SMEM_LIMIT,
    compiler,
    granule_of,
    interpreted,
    padded,
)
from jaxserve.pallas_kernels.tpu.granules import (
    NOBODY,
    PLANES,
    Puts,
    granules,
    layers_at_once,
    put_vectors,
)

# Bytes between a copy's layers: libtpu 0.0.50 ends the process over more.
LONGEST_STRIDE = (1 << 31) - 1


def by_target(
    block: jax.Array,
    slot: jax.Array,
    source: jax.Array,
    count: jax.Array,
    block_size: int,
    size: int,
) -> Puts:
    """Groups writes to slots by granules.

    Args:
        block, slot: int32 [M], the targets.
        source: int32 [M], the sources, see `Puts`.
        count: int32 [], how many of them are used.
        block_size: Slots of a block.
        size: Slots of a granule.
    """
    used = jnp.arange(len(block), dtype=jnp.int32) < count
    target = block * (block_size // size) + slot // size
    place = jnp.where(used, slot % size, 0)[:, None]
    source = jnp.where(used, source, NOBODY)[:, None]
    return granules(jnp.where(used, target, NOBODY), place, source, size)


def stage_in(
    pool: jax.Array, staging: jax.Array, slots: jax.Array, count: jax.Array, *, interpret: bool
) -> jax.Array:
    """See `move.stage_in`: staging [M, layers, kv_heads, head_dim] into slots int32 [M, 2]."""
    source = jnp.arange(len(slots), dtype=jnp.int32) * PLANES
    size = granule_of(pool.dtype)
    plan = by_target(slots[:, 0], slots[:, 1], source, count, pool.shape[3], size)
    return put_vectors(pool, 0, [staging], plan, interpret=interpret)


def _out_kernel(
    slots: Any,  # SMEM int32 [2 * M]
    count: Any,  # SMEM int32 [1]
    old: Any,  # VMEM [deep, 1, heads, granule, head_dim], the granule of the slot
    out: Any,  # VMEM [1, deep, heads, head_dim]
    turned: Any,  # VMEM float32 [granule, heads, head_dim]
) -> None:
    m, size = pl.program_id(0), turned.shape[0]

    @pl.when(m < count[0])
    def _() -> None:
        @pl.loop(0, out.shape[1])
        def _(n: jax.Array) -> None:
            # A slot is a row inside layout tiles; transposed, it can be indexed.
            turned[...] = jnp.swapaxes(old[n, 0].astype(jnp.float32), 0, 1)
            out[0, n] = turned[slots[2 * m + 1] % size].astype(out.dtype)

    @pl.when(m >= count[0])
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)


def stage_out(pool: jax.Array, slots: jax.Array, count: jax.Array, *, interpret: bool) -> jax.Array:
    """See `move.stage_out`: slots int32 [M, 2] -> [M, layers, kv_heads, head_dim]."""
    layers, _, heads, _, head_dim = pool.shape
    deep, size = layers_at_once(pool, layers, interpret), granule_of(pool.dtype)

    def granule(m: jax.Array, n: jax.Array, slots: Any, count: Any) -> tuple[Any, ...]:
        used = m < count[0]
        block = jnp.where(used, slots[2 * m], 0)
        part = jnp.where(used, slots[2 * m + 1] // size, 0)
        return jnp.where(used, n, 0), block, 0, part, 0

    call = pl.pallas_call(
        _out_kernel,
        out_shape=jax.ShapeDtypeStruct((len(slots), layers, heads, head_dim), pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(slots), layers // deep),
            in_specs=[pl.BlockSpec((deep, 1, heads, size, head_dim), granule)],
            out_specs=pl.BlockSpec((1, deep, heads, head_dim), lambda m, n, *_: (m, n, 0, 0)),
            scratch_shapes=[pltpu.VMEM((size, heads, head_dim), jnp.float32)],
        ),
        compiler_params=compiler(tuning.sizes(pool.dtype, interpret), 1),
        interpret=interpreted(interpret),
        name="stage_out",
    )
    return call(slots.reshape(-1), count.reshape(1), pool)


def _move_kernel(
    target: Any,  # SMEM int32 [N]: granules
    source: Any,  # SMEM int32 [N * granule]: slots, counted through all blocks
    lead: Any,  # SMEM int32 [N * granule]: the item's first slot with a source in that granule
    before: Any,  # the pool, which is out's memory too
    pool: Any,  # HBM [layers, blocks, heads, block_size, head_dim]
    held: Any,  # VMEM [2, deep, heads, granule, head_dim], the one that is changed
    found: Any,  # VMEM [2, granule, deep, heads, granule, head_dim]: its slots' sources
    arrived: Any,  # DMA semaphores [2]
    left: Any,  # DMA semaphores [2]
    *,
    together: int,
) -> None:
    i, count, half = pl.program_id(1), pl.num_programs(1), pl.program_id(1) % 2
    each_part = functools.partial(_each_part, pool, together)
    size = held.shape[3]
    each_source = functools.partial(_each_source, source, lead, size)

    def fetch(item: jax.Array, half: jax.Array) -> None:
        def start(part: Any, place: Any) -> None:
            pltpu.make_async_copy(part, place, arrived.at[half]).start()

        each_part(target[item], held.at[half], start)
        each_source(item, lambda s, wanted: each_part(wanted // size, found.at[half, s], start))

    def arrive(item: jax.Array, half: jax.Array) -> None:
        _landed(held.at[half], arrived.at[half])
        each_source(item, lambda s, _: _landed(found.at[half, s], arrived.at[half]))

    def leave(item: jax.Array, half: jax.Array) -> None:
        def start(part: Any, place: Any) -> None:
            pltpu.make_async_copy(place, part, left.at[half]).start()

        each_part(target[item], held.at[half], start)

    @pl.when(i == 0)
    def _() -> None:
        fetch(i, half)

    @pl.when(i > 0)
    def _() -> None:
        _landed(held.at[1 - half], left.at[1 - half])

    @pl.when(i + 1 < count)
    def _() -> None:
        fetch(i + 1, 1 - half)

    arrive(i, half)
    _exchange(i, source, lead, held.at[half], found.at[half])
    leave(i, half)

    @pl.when(i + 1 == count)
    def _() -> None:
        _landed(held.at[half], left.at[half])


def _each_part(pool: Any, together: int, granule: jax.Array, buffer: Any, start: Any) -> None:
    """start(the granule in `together` layers of the pool, its place in the buffer) for all layers
    of the buffer [deep, heads, granule, head_dim], which are the program's."""
    deep, size = buffer.shape[0], buffer.shape[2]
    parts = pool.shape[3] // size
    slots = pl.ds(pl.multiple_of(granule % parts * size, size), size)

    @pl.loop(0, deep // together)
    def _(n: jax.Array) -> None:
        layers = pl.ds(pl.program_id(0) * deep + n * together, together)
        part = pool.at[layers, granule // parts, :, slots]
        start(part, buffer.at[pl.ds(n * together, together)])


def _each_source(source: Any, lead: Any, size: int, item: jax.Array, act: Any) -> None:
    """act(slot, source) for each granule, of `size` slots, that an item's slots come from."""

    @pl.loop(0, size)
    def _(s: jax.Array) -> None:
        wanted = source[item * size + s]

        @pl.when((wanted >= 0) & (lead[item * size + s] == s))
        def _() -> None:
            act(s, wanted)


def _landed(buffer: Any, done: Any) -> None:
    """Wait for as many bytes as the buffer has."""
    pltpu.make_async_copy(buffer, buffer, done).wait()


def _exchange(i: jax.Array, source: Any, lead: Any, held: Any, found: Any) -> None:
    """Take the wanted slots of found [granule, deep, heads, granule, head_dim] into held [deep,
    heads, granule, head_dim]: item i's."""
    size = held.shape[2]
    slot = lax.broadcasted_iota(jnp.int32, (1, size, 1), 1)

    @pl.loop(0, held.shape[0])
    def _(n: jax.Array) -> None:
        new = held[n].astype(jnp.float32)
        for s in range(size):
            wanted = source[i * size + s]
            old = found[jnp.maximum(lead[i * size + s], 0), n].astype(jnp.float32)
            moved = pltpu.roll(old, (s + size - jnp.maximum(wanted, 0) % size) % size, 1)
            new = jnp.where((slot == s) & (wanted >= 0), moved, new)
        held[n] = new.astype(held.dtype)


def _layers_a_copy(pool: jax.Array, deep: int) -> int:
    """How many of `deep` layers moved at once one copy may take."""
    _, blocks, heads, block_size, head_dim = pool.shape
    layer = blocks * heads * block_size * padded(head_dim) * pool.dtype.itemsize
    return deep if layer <= LONGEST_STRIDE else 1


def move(pool: jax.Array, moves: jax.Array, count: jax.Array, *, interpret: bool) -> jax.Array:
    """See `move.move_slots`: the first `count` of moves int32 [M, 4], as many at once as scalar
    memory has room for the granules of."""
    most = SMEM_LIMIT // (2 * 4 * granule_of(pool.dtype) + 4)
    most -= most % 8
    for first in range(0, len(moves), most):
        some = jnp.clip(count - first, 0, most)
        pool = _move(pool, moves[first : first + most], some, interpret=interpret)
    return pool


def _move(pool: jax.Array, moves: jax.Array, count: jax.Array, *, interpret: bool) -> jax.Array:
    """The first `count` of moves. A granule may be read while
    it is written for another move: the slots that are read stay the same bytes, since no target is
    a source."""
    layers, _, heads, block_size, head_dim = pool.shape
    deep = layers_at_once(pool, layers, interpret)
    from_block, from_slot, to_block, to_slot = moves.T
    size = granule_of(pool.dtype)
    target, source, _, number = by_target(
        to_block, to_slot, from_block * block_size + from_slot, count, block_size, size
    )
    granule = jnp.where(source >= 0, source // size, NOBODY)
    lead = jnp.argmax(granule[:, :, None] == granule[:, None, :], axis=2).astype(jnp.int32)
    call = pl.pallas_call(
        functools.partial(_move_kernel, together=_layers_a_copy(pool, deep)),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(layers // deep, number),
            in_specs=[ANY],
            out_specs=ANY,
            scratch_shapes=[
                pltpu.VMEM((2, deep, heads, size, head_dim), pool.dtype),
                pltpu.VMEM((2, size, deep, heads, size, head_dim), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={3: 0},
        compiler_params=compiler(tuning.sizes(pool.dtype, interpret), 1),
        interpret=interpreted(interpret),
        name="move_slots",
    )
    return call(target, source.reshape(-1), lead.reshape(-1), pool)
