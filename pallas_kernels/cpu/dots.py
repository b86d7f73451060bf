"""Products of rows with weights [out, in] on CPUs, compiled by numba: all cores read the weights
once for as many rows as their caches hold, as they are stored, one output after the other. A tile
is some rows by OUTPUTS outputs, with a vector of sums along the inputs for each pair; meanwhile it
fetches the weights of the next outputs. A row's sums do not depend on the number of rows:
each row has the same additions in the same order. If groups of rows have weights of their own,
[groups, out, in], weights of groups without rows are not read.

Weights of bfloat16, 8 and 4 bits are multiplied as bfloat16, which represents them exactly, and so
are the rows, or as float32 if that is faster; sums and scales are float32. With 8 or 4 bits, a
vector of stored words is split by place: the first numbers in every 16 bits, the second ones, and
so on. The rows are split likewise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import dot_tiles, numba_ffi, pairs, vectors
from jaxserve.pallas_kernels.cpu.pairs import LINE
from jaxserve.pallas_kernels.pool import FLOAT8

OUTPUTS = 4  # outputs of a tile of several rows
TAIL = 64  # rows of no group that a share fills with zeros
PART = 1 << 19  # bytes of rows that are multiplied at once: they fit a core's cache
FEW = 8  # up to this many rows, the time is that of memory
SHARE, LARGE_SHARE = 1 << 17, 1 << 19  # bytes of a share's weights, about, with few or more rows
_FILES = (dot_tiles.__file__, pairs.__file__, vectors.__file__)
_BESIDE = ("", "_zeros", "_minimums")  # suffixes of kernels' names
_GROUPS = 4  # words before the groups in the plan of `_plan_groups`
INPUTS = 32  # quantised weights have a multiple of this many


def takes(rows: int, weights: jax.Array | jax.ShapeDtypeStruct, *, transposed: bool) -> bool:
    """Whether `skinny_matmul` supports the product of this many rows with these weights."""
    if not transposed or weights.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    numbers = LINE // (4 if weights.dtype == jnp.float32 else 2)
    return weights.shape[0] >= OUTPUTS and weights.shape[1] % numbers == 0


def skinny_matmul(x: jax.Array, weights: jax.Array, *, transposed: bool) -> jax.Array:
    """x [T, in] @ weights [out, in].T -> float32 [T, out], if `takes`. Both of bfloat16 or float32,
    on one CPU device. Sums are in float32."""
    assert transposed
    return _dots(x, weights, bits=8 * weights.dtype.itemsize)


def takes_groups(weights: jax.Array | jax.ShapeDtypeStruct, *, transposed: bool) -> bool:
    """Whether `grouped_matmul` supports products with these weights."""
    one = jax.ShapeDtypeStruct(weights.shape[1:], weights.dtype)
    return takes(1, one, transposed=transposed)


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each group of rows with its own weights, on one CPU device, if `takes_groups`.

    Args:
        x: [T, in], in the weights' dtype; rows by group.
        weights: [groups, out, in].
        sizes: int32 [groups], rows of each; together at most T.

    Returns:
        float32 [T, out]; zeros behind the last group.
    """
    return _dots(x, weights, sizes, bits=8 * weights.dtype.itemsize, grouped=True)


