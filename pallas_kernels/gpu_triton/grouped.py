"""Products with weights in groups, see `quantized_matmul`, on Pallas-Triton.

A program makes a tile of the result. It reads each group's numbers once, as they are stored, and
multiplies them as whole numbers (which x's dtype holds); the group's scale goes onto the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.gpu_triton import common

_LEAST = 16  # of each side of a tensor core's product
_COLUMNS = (64, 32, 16)
_PROGRAMS = 128  # as many as a large GPU has multiprocessors, about
_ROWS = 64
_UNROLLED = 128  # inputs that one turn of the loop takes, at least


def choose(
    x: Any,
    q: Any,
    scale: Any,
    zero: Any | None,
    *,
    transposed: bool,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> Callable[..., jax.Array] | None:
    """The kernel for weights of these shapes; None if there is none. 8 bits with one scale an
    output are XLA's. See `quantized_matmul`."""
    if transposed or (q.shape[0] == x.shape[1] and scale.shape[0] == 1 and zero is None):
        return None
    inputs, group = x.shape[1], x.shape[1] // scale.shape[0]
    whole = group in (2 * _LEAST, 4 * _LEAST) or group % _UNROLLED == 0
    if inputs % group or not whole or q.shape[1] % _LEAST:
        return None
    return functools.partial(_matmul, dtype=dtype, interpret=interpret)


def _matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    dtype: DTypeLike,
    interpret: bool,
) -> jax.Array:
    count, inputs = x.shape
    outputs = q.shape[1]
    halves = inputs // q.shape[0]
    # The inputs of the low halves, then those of the high ones.
    x = jnp.moveaxis(x.reshape(count, q.shape[0], halves), 2, 0)
    rows = min(_ROWS, max(_LEAST, common.power_of_two(count)))
    padded = common.cdiv(count, rows) * rows
    x = jnp.pad(x, ((0, 0), (0, padded - count), (0, 0)))
    fitting = [columns for columns in _COLUMNS if outputs % columns == 0]
    columns = next(
        (one for one in fitting if padded // rows * (outputs // one) >= _PROGRAMS), fitting[-1]
    )
    group = inputs // scale.shape[0]
    kernel = functools.partial(
        _kernel,
        group=min(group, _UNROLLED),
        every=max(1, group // _UNROLLED),
        tile=(rows, columns),
        zeros=zero is not None,
    )
    operands = [x, q, scale] if zero is None else [x, q, scale, zero]
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((padded, outputs), dtype),
        grid=(padded // rows, outputs // columns),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="grouped_matmul",
    )
    y: jax.Array = call(*operands)
    return y[:count]


def _kernel(*refs: Any, group: int, every: int, tile: tuple[int, int], zeros: bool) -> None:
    """refs: x [halves, T, in / halves], q, scale, zero if there is one, the result. group: inputs
    of one product; every: products that share a scale."""
    x_ref, q_ref, scale_ref, *rest = refs
    out_ref = rest[-1]
    rows, columns = tile
    halves = x_ref.shape[0]
    at = pl.ds(pl.program_id(0) * rows, rows)
    mine = pl.ds(pl.program_id(1) * columns, columns)
    depth = group // halves
    products = q_ref.shape[0] // depth
    together = max(1, _UNROLLED // group)
    together = together if products % together == 0 else 1

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        where = pl.ds(index * depth, depth)
        numbers = q_ref[where, mine]
        of_group = lax.div(index, jnp.int32(every)) if every > 1 else index
        zero = rest[0][pl.ds(of_group, 1), mine].astype(x_ref.dtype) if zeros else None
        parts = [numbers] if halves == 1 else _halves(numbers)
        summed = jnp.zeros(tile, jnp.float32)
        for half, part in enumerate(parts):
            wide = part.astype(x_ref.dtype)
            if zero is not None:
                wide = wide - zero
            summed += plgpu.dot(x_ref[half, at, where], wide)
        return total + summed * scale_ref[pl.ds(of_group, 1), mine].astype(jnp.float32)

    def several(turn: jax.Array, total: jax.Array) -> jax.Array:
        for index in range(together):
            total = one(turn * together + index, total)
        return total

    turns = products // together
    total = lax.fori_loop(0, turns, several, jnp.zeros(tile, jnp.float32))
    out_ref[at, mine] = total.astype(out_ref.dtype)


def _halves(numbers: jax.Array) -> list[jax.Array]:
    wide = numbers.astype(jnp.int32)
    return [(wide << 28) >> 28, wide >> 4]
