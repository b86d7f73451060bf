"""Rotary positions on CPUs, by numba: each number by the same operations, whatever the shape. In
XLA's CPU compiler, fusion decides which of two products is fused with their sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi

SHARE = 1 << 14  # numbers that a share rotates, about
_TOKENS = 32  # tokens whose angles are a share


def takes(x: jax.Array) -> bool:
    """Whether `rotate` supports this dtype."""
    return x.dtype == jnp.float32


def angles(
    positions: jax.Array, frequencies: np.ndarray, amplitude: float
) -> tuple[jax.Array, jax.Array]:
    """See `rotary.angles`: float32 [T, n] each, on one CPU device."""
    shape = jax.ShapeDtypeStruct((len(positions), len(frequencies)), jnp.float32)
    call = jax.ffi.ffi_call(angles_target(), (shape, shape), vmap_method="sequential")
    given = frequencies.astype(np.float32), np.array([amplitude], np.float32)
    cos, sin = call(positions.astype(jnp.int32), *given)
    return cos, sin


@numba_ffi.compiled_once
def angles_target() -> str:
    """The name of the kernel, which is compiled at the first call. Operands: positions [T], int32;
    frequencies [n]; amplitude [1]. Results: cos and sin, [T, n]."""

    @njit(**numba_ffi.OPTIONS)
    def plan(given: Any) -> Any:
        return (numba_ffi.dims(given[0], 1)[0] + _TOKENS - 1) // _TOKENS, 0

    @njit(**numba_ffi.INLINE)
    def share(given: Any, _: int, i: int) -> None:
        positions, n = numba_ffi.int32s(given[0]), numba_ffi.dims(given[1], 1)[0]
        count = len(positions)
        frequencies = carray(numba_ffi.data(given[1]), (n,), np.float32)
        amplitude = carray(numba_ffi.data(given[2]), (1,), np.float32)[0]
        cos = carray(numba_ffi.data(given[3]), (count, n), np.float32)
        sin = carray(numba_ffi.data(given[4]), (count, n), np.float32)
        for t in range(i * _TOKENS, min((i + 1) * _TOKENS, count)):
            position = np.float32(positions[t])
            for j in range(n):
                phase = position * frequencies[j]
                cos[t, j] = np.cos(phase) * amplitude
                sin[t, j] = np.sin(phase) * amplitude

    return numba_ffi.register("jaxserve_angles", plan, share, __file__)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """See `rotary.rotate`: x [T, H, D] -> the same, on one CPU device, if `takes`."""
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jax.ffi.ffi_call(rotate_target(), result, vmap_method="sequential")(x, cos, sin)


@numba_ffi.compiled_once
def rotate_target() -> str:
    """The name of the kernel, which is compiled at the first call. Operands: x [T, H, D]; cos and
    sin [T, n]. Result: [T, H, D]."""

    @njit(**numba_ffi.OPTIONS)
    def plan(given: Any) -> Any:
        count, heads, width = numba_ffi.dims(given[0], 3)
        each = max(1, SHARE // (heads * width))
        return (count + each - 1) // each, 0

    @njit(**numba_ffi.INLINE)
    def share(given: Any, _: int, i: int) -> None:
        count, heads, width = numba_ffi.dims(given[0], 3)
        n, each = numba_ffi.dims(given[1], 2)[1], max(1, SHARE // (heads * width))
        x = carray(numba_ffi.data(given[0]), (count, heads, width), np.float32)
        cos = carray(numba_ffi.data(given[1]), (count, n), np.float32)
        sin = carray(numba_ffi.data(given[2]), (count, n), np.float32)
        out = carray(numba_ffi.data(given[3]), (count, heads, width), np.float32)
        for t in range(i * each, min((i + 1) * each, count)):
            c, s = cos[t], sin[t]
            for head in range(heads):
                one, to = x[t, head], out[t, head]
                for j in range(n):
                    first, second = one[j], one[n + j]
                    to[j] = first * c[j] - second * s[j]
                    to[n + j] = second * c[j] + first * s[j]
                for j in range(2 * n, width):
                    to[j] = one[j]

    return numba_ffi.register("jaxserve_rotate", plan, share, __file__)