def takes_few_bits(
    x: jax.ShapeDtypeStruct,
    q: jax.ShapeDtypeStruct,
    scale: jax.ShapeDtypeStruct,
    *,
    transposed: bool,
) -> bool:
    """Whether `few_bits_matmul` supports the product.

    Args:
        x, q, scale: See `few_bits_matmul`.
        transposed: Whether q, scale and zero are [out, ...], as it needs.
    """
    (outputs, width), inputs = q.shape, x.shape[1]
    if not transposed or q.dtype not in (jnp.int8, FLOAT8) or outputs < OUTPUTS:
        return False
    groups = scale.shape[1]
    if inputs % (INPUTS * groups):
        return False
    return groups == 1 or _parts(inputs // groups, 8 * width // inputs) > 0


def few_bits_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    minimum: jax.Array | None = None,
) -> jax.Array:
    """x @ ((q - zero) * scale + minimum).T on one CPU device, if `takes_few_bits`.

    Args:
        x: [T, in], bfloat16 or float32.
        q: int8 or float8_e4m3fn [out, in]; or int8 [out, in / 2]: two neighbouring inputs in each,
            the first in the low half.
        scale: [out, groups]; a group is in / groups consecutive inputs.
        zero: int8 [out, groups], or None.
        minimum: float32 [out, groups], or None; not beside a zero point.

    Returns:
        float32 [T, out].
    """
    given, how = _stored(x, q, scale, zero if minimum is None else minimum)
    if x.dtype == jnp.bfloat16:
        return _dots(x, *given, **how)
    rounded = jax.lax.reduce_precision(x, 8, 7)  # a float32 is almost the sum of two bfloat16
    both = jnp.concatenate([rounded, x - rounded]).astype(jnp.bfloat16)
    y = _dots(both, *given, **how)
    return y[: len(x)] + y[len(x) :]


def few_bits_grouped_matmul(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None, sizes: jax.Array
) -> jax.Array:
    """`few_bits_matmul` for groups of rows with their own weights, if `takes_few_bits`.

    Args:
        x: [T, in], bfloat16 or float32; rows by group.
        q, scale, zero: as in `few_bits_matmul`, [groups, ...].
        sizes: int32 [groups], rows of each; together at most T.

    Returns:
        float32 [T, out]; zeros behind the last group.
    """
    given, how = _stored(x, q, scale, zero)
    if x.dtype == jnp.bfloat16:
        return _dots(x, *given, sizes, **how, grouped=True)
    rounded = jax.lax.reduce_precision(x, 8, 7)
    both = jnp.stack([rounded, x - rounded], axis=1).astype(jnp.bfloat16)  # beside each other
    y = _dots(both.reshape(-1, x.shape[1]), *given, 2 * sizes, **how, grouped=True)
    return y.reshape(len(x), 2, -1).sum(axis=1)


