"""The layout of rows and weights in AMX's tiles, and of their products. Weights are A and rows are
B, so C is [16 outputs, rows]: weights need not be transposed. Rows are transposed, in pairs of
inputs, and so are scales and results. With fewer than 16 rows, a tile has as many columns.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu import pairs, vectors
from jaxserve.pallas_kernels.cpu.amx.instructions import DEPTH, SIDE
from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic
from jaxserve.pallas_kernels.cpu.pairs import LINE

_EIGHT = ir.VectorType(ir.IntType(8), vectors.LANES)
_HALVES = ir.VectorType(ir.IntType(16), DEPTH)
_NOTHING = vectors.everywhere(0.0)


def _of(builder: Any, address: Any, number: int, size: Any = None) -> Any:
    """The address of a row by its number; a row has `size` bytes, by default LINE."""
    size = vectors.constant(LINE) if size is None else size
    return builder.add(address, builder.mul(size, vectors.constant(number)))


def _if_there(builder: Any, rows: Any, number: int, lanes: Any) -> Any:
    """Number of lanes of the row with this number: 0 if there is no such row."""
    there = builder.icmp_signed(">", rows, vectors.constant(number))
    return builder.select(there, lanes, vectors.constant(0))


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Transposes 16 vectors of 16 lanes: each step exchanges a bit of the row's number and of the
    lane's."""
    for bit in (1, 2, 4, 8):
        turned = list(rows)
        for low in (row for row in range(SIDE) if not row & bit):
            both = rows[low], rows[low | bit]
            lanes = [lane if not lane & bit else SIDE + (lane ^ bit) for lane in range(SIDE)]
            turned[low] = vectors.shuffle(builder, *both, lanes)
            lanes = [lane | bit if not lane & bit else SIDE + lane for lane in range(SIDE)]
            turned[low | bit] = vectors.shuffle(builder, *both, lanes)
        rows = turned
    return rows


@intrinsic
def turn(
    _: Any, given: Any, given_row: Any, rows: Any, columns: Any, to: Any, to_row: Any, lanes: Any
) -> Any:
    """Transposes up to 16 x 16 words.

    Args:
        given: Address of the first row.
        given_row: Bytes from one row to the next.
        rows: Number of rows.
        columns: Words of each row.
        to: Address of the first column.
        to_row: Bytes from one column to the next.
        lanes: Words of a column that are written; 0 for missing rows.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, given_row, rows, columns, to, to_row, lanes = args
        found = [
            vectors.masked(
                builder,
                _of(builder, given, row, given_row),
                vectors.VECTOR,
                _if_there(builder, rows, row, columns),
            )
            for row in range(SIDE)
        ]
        for column, value in enumerate(_turned(builder, found)):
            place = _of(builder, to, column, to_row)
            vectors.store_first(builder, value, place, _if_there(builder, columns, column, lanes))
        return context.get_dummy_value()

    return types.none(*[types.int64] * 7), generate


@intrinsic
def split(_: Any, x: Any, to: Any) -> Any:
    """Splits DEPTH float32 of a row into two lines of bfloat16: the rounded numbers, and the
    rounded remainders; the second is SIDE lines after the first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, to = args
        both = [vectors.load(builder, _of(builder, x, i), vectors.VECTOR) for i in range(2)]
        rounded = pairs.rounded(builder, *both)
        numbers, left = builder.bitcast(rounded, _HALVES), []
        for first, value in zip((0, vectors.LANES), both, strict=True):
            lanes = list(range(first, first + vectors.LANES))
            half = vectors.shuffle(builder, numbers, numbers, lanes)
            half = builder.shl(builder.zext(half, vectors.WORDS), _all(16))
            left.append(builder.fsub(value, builder.bitcast(half, vectors.VECTOR)))
        vectors.store(builder, rounded, to)
        vectors.store(builder, pairs.rounded(builder, *left), _of(builder, to, SIDE))
        return context.get_dummy_value()

    return types.none(*[types.int64] * 2), generate


def _all(value: int) -> Any:
    return ir.Constant(vectors.WORDS, [value] * vectors.LANES)


