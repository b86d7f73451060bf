"""Products with weights of 8 or 4 bits on CPUs, compiled by numba: the weights are read as they are
stored, an output's one behind the other, and widened in registers. Sums are in float32."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu import numba_ffi, pairs, tiles
from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic

MOST_ROWS = 64  # with more, XLA's product with weights that it writes out wide is faster
STEP = 32  # inputs that are widened at once
SHARE = 1 << 17  # bytes of weights that a share reads, about
LINE = 64  # bytes
TOGETHER = 8  # rows of x

_BYTES = ir.VectorType(ir.IntType(8), tiles.LANES)
_WORDS = ir.VectorType(tiles.INDEX, tiles.LANES)
_SUMS = ir.VectorType(ir.FloatType(), tiles.LANES)


def takes(
    x: jax.ShapeDtypeStruct,
    q: jax.ShapeDtypeStruct,
    scale: jax.ShapeDtypeStruct,
    zero: jax.ShapeDtypeStruct | None,
    *,
    transposed: bool,
) -> bool:
    """Whether `few_bits_matmul` supports the product.

    Args:
        x, q, scale, zero: See there.
        transposed: Whether q, scale and zero are [out, ...], as it wants them.
    """
    rows, inputs = x.shape
    if not transposed or q.dtype != jnp.int8 or inputs % scale.shape[1]:
        return False
    return inputs // scale.shape[1] % STEP == 0 and rows <= MOST_ROWS


def few_bits_matmul(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None
) -> jax.Array:
    """x @ ((q - zero) * scale).T on one CPU device, if `takes`.

    Args:
        x: [T, in].
        q: int8 [out, in], or [out, in / 2]: two neighbouring inputs in each, the first in the low
            half.
        scale: [out, groups]; a group is in / groups inputs one after another.
        zero: int8 [out, groups], or None.

    Returns:
        float32 [T, out].
    """
    call = jax.ffi.ffi_call(
        target(packed=q.shape[1] < x.shape[1], zeros=zero is not None),
        jax.ShapeDtypeStruct((x.shape[0], q.shape[0]), jnp.float32),
        vmap_method="sequential",
    )
    given = (x.astype(jnp.float32), q, scale.astype(jnp.float32))
    return call(*given, *(() if zero is None else (zero,)))


@numba_ffi.compiled_once
def target(*, packed: bool, zeros: bool) -> str:
    """The name of the kernel, compiled if it is the first time. Operands: as `few_bits_matmul` has
    them, x and scale
    of float32; result: [T, out], float32."""
    name = f"jaxserve_few_bits_{4 if packed else 8}{'_zeros' if zeros else ''}"

    @njit(**numba_ffi.FAST)
    def share(given: Any, address: int, i: int) -> None:
        _share(given, address, i, packed, zeros)

    @njit(**numba_ffi.OPTIONS)
    def plan(given: Any) -> Any:
        return _plan(given, packed)

    return numba_ffi.register(name, plan, share, __file__, pairs.__file__, tiles.__file__)


@njit(**numba_ffi.OPTIONS)
def _each(given: Any) -> int:
    """Outputs of a share."""
    return max(1, SHARE // numba_ffi.dims(given[1], 2)[1])


@njit(**numba_ffi.OPTIONS)
def _aligned(address: int) -> int:
    """Where the first whole line of the caches begins: vectors that lie in two take twice as
    long."""
    return (address + LINE - 1) // LINE * LINE


@njit(**numba_ffi.FAST)
def _plan(given: Any, packed: bool) -> Any:
    """What all shares know, for packed weights: x, of each STEP numbers those at even places
    first."""
    count, depth = numba_ffi.dims(given[0], 2)
    outputs, each = numba_ffi.dims(given[1], 2)[0], _each(given)
    shares = (outputs + each - 1) // each
    if not packed:
        return shares, 0
    size = count * depth
    address = numba_ffi.allocate((size + LINE) // 2)
    x = carray(numba_ffi.data(given[0]), (size,), np.float32)
    parted = carray(numba_ffi.pointer(_aligned(address)), (size,), np.float32)
    for first in range(0, size, STEP):
        for lane in range(tiles.LANES):
            parted[first + lane] = x[first + 2 * lane]
            parted[first + tiles.LANES + lane] = x[first + 2 * lane + 1]
    return shares, address


@njit(**numba_ffi.FAST)
def _share(given: Any, address: int, i: int, packed: bool, zeros: bool) -> None:
    """Share i: some outputs of all rows."""
    x_at = _aligned(address) if packed else numba_ffi.data_address(given[0])
    count, depth = numba_ffi.dims(given[0], 2)
    outputs, width = numba_ffi.dims(given[1], 2)
    groups = numba_ffi.dims(given[2], 2)[1]
    group, row_bytes = depth // groups, 4 * depth
    q_at, scale_at = numba_ffi.data_address(given[1]), numba_ffi.data_address(given[2])
    out = carray(numba_ffi.data(given[len(given) - 1]), (count, outputs), np.float32)
    scale = carray(numba_ffi.data(given[2]), (outputs, groups), np.float32)
    each, steps = _each(given), group // STEP
    sums = np.empty((count if zeros else 0, groups), np.float32)  # of x
    if zeros:
        x = carray(numba_ffi.pointer(x_at), (count, groups, group), np.float32)
        for row in range(count):
            for g in range(groups):
                sums[row, g] = x[row, g].sum()
    found = np.empty(TOGETHER, np.float32)
    to = found.ctypes.data
    for first in range(0, count, TOGETHER):
        rows = min(TOGETHER, count - first)
        for n in range(i * each, min((i + 1) * each, outputs)):
            at, weights, scales = (
                x_at + first * row_bytes,
                q_at + n * width,
                scale_at + 4 * n * groups,
            )
            done = 0
            while done < rows:
                here, there = at + done * row_bytes, to + 4 * done
                if rows - done >= 8:
                    if packed:
                        dot_4_8(here, row_bytes, weights, scales, groups, steps, there)
                    else:
                        dot_8_8(here, row_bytes, weights, scales, groups, steps, there)
                    done += 8
                elif rows - done >= 2:
                    if packed:
                        dot_4_2(here, row_bytes, weights, scales, groups, steps, there)
                    else:
                        dot_8_2(here, row_bytes, weights, scales, groups, steps, there)
                    done += 2
                elif steps == 1 and groups % 2 == 0:
                    if packed:
                        dot_4_narrow(here, weights, scales, groups // 2, there)
                    else:
                        dot_8_narrow(here, weights, scales, groups // 2, there)
                    done += 1
                else:
                    if packed:
                        dot_4_1(here, row_bytes, weights, scales, groups, steps, there)
                    else:
                        dot_8_1(here, row_bytes, weights, scales, groups, steps, there)
                    done += 1
            for row in range(rows):
                value = found[row]
                if zeros:
                    zero = carray(numba_ffi.data(given[3]), (outputs, groups), np.int8)
                    for g in range(groups):
                        value -= np.float32(zero[n, g]) * scale[n, g] * sums[first + row, g]
                out[first + row, n] = value


def _widened(builder: Any, at: Any, packed: bool) -> list[Any]:
    """STEP weights at an address, as two vectors of float32."""
    if not packed:
        further = builder.add(at, ir.Constant(tiles.WORD, tiles.LANES))
        words = [builder.sext(tiles.load(builder, a, _BYTES, 1), _WORDS) for a in (at, further)]
        return [builder.sitofp(part, _SUMS) for part in words]
    found = tiles.load(builder, at, _BYTES, 1)

    def constants(value: int) -> Any:
        return ir.Constant(_WORDS, [value] * tiles.LANES)

    if pairs.has_vectors():  # a table of 16 numbers, of which the lower half of a byte chooses one
        low = builder.zext(found, _WORDS)
        table = ir.Constant(_SUMS, [float(n - 16 * (n > 7)) for n in range(16)])
        kind = ir.FunctionType(_SUMS, [_SUMS, _WORDS])
        name = "llvm.x86.avx512.permvar.sf.512"
        choose = cgutils.get_or_insert_function(builder.module, kind, name)
        high = builder.lshr(low, constants(4))
        return [builder.call(choose, [table, half]) for half in (low, high)]
    words = builder.sext(found, _WORDS)
    low = builder.ashr(builder.shl(words, constants(28)), constants(28))
    return [builder.sitofp(part, _SUMS) for part in (low, builder.ashr(words, constants(4)))]


def _dot(bits: int, rows: int) -> Any:
    packed = bits == 4

    @intrinsic
    def dot(
        _: Any, x: Any, x_row: Any, q: Any, scale: Any, groups: Any, steps: Any, to: Any
    ) -> Any:
        """Products of rows of x with an output's weights, float32.

        Args:
            x: Address of float32 numbers.
            x_row: Bytes from one row of x to the next.
            q: Address of the weights.
            scale: Address of the groups' scales, float32.
            groups: How many.
            steps: Of STEP weights in a group.
            to: Address where the sums go.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_row, q, scale, groups, steps, to = args

            def constant(value: int) -> Any:
                return ir.Constant(tiles.WORD, value)

            nothing = ir.Constant(_SUMS, [0.0] * tiles.LANES)
            sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(rows)]
            # Each sum waits for the one before: few rows have two each.
            halves = 2 if rows <= 2 else 1
            parts = [
                [cgutils.alloca_once_value(builder, nothing) for _ in range(halves)]
                for _ in range(rows)
            ]
            x_rows = [builder.add(x, builder.mul(x_row, constant(row))) for row in range(rows)]
            with cgutils.for_range(builder, groups) as outer:
                for part in itertools.chain(*parts):
                    builder.store(nothing, part)
                before = builder.mul(outer.index, steps)
                with cgutils.for_range(builder, steps) as loop:
                    step = builder.add(before, loop.index)
                    at = builder.add(q, builder.mul(step, constant(STEP * bits // 8)))
                    weights = _widened(builder, at, packed)
                    offset = builder.mul(step, constant(STEP * tiles.BYTES))
                    for half, weight in enumerate(weights):
                        further = builder.add(offset, constant(half * tiles.LANES * tiles.BYTES))
                        for row, mine in zip(x_rows, parts, strict=True):
                            part, place = mine[half % halves], builder.add(row, further)
                            numbers = tiles.load(builder, place, _SUMS)
                            value = tiles.fused(builder, numbers, weight, builder.load(part))
                            builder.store(value, part)
                place = builder.add(scale, builder.mul(outer.index, constant(tiles.BYTES)))
                factor = tiles.spread(builder, tiles.load(builder, place, ir.FloatType()))
                for one, mine in zip(sums, parts, strict=True):
                    value = functools.reduce(builder.fadd, map(builder.load, mine))
                    builder.store(tiles.fused(builder, value, factor, builder.load(one)), one)
            for row, one in enumerate(sums):
                total = tiles.total(builder, builder.load(one))
                tiles.store(builder, total, builder.add(to, constant(row * tiles.BYTES)))
            return context.get_dummy_value()

        return types.none(*[types.int64] * 7), generate

    return dot


def _dot_narrow(bits: int) -> Any:
    packed = bits == 4

    @intrinsic
    def dot(_: Any, x: Any, q: Any, scale: Any, pairs_: Any, to: Any) -> Any:
        """As `_dot` for a row, where each group is one step, and there is an even number.

        Args:
            x: Address of float32 numbers.
            q: Address of the weights.
            scale: Address of the groups' scales, float32.
            pairs_: Half of the number of groups.
            to: Address where the sum goes.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, q, scale, count, to = args
            nothing = ir.Constant(_SUMS, [0.0] * tiles.LANES)
            sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(2)]

            def moved(address: Any, step: Any, size: int, further: int = 0) -> Any:
                offset = builder.mul(step, ir.Constant(tiles.WORD, size))
                return builder.add(builder.add(address, offset), ir.Constant(tiles.WORD, further))

            with cgutils.for_range(builder, count) as loop:
                for group, one in enumerate(sums):
                    size = STEP * bits // 8
                    at = moved(q, loop.index, 2 * size, group * size)
                    low, high = _widened(builder, at, packed)
                    size = STEP * tiles.BYTES
                    here = moved(x, loop.index, 2 * size, group * size)
                    further = builder.add(here, ir.Constant(tiles.WORD, size // 2))
                    value = builder.fmul(tiles.load(builder, here, _SUMS), low)
                    value = tiles.fused(builder, tiles.load(builder, further, _SUMS), high, value)
                    place = moved(scale, loop.index, 2 * tiles.BYTES, group * tiles.BYTES)
                    factor = tiles.spread(builder, tiles.load(builder, place, ir.FloatType()))
                    value = tiles.fused(builder, value, factor, builder.load(one))
                    builder.store(value, one)
            total = tiles.total(builder, builder.fadd(*map(builder.load, sums)))
            tiles.store(builder, total, to)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), generate

    return dot


dot_4_narrow, dot_8_narrow = _dot_narrow(4), _dot_narrow(8)
dot_8_1, dot_8_2, dot_8_8 = (_dot(8, rows) for rows in (1, 2, 8))
dot_4_1, dot_4_2, dot_4_8 = (_dot(4, rows) for rows in (1, 2, 8))
