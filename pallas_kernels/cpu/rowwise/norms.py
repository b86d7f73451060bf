"""Norms of rows on CPUs, and logarithms of sums of exponentials, by numba: a row's sums have a
fixed order, while XLA's CPU compiler sums differently for few rows than for many."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi, vectors
from jaxserve.pallas_kernels.cpu.vectors import BYTES, widened

SHARE = 1 << 15  # numbers that a share reads, about
_KINDS: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16}


def takes(x: jax.Array, *weights: jax.Array | None) -> bool:
    """Whether `norm` supports rows and weights of these dtypes."""
    return x.dtype == jnp.float32 and all(
        one is None or one.dtype.name in _KINDS for one in weights
    )


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    eps: float,
    offset: float,
    centred: bool,
) -> jax.Array:
    """See `norm.norm`: x [T, D] -> the same, on one CPU device, if `takes`."""
    one = jnp.ones(x.shape[1], jnp.float32) if scale is None else scale
    given = () if bias is None else (bias.astype(one.dtype),)
    name = target(one.dtype.name, centred=centred, biased=bias is not None)
    call = jax.ffi.ffi_call(
        name, jax.ShapeDtypeStruct(x.shape, jnp.float32), vmap_method="sequential"
    )
    return call(x, one, np.array([eps, offset], np.float32), *given)


@numba_ffi.compiled_once
def target(kind: str, *, centred: bool, biased: bool) -> str:
    """The name of the kernel, which is compiled at the first call. Operands: x [T, D]; scale [D];
    float32 [2]: eps, offset; bias [D] if biased. Result: [T, D], float32.

    Args:
        kind: Dtype of scale and bias.
        centred: Whether each row's mean is subtracted first.
        biased: Whether there is a bias.
    """
    number = _KINDS[kind]

    @njit(**numba_ffi.INLINE)
    def share(given: Any, _: int, i: int) -> None:
        rows, width = numba_ffi.dims(given[0], 2)
        each = max(1, SHARE // width)
        x_at, out_at = numba_ffi.data_address(given[0]), numba_ffi.data_address(given[3 + biased])
        scale = carray(numba_ffi.data(given[1]), (width,), number)
        floats = carray(numba_ffi.data(given[2]), (2,), np.float32)
        bias = carray(numba_ffi.data(given[2 + biased]), (width,), number)
        eps, offset, count = floats[0], floats[1], np.float32(width)
        for row in range(i * each, min((i + 1) * each, rows)):
            here, to = x_at + BYTES * row * width, out_at + BYTES * row * width
            x = carray(numba_ffi.pointer(here), (width,), np.float32)
            out = carray(numba_ffi.pointer(to), (width,), np.float32)
            mean = np.float32(0)
            if centred:
                mean = vectors.sum_of(here, width) / count
                for j in range(width):
                    out[j] = x[j] - mean
                here = to
            squares = vectors.sum_of_squares(here, width) / count
            factor = np.float32(1) / np.sqrt(squares + eps)
            for j in range(width):
                out[j] = (x[j] - mean) * factor * (widened(scale[j]) + offset)
            if biased:
                for j in range(width):
                    out[j] += widened(bias[j])

    name = f"jaxserve_norm_{kind}{'_centred' if centred else ''}{'_biased' if biased else ''}"
    return numba_ffi.register(name, _shares, share, __file__, vectors.__file__)


@njit(**numba_ffi.OPTIONS)
def _shares(given: Any) -> Any:
    rows, width = numba_ffi.dims(given[0], 2)
    each = max(1, SHARE // width)
    return (rows + each - 1) // each, 0


def log_sum_exp(x: jax.Array) -> jax.Array:
    """See `norm.log_sum_exp`: float32 [R, V] -> [R], on one CPU device."""
    result = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    return jax.ffi.ffi_call(log_sum_exp_target(), result, vmap_method="sequential")(x)


@numba_ffi.compiled_once
def log_sum_exp_target() -> str:
    """The name of the kernel, which is compiled at the first call. Operand: x [R, V]; result:
    [R]."""

    @njit(**numba_ffi.OPTIONS)
    def plan(given: Any) -> Any:
        return numba_ffi.dims(given[0], 2)[0], 0

    @njit(**numba_ffi.INLINE)
    def share(given: Any, _: int, i: int) -> None:
        rows, width = numba_ffi.dims(given[0], 2)
        here = numba_ffi.data_address(given[0]) + BYTES * i * width
        x = carray(numba_ffi.pointer(here), (width,), np.float32)
        top = x[0]
        for j in range(width):
            top = max(top, x[j])
        out = carray(numba_ffi.data(given[1]), (rows,), np.float32)
        out[i] = top + np.log(vectors.sum_of_exp(here, width, top))

    return numba_ffi.register("jaxserve_log_sum_exp", plan, share, __file__, vectors.__file__)
