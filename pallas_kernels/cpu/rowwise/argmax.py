"""The largest number of each row on CPUs, by numba: one pass, rows divided among all cores. XLA's
CPU compiler makes three passes, the first on one thread."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from jaxserve.pallas_kernels.cpu import numba_ffi

CHUNK = 512  # numbers whose maximum is one loop of vectors

_WORD = ir.IntType(32)
_NAN = ir.Constant(_WORD, 0x7FFFFFFF)
_INFINITY = 0x7F800000  # as a key; that of -inf is _LOWEST
_LOWEST = -0x7F800001


@numba_ffi.intrinsic
def _key(_: Any, number: Any) -> Any:
    """An int32 in the order of float32; -0 is 0, and NaN is above all."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.fadd(args[0], ir.Constant(ir.FloatType(), 0.0))
        word = builder.bitcast(number, _WORD)
        sign = builder.ashr(word, ir.Constant(_WORD, 31))
        key = builder.xor(word, builder.and_(sign, ir.Constant(_WORD, 0x7FFFFFFF)))
        return builder.select(builder.fcmp_unordered("uno", number, number), _NAN, key)

    return types.int32(types.float32), generate


def argmax(scores: jax.Array) -> jax.Array:
    """float32 [R, V] -> int32 [R], see `argmax.argmax`; on one CPU device."""
    result = jax.ShapeDtypeStruct(scores.shape[:1], jnp.int32)
    return jax.ffi.ffi_call(target(), result, vmap_method="sequential")(scores)


@numba_ffi.compiled_once
def target() -> str:
    """The name of the kernel, which is compiled at the first call."""
    return numba_ffi.register("jaxserve_argmax", _rows, _row, __file__)


@njit(**numba_ffi.OPTIONS)
def _rows(given: Any) -> Any:
    return numba_ffi.dims(given[0], 2)[0], 0


@njit(**numba_ffi.OPTIONS)
def _row(given: Any, _: int, row: int) -> None:
    rows, columns = numba_ffi.dims(given[0], 2)
    scores = carray(numba_ffi.data(given[0]), (rows, columns), np.float32)[row]
    best, first = _key(scores[0]), 0
    for begin_at in range(0, columns, CHUNK):
        top, part = best, scores[begin_at : begin_at + CHUNK]
        for j in range(part.shape[0]):  # from 0 on, so that it is vectorised
            top = max(top, _key(part[j]))
        if top > best:
            best, first = top, begin_at
    if best >= _INFINITY or best == _LOWEST:
        first = -1
    else:
        while _key(scores[first]) != best:
            first += 1
    carray(numba_ffi.data(given[1]), (rows,), np.int32)[row] = first
