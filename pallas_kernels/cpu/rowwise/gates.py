"""Gated activations on CPUs, by numba: each number by the same operations, whatever the shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit, types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu import numba_ffi, vectors
from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic
from jaxserve.pallas_kernels.cpu.vectors import BYTES, LANES

SHARE = 1 << 15  # numbers per share
_SILU, _GELU, _SIGMOID, _CLAMPED = range(4)
_KINDS = {"silu": _SILU, "gelu_pytorch_tanh": _GELU, "sigmoid": _SIGMOID}


def takes(gate: jax.Array, up: jax.Array) -> bool:
    """Whether `gated` supports these."""
    return gate.dtype == up.dtype == jnp.float32


def gated(
    gate: jax.Array, up: jax.Array, activation: str, clamped: tuple[float, float] | None
) -> jax.Array:
    """See `gates.gated`: [T, width] each -> the same, on one CPU device, if `takes`."""
    kind = _KINDS[activation] if clamped is None else _CLAMPED
    result = jax.ShapeDtypeStruct(gate.shape, jnp.float32)
    call = jax.ffi.ffi_call(target(kind), result, vmap_method="sequential")
    return call(gate, up, np.array(clamped or (0, 0), np.float32))


@intrinsic(prefer_literal=True)
def _gate(
    _: Any, kind: Any, gate: Any, up: Any, to: Any, n: Any, limit: Any, alpha: Any
) -> Any:  # fmt: skip
    """Writes activation(gate) * up for n float32 at addresses. kind: Literal."""
    activation = kind.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, gate, up, to, n, limit, alpha = args

        one = vectors.everywhere(1.0)
        most, steep = vectors.spread(builder, limit), vectors.spread(builder, alpha)

        def write(index: Any, count: Any) -> None:
            gates, ups, place = (
                vectors.moved(builder, at, index, LANES * BYTES) for at in (gate, up, to)
            )
            x, y = (vectors.masked(builder, at, vectors.VECTOR, count) for at in (gates, ups))
            slope = x
            if activation == _CLAMPED:
                x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
                y = builder.select(builder.fcmp_ordered(">", y, most), most, y)
                least = builder.fneg(most)
                y = builder.select(builder.fcmp_ordered("<", y, least), least, y)
                y, slope = builder.fadd(y, one), builder.fmul(x, steep)
            if activation == _GELU:  # x (1 + tanh u) / 2 is x / (1 + exp(-2 u))
                cube = builder.fmul(builder.fmul(x, x), x)
                inner = vectors.fused(builder, cube, vectors.everywhere(0.044715), x)
                slope = builder.fmul(inner, vectors.everywhere(1.5957691216057308))
            below = builder.fadd(one, vectors.exp(builder, builder.fneg(slope)))
            above = one if activation == _SIGMOID else x
            value = builder.fmul(builder.fdiv(above, below), y)
            if count is None:
                vectors.store(builder, value, place)
            else:
                vectors.store_first(builder, value, place, count)

        lanes = vectors.constant(LANES)
        whole, left = builder.udiv(n, lanes), builder.urem(n, lanes)
        with cgutils.for_range(builder, whole) as loop:
            write(loop.index, None)
        with builder.if_then(builder.icmp_signed(">", left, vectors.constant(0))):
            write(whole, left)
        return context.get_dummy_value()

    given = [types.int64] * 4 + [types.float32] * 2
    return types.none(kind, *given), generate


@numba_ffi.compiled_once
def target(kind: int) -> str:
    """The name of the kernel, which is compiled at the first call. Operands: gate and up [T,
    width]; float32 [2]: limit, alpha. Result: [T, width]."""

    @njit(**numba_ffi.OPTIONS)
    def plan(given: Any) -> Any:
        rows, width = numba_ffi.dims(given[0], 2)
        return (rows * width + SHARE - 1) // SHARE, 0

    @njit(**numba_ffi.INLINE)
    def share(given: Any, _: int, i: int) -> None:
        rows, width = numba_ffi.dims(given[0], 2)
        n, at = min(SHARE, rows * width - i * SHARE), BYTES * i * SHARE
        gate_at, up_at = numba_ffi.data_address(given[0]), numba_ffi.data_address(given[1])
        to = numba_ffi.data_address(given[3])
        limit, alpha = carray(numba_ffi.data(given[2]), (2,), np.float32)
        _gate(kind, gate_at + at, up_at + at, to + at, n, limit, alpha)

    return numba_ffi.register(f"jaxserve_gated_{kind}", plan, share, __file__, vectors.__file__)
