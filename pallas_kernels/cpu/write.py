"""Writes vectors into slots of the pool on CPUs, in place, by numba, for pools of any dtype. XLA's
CPU compiler has no scatter for 16-bit numbers, and converts the whole pool for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from numba import njit

from jaxserve.pallas_kernels.cpu.numba_ffi import (
    OPTIONS,
    compiled_once,
    copy,
    data_address,
    dims,
    int32s,
    register,
)

SHARE = 1 << 18  # bytes that a share copies, about

_POOL, _VALUES, _BLOCKS, _SLOTS, _INTS = range(5)


def put_vectors(
    pool: jax.Array,
    layer: jax.Array | int | None,
    blocks: jax.Array,
    slots: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """See `xla.write.put_vectors`, on one CPU device."""
    blocks, slots = jnp.broadcast_arrays(blocks, slots)
    layers, _, kv_heads, _, head_dim = pool.shape
    first, many = (0, layers) if layer is None else (layer, 1)
    ints = jnp.stack([jnp.asarray(first, jnp.int32), jnp.int32(pool.dtype.itemsize)])
    return jax.ffi.ffi_call(
        target(),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={_POOL: 0},
    )(
        pool,
        values.reshape(blocks.size, many, kv_heads, head_dim),
        blocks.reshape(-1).astype(jnp.int32),
        slots.reshape(-1).astype(jnp.int32),
        ints,
    )


@compiled_once
def target() -> str:
    """The name of the kernel, which is compiled at the first call.

    Operands: pool [L, B, K, S, D], which is the result; values [N, M, K, D]; blocks, slots, int32
    [N], skipped if outside of the pool; int32 [2]: the first of M layers, and the bytes of a
    number."""
    return register("jaxserve_put", _shares, _share, __file__)


@njit(**OPTIONS)
def _shares(given: Any) -> Any:
    many = _a_share(given)
    return (dims(given[_BLOCKS], 1)[0] + many - 1) // many, 0


@njit(**OPTIONS)
def _a_share(given: Any) -> int:
    """Number of vectors in a share."""
    shape = dims(given[_VALUES], 4)
    item = int32s(given[_INTS])[1]
    return max(1, SHARE // (shape[1] * shape[2] * shape[3] * item))


@njit(**OPTIONS)
def _share(given: Any, _: int, i: int) -> None:
    ints, blocks, slots = int32s(given[_INTS]), int32s(given[_BLOCKS]), int32s(given[_SLOTS])
    pool, values = dims(given[_POOL], 5), dims(given[_VALUES], 4)
    count, layers, heads, per = values[0], values[1], values[2], _a_share(given)
    vector = values[3] * ints[1]
    to, at = data_address(given[_POOL]), data_address(given[_VALUES])
    for n in range(i * per, min((i + 1) * per, count)):
        block, slot = blocks[n], slots[n]
        if block < 0 or block >= pool[1] or slot < 0 or slot >= pool[3]:
            continue
        for layer in range(layers):
            for head in range(heads):
                place = (((ints[0] + layer) * pool[1] + block) * heads + head) * pool[3] + slot
                copy(
                    to + place * vector, at + ((n * layers + layer) * heads + head) * vector, vector
                )
