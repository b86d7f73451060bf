"""Sums of rows by weights on CPUs, by numba: products are always rounded before they are added."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi

SHARE = 1 << 14  # numbers that a share writes, about


def takes(y: jax.Array) -> bool:
    """Whether `add_weighted` supports these rows."""
    return y.dtype == jnp.float32


def add_weighted(base: jax.Array, y: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
    """See `weighted.add_weighted`: base [T, D] -> the same, on one CPU device, if `takes`."""
    result = jax.ShapeDtypeStruct(base.shape, jnp.float32)
    call = jax.ffi.ffi_call(target(), result, vmap_method="sequential")
    return call(base, y, weights, places)


@numba_ffi.compiled_once
def target() -> str:
    """The name of the kernel, which is compiled at the first call. Operands: base [T, D]; y [N, D];
    weights and places [T, K]. Result: [T, D]."""

    @njit(**numba_ffi.OPTIONS)
    def plan(given: Any) -> Any:
        count, width = numba_ffi.dims(given[0], 2)
        each = max(1, SHARE // width)
        return (count + each - 1) // each, 0

    @njit(**numba_ffi.INLINE)
    def share(given: Any, _: int, i: int) -> None:
        count, width = numba_ffi.dims(given[0], 2)
        rows, terms = numba_ffi.dims(given[1], 2)[0], numba_ffi.dims(given[2], 2)[1]
        base = carray(numba_ffi.data(given[0]), (count, width), np.float32)
        y = carray(numba_ffi.data(given[1]), (rows, width), np.float32)
        weights = carray(numba_ffi.data(given[2]), (count, terms), np.float32)
        places = carray(numba_ffi.data(given[3]), (count, terms), np.int32)
        out = carray(numba_ffi.data(given[4]), (count, width), np.float32)
        each = max(1, SHARE // width)
        for t in range(i * each, min((i + 1) * each, count)):
            for j in range(width):
                out[t, j] = base[t, j]
            for k in range(terms):
                one, weight = y[places[t, k]], weights[t, k]
                for j in range(width):
                    out[t, j] += weight * one[j]

    return numba_ffi.register("jaxserve_add_weighted", plan, share, __file__)