def _stored(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Operands of `_dots`, and their storage. zero: zero points, or minimums."""
    inputs, groups = x.shape[-1], scale.shape[-1]
    bits = 8 * q.shape[-1] // inputs
    parts = 0 if groups == 1 and zero is None else _parts(inputs // groups, bits) or 1
    given = (q, scale.astype(jnp.float32), *(() if zero is None else (zero,)))
    zeros = 0
    if zero is not None:
        zeros = dot_tiles.ZEROS if zero.dtype == jnp.int8 else dot_tiles.MINIMUMS
    return given, {"bits": bits, "parts": parts, "zeros": zeros, "floats": q.dtype == FLOAT8}


def _dots(
    x: jax.Array,
    *given: jax.Array,
    bits: int,
    parts: int = 0,
    zeros: int = 0,
    floats: bool = False,
    grouped: bool = False,
) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[0], given[0].shape[-2]), jnp.float32)
    name = target(bits=bits, parts=parts, zeros=zeros, floats=floats, grouped=grouped)
    return jax.ffi.ffi_call(name, result, vmap_method="sequential")(x, *given)


def _numbers(bits: int) -> int:
    """Number of weights in a vector."""
    return 8 * LINE // bits


def _parts(group: int, bits: int) -> int:
    """Number of groups in a vector of weights, for groups of this many inputs; 1 if the vector is
    part of a group; 0 if neither fits."""
    numbers = _numbers(bits)
    if group >= numbers:
        return int(group % numbers == 0)
    return numbers // group if numbers % group == 0 else 0


@numba_ffi.compiled_once
def target(
    *, bits: int, parts: int, zeros: int, floats: bool = False, grouped: bool = False
) -> str:
    """The name of the kernel, which is compiled at the first call. Operands: x [T, in] in bfloat16,
    or in float32 like the weights; the weights [out, ...], and, if they have any, their scales in
    float32 and zero points or minimums; with a leading groups axis if there are groups of rows; the
    groups' sizes, int32. Result: [T, out], float32.

    Args:
        bits: Bits of a weight.
        parts: Groups in a vector of weights, see `_parts`; 0: an output has one scale or none.
        zeros: Zero points or minimums beside the scales, see `dot_tiles.ZEROS`.
        floats: Whether weights of 8 bits are float8.
        grouped: Whether groups of rows have their own weights.
    """
    numbers, few, lead = _numbers(bits), int(bits < 16), int(grouped)
    stored, _ = _forms(bits, floats=floats)
    zero_size = 4 if zeros == dot_tiles.MINIMUMS else 1
    lays = int(few or (bits == 16 and dot_tiles.vectors_of_pairs() > 1))
    # Vectors of laid-out weights, and of a row, for a vector of stored weights.
    wide = dot_tiles.vectors_of_pairs() * max(1, numbers // (2 * vectors.LANES))
    after, tall = wide + (zeros > 0), _tall(parts)
    multiply = _multiplying(bits, parts, zeros, floats)

    @njit(**numba_ffi.OPTIONS)
    def plan(given: Any) -> Any:
        if lead:
            return _plan_groups(given, bits)
        each = _each(given, bits)
        return (numba_ffi.dims(given[1], 2)[0] + each - 1) // each, 0

    @njit(**numba_ffi.INLINE)
    def share(given: Any, about: int, i: int) -> None:
        each, count, depth, outputs, groups, x_at, at, scale_at, zero_at, out_at = _part(
            given, bits, lead, about, i, zero_size
        )
        if count == 0:
            return
        x_row, row = depth * (4 if bits == 32 else 2), depth * bits // 8
        outs = 1 if count == 1 or (few and count == 2) else OUTPUTS
        laid_out = lays and (few or outs > 1)
        steps, tail = depth // numbers, depth % numbers * bits // 32
        whole = steps + (1 if tail > 0 else 0)
        a_group = (depth // groups + numbers - 1) // numbers  # vectors
        wide_row, here_row = whole * wide * LINE, whole * after * LINE if laid_out else x_row
        most = max(tall, PART // here_row // tall * tall)  # rows of a part
        memory, wide_at, here = 0, 0, x_at
        if laid_out:
            memory = numba_ffi.allocate(
                (OUTPUTS * wide_row + min(most, count) * here_row + LINE) // 8
            )
            wide_at = (memory + LINE - 1) // LINE * LINE
            here = wide_at + OUTPUTS * wide_row
        for start in range(0, count, most):
            rows = min(most, count - start)
            if not laid_out:
                here = x_at + start * x_row
            elif lays:  # known when it is compiled, unlike `laid_out`
                for r in range(rows):
                    from_at = x_at + (start + r) * x_row
                    dot_tiles.part(bits, zeros, from_at, steps, tail, here + r * here_row)
            for m in range(0, each, outs):
                n = min(m, each - outs)
                there, there_row = at + n * row, row
                if lays:
                    for o in range(OUTPUTS if outs > 1 else 0):
                        to = wide_at + o * wide_row
                        dot_tiles.widen(bits, stored, at + (n + o) * row, steps, tail, to)
                        there, there_row = wide_at, wide_row
                multiply(
                    rows, outs, here, here_row, there, there_row, steps, tail,
                    scale_at + 4 * n * groups, zero_at + zero_size * n * groups, groups, a_group,
                    at + min(m + outs, each - outs) * row, out_at + 4 * (start * outputs + n),
                    4 * outputs,
                )  # fmt: skip
        if laid_out:
            numba_ffi.free(memory)

    name = f"jaxserve_dots_{bits}{'_float' if floats else ''}_{parts}{_BESIDE[zeros]}"
    name += "_grouped" if grouped else ""
    return numba_ffi.register(name, plan, share, __file__, *_FILES, parts=(multiply,))


def _tall(parts: int) -> int:
    """Rows of the largest tile: its sums must fit into registers."""
    return (3 if parts else 6) if pairs.has_vectors() else 1


def _multiplying(bits: int, parts: int, zeros: int, floats: bool) -> Any:
    """A jitted function that multiplies rows with the weights of `outs` outputs: OUTPUTS, or 1 if
    there are no more than two rows. For its other arguments see `dot_tiles.tile`; ahead: address of
    the weights to fetch meanwhile."""
    few, (stored, wide) = int(bits < 16), _forms(bits, floats=floats)
    tall = _tall(parts)
    middle, low = max(1, tall * 2 // 3), max(1, tall // 3)

    @njit(**numba_ffi.INLINE)
    def multiply(
        count: int, outs: int, x: int, x_row: int, weights: int, weights_row: int, steps: int,
        tail: int, scale: int, zero: int, groups: int, a_group: int, ahead: int, to: int,
        to_row: int,
    ) -> None:  # fmt: skip
        done, half, stride = 0, 0, 4 * LINE
        while done < count:
            rows = _height(count - done, tall)
            if rows < count:  # one tile fetches all, or two the halves
                stride = 2 * LINE
            here, fetch, place = x + done * x_row, ahead + half * stride * steps, to + done * to_row
            if outs == 1 and count == 1:
                dot_tiles.tile(
                    bits, 1, 1, parts, zeros, stored, here, 0, weights, weights_row, steps, tail,
                    scale, zero, groups, a_group, fetch, stride, place, to_row,
                )  # fmt: skip
            elif few and outs == 1:
                rows = 2
                dot_tiles.tile(
                    bits, 2, 1, parts, zeros, stored, here, x_row, weights, weights_row, steps,
                    tail, scale, zero, groups, a_group, fetch, stride, place, to_row,
                )  # fmt: skip
            elif rows == 1:
                dot_tiles.tile(
                    bits, 1, OUTPUTS, parts, zeros, wide, here, 0, weights, weights_row, steps,
                    tail, scale, zero, groups, a_group, fetch, stride, place, to_row,
                )  # fmt: skip
            elif rows == low:
                dot_tiles.tile(
                    bits, low, OUTPUTS, parts, zeros, wide, here, x_row, weights, weights_row,
                    steps, tail, scale, zero, groups, a_group, fetch, stride, place, to_row,
                )  # fmt: skip
            elif rows == middle:
                dot_tiles.tile(
                    bits, middle, OUTPUTS, parts, zeros, wide, here, x_row, weights, weights_row,
                    steps, tail, scale, zero, groups, a_group, fetch, stride, place, to_row,
                )  # fmt: skip
            else:
                dot_tiles.tile(
                    bits, tall, OUTPUTS, parts, zeros, wide, here, x_row, weights, weights_row,
                    steps, tail, scale, zero, groups, a_group, fetch, stride, place, to_row,
                )  # fmt: skip
            done, half = done + rows, 1 - half

    return multiply


@njit(**numba_ffi.OPTIONS)
def _height(left: int, tall: int) -> int:
    """Rows of the next tile: tall, two thirds or a third of it, or 1; rather two of two thirds than
    a tall one and a third.

    Args:
        left: Rows that are left.
        tall: Rows of the largest tile.
    """
    low = tall // 3
    if left >= tall and left % tall != low and left % tall != 2 * low:
        return tall
    return 2 * low if left >= 2 * low > 0 else low if left >= low > 0 else 1


def _forms(bits: int, *, floats: bool) -> tuple[int, int]:
    """The forms of weights, see `dot_tiles`: as stored, and in tiles of several outputs."""
    stored = dot_tiles.FLOATS if floats else dot_tiles.INTEGERS
    laid_out = bits < 16 or (bits == 16 and dot_tiles.vectors_of_pairs() > 1)
    return stored, dot_tiles.WIDE if laid_out else stored


@njit(**numba_ffi.OPTIONS)
def _addresses(given: Any, lead: int) -> Any:
    """Rows, inputs, outputs, scales of an output, and the addresses of x, weights, scales, zero
    points (0: there are none) and the result. lead: 1 if groups of rows have their own weights."""
    count, depth = numba_ffi.dims(given[0], 2)
    outputs, groups, scale_at, zero_at = numba_ffi.dims(given[1], 2 + lead)[lead], 1, 0, 0
    if len(given) - lead > 3:
        groups = numba_ffi.dims(given[2], 2 + lead)[1 + lead]
        scale_at = numba_ffi.data_address(given[2])
    if len(given) - lead > 4:
        zero_at = numba_ffi.data_address(given[3])
    x_at, at = numba_ffi.data_address(given[0]), numba_ffi.data_address(given[1])
    out_at = numba_ffi.data_address(given[len(given) - 1])
    return count, depth, outputs, groups, x_at, at, scale_at, zero_at, out_at


@njit(**numba_ffi.OPTIONS)
def _part(given: Any, bits: int, lead: int, about: int, i: int, zero_size: int) -> Any:
    """Outputs of a share, and the values of `_addresses` for this share alone. A share without rows
    of a group gets 0 rows, and its results are filled with zeros here. about: from
    `_plan_groups`."""
    count, depth, outputs, groups, x_at, at, scale_at, zero_at, out_at = _addresses(given, lead)
    if lead:
        each, shares, used, start = numba_ffi.words(about, _GROUPS)
        group, behind = 0, i - used * shares
        if behind >= 0:
            start += behind * TAIL
            size = min(TAIL, count - start) * outputs
            carray(numba_ffi.pointer(out_at + 4 * start * outputs), (size,), np.float32)[:] = 0
            count = 0
        else:
            group, start, count = numba_ffi.words(about + 8 * (_GROUPS + i // shares * 3), 3)
            i = i % shares
        x_at, out_at = x_at + start * depth * max(2, bits // 8), out_at + 4 * start * outputs
        at += group * outputs * depth * bits // 8
        scale_at += 4 * group * outputs * groups
        zero_at += zero_size * group * outputs * groups
    else:
        each = _each(given, bits)
    first = min(i * each, outputs - each)  # the last share overlaps the one before
    at, out_at = at + first * depth * bits // 8, out_at + 4 * first
    scale_at += 4 * first * groups
    zero_at += zero_size * first * groups
    return each, count, depth, outputs, groups, x_at, at, scale_at, zero_at, out_at


@njit(**numba_ffi.OPTIONS)
def _each(given: Any, bits: int) -> int:
    """Outputs of a share."""
    count, depth = numba_ffi.dims(given[0], 2)
    outputs = numba_ffi.dims(given[1], 2)[0]
    threads, size = numba_ffi.threads(), SHARE
    if count > FEW:
        size = LARGE_SHARE
    # At least two, so that a late thread finds one.
    shares = threads * max(2, outputs * depth * bits // 8 // (size * threads))
    each = (outputs + shares - 1) // shares
    return min(outputs, (each + OUTPUTS - 1) // OUTPUTS * OUTPUTS)


@njit(**numba_ffi.OPTIONS)
def _plan_groups(given: Any, bits: int) -> Any:
    """The number of shares, and the address of their plan: outputs of a share, shares of a group,
    groups with rows, the first row of no group; then for each group with rows its index, first row
    and number of rows. Later shares are for rows of no group."""
    count, depth = numba_ffi.dims(given[0], 2)
    number, outputs, _ = numba_ffi.dims(given[1], 3)
    sizes = numba_ffi.int32s(given[len(given) - 2])
    address = numba_ffi.allocate(_GROUPS + 3 * number)
    used, start = 0, 0
    for group in range(number):
        if sizes[group] > 0:
            about = numba_ffi.words(address + 8 * (_GROUPS + 3 * used), 3)
            about[0], about[1], about[2] = group, start, sizes[group]
            used, start = used + 1, start + sizes[group]
    size = SHARE
    if start > FEW * used:
        size = LARGE_SHARE
    wanted = (2 * numba_ffi.threads() + used - 1) // max(used, 1)
    shares = max(wanted, outputs * depth * bits // 8 // size)
    each = (outputs + shares - 1) // shares
    each = min(outputs, (each + OUTPUTS - 1) // OUTPUTS * OUTPUTS)
    shares = (outputs + each - 1) // each
    head = numba_ffi.words(address, _GROUPS)
    head[0], head[1], head[2], head[3] = each, shares, used, start
    return used * shares + (count - start + TAIL - 1) // TAIL, address
