"""Products with weights in groups, see `quantized_matmul`, on Pallas-Triton.

A program computes a tile of the result, or of one of several partial sums. It reads the stored
numbers once, and multiplies x by the weights in x's dtype. Many rows are multiplied by the library
instead, with weights that are written out in x's dtype first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.gpu_triton import common, tuning

_LEAST = 16  # of each side of a tensor core's product
_PROGRAMS = 512  # several for each multiprocessor of a large GPU
_TURNS = (128, 64, 32)  # inputs per iteration
# Bits of 2^k such that an integer below 16 fits into the last bits of the fraction; and 2^k + 8.
_WHOLE = {"bfloat16": (0x4300, 136.0), "float16": (0x6400, 1032.0)}


# From so many rows on, the library's product is faster, weights written out first included. On an
# H200 a Llama-3-8B's product up or down takes 0.34 us for each row by the kernel (692 us for 2,048
# rows), 0.15 us by cuBLAS (302 us) after 160 us of writing: equal at 840 rows.
LIBRARY_ROWS = 1024


class Sizes(NamedTuple):
    """How a product is cut.

    Attributes:
        rows, columns: of a program's part of the result.
        turn: inputs per iteration: whole groups, or part of one.
        splits: number of programs among which the inputs of a part are divided; their sums are
            added.
        warps, stages: num_warps and num_stages.
    """

    rows: int
    columns: int
    turn: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


# (rows of x at most, rows, columns and stages), as measured on an H200; columns are halved until
# they divide the outputs.
_TABLE = ((16, 16, 128, 3), (32, 32, 64, 2), (64, 64, 64, 2), (None, 128, 64, 3))


def sizes_for(count: int, inputs: int, outputs: int, group: int, itemsize: int = 2) -> Sizes:
    """The sizes of one product.

    Args:
        count: rows of x.
        inputs, outputs: sizes of the weights.
        group: inputs that share a scale.
        itemsize: bytes of a number of x.
    """
    rows, columns, stages = next(sizes for most, *sizes in _TABLE if most is None or count <= most)
    if itemsize > 2:
        rows, stages = min(rows, 32), 2
    if tuning.target().capability in tuning.SMALL_SHARED_MEMORY:
        stages = 2
    while outputs % columns:
        columns //= 2
    fitting = [turn for turn in _TURNS if inputs % turn == 0]
    turn = next(turn for turn in fitting if turn % group == 0 or group % turn == 0)
    programs, turns = common.cdiv(count, rows) * (outputs // columns), inputs // turn
    splits = 1
    while programs * splits < _PROGRAMS and turns % (2 * splits) == 0 and turns > 4 * splits:
        splits *= 2
    return Sizes(rows, columns, turn, splits, stages=stages)


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
    """The kernel for weights of these shapes; None if there is none. XLA handles 8 bits with one
    scale per output. See `quantized_matmul`."""
    if transposed or (q.shape[0] == x.shape[1] and scale.shape[0] == 1 and zero is None):
        return None
    inputs, group = x.shape[1], x.shape[1] // scale.shape[0]
    whole = group in _TURNS or group % _TURNS[0] == 0
    if inputs % group or not whole or q.shape[1] % _LEAST:
        return None
    if x.shape[0] >= LIBRARY_ROWS:
        return functools.partial(by_library, dtype=dtype)
    return functools.partial(by_kernel, dtype=dtype, interpret=interpret)


def by_library(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None, *, dtype: DTypeLike
) -> jax.Array:
    """The product with weights that are written out in x's dtype: the same numbers as in the
    kernel, in another order of sums.

    Args:
        x: [T, in].
        q: The stored numbers, see `quantized_matmul`.
        scale: [groups, out].
        zero: int8 [groups, out], or None.
        dtype: Of the result.
    """
    inputs, halves = x.shape[1], x.shape[1] // q.shape[0]
    parts = [q.astype(x.dtype)] if halves == 1 else _halves(q, x.dtype)
    wide = jnp.stack(parts, axis=1).reshape(*scale.shape[:1], -1, q.shape[1])
    if zero is not None:
        wide -= zero.astype(x.dtype)[:, None]
    wide *= scale.astype(x.dtype)[:, None]
    # Otherwise XLA could compute them anew for each tile of the result.
    wide = lax.optimization_barrier(wide.reshape(inputs, -1))
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, wide, precision=exact, preferred_element_type=jnp.float32).astype(dtype)


def by_kernel(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """The product by the kernel.

    Args:
        x: [T, in].
        q: The stored numbers, see `quantized_matmul`.
        scale: [groups, out].
        zero: int8 [groups, out], or None.
        dtype: Of the result.
        interpret: Run in the interpreter.
    """
    count, inputs = x.shape
    outputs = q.shape[1]
    halves = inputs // q.shape[0]
    # The inputs of the low halves, then the inputs of the high halves.
    x = jnp.moveaxis(x.reshape(count, q.shape[0], halves), 2, 0)
    group = inputs // scale.shape[0]
    sizes = sizes_for(count, inputs, outputs, group, x.dtype.itemsize)
    rows, columns, splits = sizes.rows, sizes.columns, sizes.splits
    padded = common.cdiv(count, rows) * rows
    x = jnp.pad(x, ((0, 0), (0, padded - count), (0, 0)))
    kernel = functools.partial(_kernel, group=group, sizes=sizes, zeros=zero is not None)
    operands = [x, q, scale] if zero is None else [x, q, scale, zero]
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(
            (splits, padded, outputs), dtype if splits == 1 else jnp.float32
        ),
        grid=(padded // rows, outputs // columns, splits),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="grouped_matmul",
    )
    y: jax.Array = call(*operands)
    y = y[0] if splits == 1 else y.sum(axis=0).astype(dtype)
    return y[:count]


def _kernel(*refs: Any, group: int, sizes: Sizes, zeros: bool) -> None:
    """refs: x [halves, T, in / halves], q, scale, zero if there is one, the sums [splits, T,
    out]."""
    x_ref, q_ref, scale_ref, *rest = refs
    out_ref = rest[-1]
    rows, columns, turn = tile = sizes[:3]
    split = pl.program_id(2)
    at = pl.ds(pl.program_id(0) * rows, rows)
    mine = pl.ds(pl.program_id(1) * columns, columns)
    halves = x_ref.shape[0]
    depth, groups = turn // halves, max(1, turn // group)

    def of_groups(ref: Any, index: jax.Array) -> jax.Array:
        """The group's value for each number, in x's dtype: [depth, columns] or [1, columns]."""
        first = index * groups if turn >= group else lax.div(index, jnp.int32(group // turn))
        found = ref[pl.ds(first, groups), mine].astype(x_ref.dtype)
        if groups == 1:
            return found
        spread = jnp.broadcast_to(found[:, None, :], (groups, depth // groups, columns))
        return spread.reshape(depth, columns)

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        where = pl.ds(index * depth, depth)
        numbers = q_ref[where, mine]
        scale = of_groups(scale_ref, index)
        zero = of_groups(rest[0], index) if zeros else None
        parts = [numbers.astype(x_ref.dtype)] if halves == 1 else _halves(numbers, x_ref.dtype)
        for half, wide in enumerate(parts):
            wide = wide if zero is None else wide - zero
            total += plgpu.dot(x_ref[half, at, where], wide * scale)
        return total

    turns = q_ref.shape[0] // (depth * sizes.splits)
    first = split * turns
    total = lax.fori_loop(first, first + turns, one, jnp.zeros(tile[:2], jnp.float32))
    out_ref[split, at, mine] = total.astype(out_ref.dtype)


def _halves(numbers: jax.Array, dtype: DTypeLike) -> list[jax.Array]:
    """The low and the high halves of int8, in a float dtype. For 16-bit floats they are put into
    the fraction of a power of two, since converting integers takes longer."""
    name = jnp.dtype(dtype).name
    if name not in _WHOLE:
        wide = numbers.astype(jnp.int32)
        return [((wide << 28) >> 28).astype(dtype), (wide >> 4).astype(dtype)]
    bits, offset = _WHOLE[name]
    wide = numbers.astype(jnp.int16)
    found = [((half & 15) ^ 8) | jnp.int16(bits) for half in (wide, wide >> 4)]
    return [lax.bitcast_convert_type(half, dtype) - jnp.asarray(offset, dtype) for half in found]
