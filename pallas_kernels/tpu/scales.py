"""The scales of an int8 pool on TPU (Mosaic): into their slots, and out of them.

A block's scales, [kv_heads, block_size], are one or a few tiles, in which a slot is a lane. So
whole blocks are read, changed and written back. XLA would transpose the whole array to put slots
first, and back, around every write.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.batch import AttentionBatch
from jaxserve.pallas_kernels.tpu import common, tuning
from jaxserve.pallas_kernels.tpu.granules import NOBODY, PLANES, Puts
from jaxserve.pallas_kernels.tpu.move import by_target
from jaxserve.pallas_kernels.tpu.write import WritePlan

MOST_LAYERS = 64  # most layers of a block that are changed at once
MOST_BYTES = 32 << 20  # most bytes of copied blocks at once, in all their layers


def _put_kernel(
    blocks: Any,  # SMEM int32 [N]
    layer: Any,  # SMEM int32 [1]
    wanted: Any,  # VMEM int32 [1, 1, block_size]
    brought: Any,  # VMEM float32 [1, deep, kv_heads, block_size]
    old: Any,  # VMEM float32 [deep, 1, kv_heads, block_size]
    new: Any,  # like old
) -> None:
    new[:, 0] = jnp.where(wanted[0][None] > 0, brought[0], old[:, 0])


def _together(scales: jax.Array, layers: int) -> int:
    """Number of blocks that are copied out at once, a power of two."""
    heads, size = scales.shape[2:]
    block = layers * -(-heads // 8) * 8 * common.padded(size) * scales.dtype.itemsize
    return 1 << max(1, MOST_BYTES // block).bit_length() - 1


def _put(
    scales: jax.Array,
    layer: jax.Array | int,
    values: list[jax.Array],
    puts: Puts,
    *,
    interpret: bool,
) -> jax.Array:
    """As `granules.put_vectors`, of scales float32 [layers, blocks, kv_heads, block_size], with
    values [M, layers, kv_heads] and granules that are blocks."""
    _, layers, heads = values[0].shape
    source = puts.source // PLANES * len(values) + puts.source % PLANES
    source = jnp.where(puts.source < 0, NOBODY, source)
    flat = jnp.stack(values, axis=1).reshape(-1, layers, heads)
    some = _together(scales, layers)
    put = functools.partial(_put_some, layer=layer, values=flat, interpret=interpret)
    if len(source) <= some:
        return put(scales, puts.target, source, puts.number)
    spare = -len(source) % some
    target = jnp.pad(puts.target, (0, spare))
    source = jnp.pad(source, ((0, spare), (0, 0)), constant_values=NOBODY)

    def put_next(n: jax.Array, scales: jax.Array) -> jax.Array:
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=n * some, slice_size=some)
        number = jnp.minimum(puts.number - n * some, some)
        return put(scales, part(target), part(source), number)

    done: jax.Array = lax.fori_loop(0, -(-puts.number // some), put_next, scales)
    return done


def _put_some(
    scales: jax.Array,
    target: jax.Array,
    source: jax.Array,
    number: jax.Array,
    *,
    layer: jax.Array | int,
    values: jax.Array,
    interpret: bool,
) -> jax.Array:
    """The first `number` of the blocks target int32 [N], with values [any, layers, kv_heads] at
    source int32 [N, block_size]."""
    heads, size = scales.shape[2:]
    layers = values.shape[1]
    deep = common.most_a_program(layers, MOST_LAYERS, 1)
    brought = values[jnp.maximum(source, 0)].transpose(0, 2, 3, 1)
    tile = pl.BlockSpec(
        (deep, 1, heads, size), lambda i, n, blocks, layer: (layer[0] + n, blocks[i], 0, 0)
    )
    call = pl.pallas_call(
        _put_kernel,
        out_shape=jax.ShapeDtypeStruct(scales.shape, scales.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(number, layers // deep),
            in_specs=[
                pl.BlockSpec((1, 1, size), lambda i, n, *_: (i, 0, 0)),
                pl.BlockSpec((1, deep, heads, size), lambda i, n, *_: (i, n, 0, 0)),
                tile,
            ],
            out_specs=tile,
        ),
        input_output_aliases={4: 0},
        compiler_params=common.compiler(tuning.sizes(scales.dtype, interpret), 0, 2),
        interpret=common.interpreted(interpret),
        name="put_scales",
    )
    wanted = (source >= 0).astype(jnp.int32)[:, None]
    first = jnp.asarray(layer, jnp.int32).reshape(1)
    put: jax.Array = call(target, first, wanted, brought, scales)
    return put


def write(
    scales: jax.Array,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    x: jax.Array | None,
    batch: AttentionBatch,
    plan: WritePlan,
    *,
    interpret: bool,
) -> jax.Array:
    """See `backends.ScaleOps.write`."""
    assert plan.scales is not None
    values = [value[:, None] for value in (k, v, x) if value is not None]
    return _put(scales, layer, values, plan.scales, interpret=interpret)


def stage_in(
    scales: jax.Array, staging: jax.Array, slots: jax.Array, count: jax.Array, *, interpret: bool
) -> jax.Array:
    """See `backends.ScaleOps.stage_in`."""
    source, size = jnp.arange(len(slots), dtype=jnp.int32) * PLANES, scales.shape[3]
    puts = by_target(slots[:, 0], slots[:, 1], source, count, size, size)
    return _put(scales, 0, [staging], puts, interpret=interpret)


def stage_out(scales: jax.Array, slots: jax.Array, count: jax.Array) -> jax.Array:
    """See `backends.ScaleOps.stage_out`."""
    layers, blocks, heads, size = scales.shape
    at, layer = jnp.arange(size, dtype=jnp.int32), jnp.arange(layers, dtype=jnp.int32)
    flat = scales.reshape(layers * blocks, heads, size)  # XLA gathers from the first axis as it is

    def one(place: jax.Array) -> jax.Array:
        found = flat[layer * blocks + place[0]]
        return jnp.where(at == place[1], found, 0).sum(axis=-1)

    used = (jnp.arange(len(slots), dtype=jnp.int32) < count)[:, None]
    found: jax.Array = lax.map(one, jnp.where(used, slots, 0), batch_size=_together(scales, layers))
    return jnp.where(used[..., None], found, 0)


def move(scales: jax.Array, moves: jax.Array, count: jax.Array, *, interpret: bool) -> jax.Array:
    """See `backends.ScaleOps.move`."""
    staged = stage_out(scales, moves[:, :2], count)
    return stage_in(scales, staged, moves[:, 2:], count, interpret=interpret)