@intrinsic
def add_inputs(_: Any, first: Any, tile: Any, columns: Any, sums: Any) -> Any:
    """Adds each row's inputs in B to its sum, one input after the other.

    Args:
        first: Whether to start the sums.
        tile: Address of the tile.
        columns: Number of rows.
        sums: Address of a float32 for each row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, tile, columns, sums = args
        total = vectors.masked(builder, sums, vectors.VECTOR, columns)
        total = builder.select(first, _NOTHING, total)
        size = builder.mul(columns, vectors.constant(vectors.BYTES))
        for row in range(SIDE):
            words = vectors.masked(builder, _of(builder, tile, row, size), vectors.WORDS, columns)
            for half in vectors.halves(builder, words):
                total = builder.fadd(total, half)
        vectors.store_first(builder, total, sums, columns)
        return context.get_dummy_value()

    return types.none(types.boolean, *[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def lay_out(_: Any, bits: Any, weights: Any, row: Any, to: Any) -> Any:
    """Lays out DEPTH weights of 16 outputs as A.

    Args:
        bits: Literal, bits of a weight.
        weights: Address of the first output's weights.
        row: Bytes from one output's weights to the next one's.
        to: Address of the result, a multiple of LINE.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, weights, row, to = args
        for output in range(SIDE):
            at = _of(builder, weights, output, row)
            words = _widened(builder, at, bits.literal_value)
            vectors.store(builder, words, _of(builder, to, output), LINE)
        return context.get_dummy_value()

    return types.none(bits, *[types.int64] * 3), generate


def _widened(builder: Any, at: Any, bits: int) -> Any:
    """DEPTH weights from an address on, as bfloat16: a vector of words."""
    if bits == 16:
        return vectors.load(builder, at, vectors.WORDS, 2)
    if bits == 8:
        both = [_of(builder, at, part, vectors.constant(vectors.LANES)) for part in range(2)]
        wide = [builder.sext(vectors.load(builder, one, _EIGHT, 1), vectors.WORDS) for one in both]
        return pairs.rounded(builder, *(builder.sitofp(one, vectors.VECTOR) for one in wide))
    # Each half of a byte goes to the lower bits of 16 bits; the bits above are ignored.
    stored = builder.zext(vectors.load(builder, at, _EIGHT, 1), vectors.WORDS)
    both = builder.or_(stored, builder.shl(stored, _all(12)))
    return pairs.numbers_of_4_bits(builder, both)


@intrinsic(prefer_literal=True)
def add_scaled(
    _: Any, beside: Any, first: Any, c: Any, columns: Any, sums: Any, scale: Any, least: Any,
    inputs: Any, places: Any,
) -> Any:  # fmt: skip
    """Adds C times the outputs' scales, the result of a group of inputs, to their sums.

    Args:
        beside: Literal, whether minimums times the inputs' sums are added, too.
        first: Whether to start the sums.
        c, sums: Addresses, [16 outputs, rows] of float32.
        columns: Number of rows.
        scale, least: Addresses of the outputs' scales and minimums.
        inputs: Address of the rows' sums of inputs.
        places: Address of the output of each number of C, followed by their rows: int32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, first, c, columns, sums, scale, least, inputs, places = args
        factors = vectors.load(builder, scale, vectors.VECTOR)
        if beside.literal_value:
            minimums = vectors.load(builder, least, vectors.VECTOR)
            of_rows = vectors.masked(builder, inputs, vectors.VECTOR, columns)
        with cgutils.for_range(builder, columns) as loop:
            at = vectors.moved(builder, sums, loop.index, LINE)
            old = builder.select(first, _NOTHING, vectors.load(builder, at, vectors.VECTOR))
            of_group = vectors.load(
                builder, vectors.moved(builder, c, loop.index, LINE), vectors.VECTOR
            )
            place = vectors.moved(builder, places, loop.index, LINE)
            output = vectors.load(builder, place, vectors.WORDS)
            value = vectors.fused(builder, of_group, _at(builder, factors, output), old)
            if beside.literal_value:
                size = builder.mul(columns, vectors.constant(LINE))
                row = vectors.load(builder, builder.add(place, size), vectors.WORDS)
                value = vectors.fused(
                    builder, _at(builder, of_rows, row), _at(builder, minimums, output), value
                )
            vectors.store(builder, value, at)
        return context.get_dummy_value()

    return types.none(beside, types.boolean, *[types.int64] * 7), generate


def _at(builder: Any, vector: Any, lanes: Any) -> Any:
    """The vector's numbers at these lanes."""
    kind = ir.FunctionType(vectors.VECTOR, [vectors.VECTOR, vectors.WORDS])
    name = "llvm.x86.avx512.permvar.sf.512"
    choose = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(choose, [vector, lanes])
