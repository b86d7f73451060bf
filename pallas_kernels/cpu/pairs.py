"""CPUs with products of pairs of bfloat16 (AVX512-BF16), or of float32 (AVX512): tiles of them in
vector registers, for kernels that numba compiles.

Of bfloat16 an instruction adds to each of 16 sums of float32 the products of two pairs; so the
right factor wants two rows of it interleaved, column by column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu import vectors
from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic

TILE_ROWS = 8
TILE_COLUMNS = 2 * vectors.LANES
LINE = 64  # bytes of a vector
_FEATURE = "avx512bf16"
_AMD = "znver"  # how LLVM's names of AMD's processors with the instruction begin
_HALF = ir.IntType(16)
_SUMS = ir.VectorType(ir.FloatType(), vectors.LANES)
_HALVES = ir.VectorType(_HALF, 2 * vectors.LANES)


class _BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 2 * vectors.LANES)


def has_pairs() -> bool:
    """Whether this processor has the instruction."""
    return bool(llvm.get_host_cpu_features().get(_FEATURE, False))


def has_fast_pairs() -> bool:
    """Whether products of pairs are faster than those of float32. Intel's take twice as long as
    AMD's, and widening costs tiles little."""
    return has_pairs() and llvm.get_host_cpu_name().startswith(_AMD)


def has_vectors() -> bool:
    """Whether this processor has vectors of LANES floats."""
    return bool(llvm.get_host_cpu_features().get("avx512f", False))


def add_products(builder: Any, x: Any, weights: Any, total: Any) -> Any:
    """Emits total + x * weights, lane by lane.

    Args:
        builder: The LLVM builder.
        x, weights: Vectors of words, a pair in each.
        total: A vector of float32.
    """
    kind = ir.FunctionType(_SUMS, [_SUMS, _PAIRS, _PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    dot = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(dot, [total, *(builder.bitcast(one, _PAIRS) for one in (x, weights))])


def rounded(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors of float32 as 32 numbers of bfloat16 in order, a vector of words; denormals as
    0."""
    kind = ir.FunctionType(_PAIRS, [_SUMS, _SUMS])
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.bitcast(builder.call(function, [high, low]), vectors.WORDS)


def numbers_of_4_bits(builder: Any, words: Any) -> Any:
    """The numbers in the 4 lower bits of each 16 of a vector of words, as bfloat16 in words. By a
    table, of which the lower 5 bits choose an entry."""
    numbers = [(n - 16 * (n > 7)) for n in range(16)] * 2
    table = [int(np.float32(number).view(np.uint32)) >> 16 for number in numbers]
    kind = ir.FunctionType(_HALVES, [_HALVES, _HALVES])
    name = "llvm.x86.avx512.permvar.hi.512"
    choose = cgutils.get_or_insert_function(builder.module, kind, name)
    places = builder.bitcast(words, _HALVES)
    return builder.bitcast(
        builder.call(choose, [ir.Constant(_HALVES, table), places]), vectors.WORDS
    )


def _constant(value: int) -> Any:
    return ir.Constant(vectors.WORD, value)


@intrinsic
def interleave(_: Any, above: Any, below: Any, to: Any) -> Any:
    """Interleaves two rows of TILE_COLUMNS 16-bit numbers, column by column, into two vectors.

    Args:
        above: Address of the row whose numbers come first.
        below: Address of the other row.
        to: Address of the vectors, a multiple of LINE.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [vectors.load(builder, address, _HALVES, 2) for address in args[:2]]
        for part in range(2):
            columns = range(part * vectors.LANES, (part + 1) * vectors.LANES)
            lanes = [lane for column in columns for lane in (column, TILE_COLUMNS + column)]
            at = builder.add(args[2], _constant(part * LINE))
            vectors.store(builder, vectors.shuffle(builder, rows[0], rows[1], lanes), at, LINE)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), generate


def _adding(lines: int, wide: bool) -> Any:
    @intrinsic
    def add(
        _: Any, sums: Any, sums_row: Any, x: Any, x_row: Any, packed: Any, packed_row: Any,
        words: Any, ahead: Any, ahead_row: Any, other: Any,
    ) -> Any:  # fmt: skip
        """sums [TILE_ROWS, TILE_COLUMNS] += x [TILE_ROWS, words] @ packed [words, TILE_COLUMNS].

        A word is a float32, or a pair of bfloat16, two rows of which `interleave` packs. With each
        word one or two cache lines are prefetched.

        Args:
            sums: Address of float32 numbers, a multiple of LINE.
            sums_row: Bytes from one row of sums to the next.
            x: Address of words.
            x_row: Bytes from one row of x to the next.
            packed: Address of words, a multiple of LINE.
            packed_row: Bytes from one row of packed to the next.
            words: Number of words.
            ahead: Address of the first line to prefetch.
            ahead_row: Bytes from one word's line to the next word's.
            other: Bytes from a word's first line to its second.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, sums_row, x, x_row, packed, packed_row, words, ahead, ahead_row, other = args
            factor = _SUMS if wide else vectors.WORDS
            tile = []
            for m in range(TILE_ROWS):
                for part in range(2):
                    at = builder.add(sums, builder.mul(sums_row, _constant(m)))
                    at = builder.add(at, _constant(part * LINE))
                    found = vectors.load(builder, at, _SUMS, LINE)
                    tile.append((at, cgutils.alloca_once_value(builder, found)))
            x_rows = [builder.add(x, builder.mul(x_row, _constant(m))) for m in range(TILE_ROWS)]
            with cgutils.for_range(builder, words) as loop:
                line = builder.add(packed, builder.mul(packed_row, loop.index))
                right = [
                    vectors.load(builder, builder.add(line, _constant(part * LINE)), factor, LINE)
                    for part in range(2)
                ]
                column = builder.mul(loop.index, _constant(4))
                fetched = builder.add(ahead, builder.mul(ahead_row, loop.index))
                for i in range(lines):
                    vectors.fetch(builder, builder.add(fetched, other) if i else fetched, 2)
                for m in range(TILE_ROWS):
                    word = vectors.load(builder, builder.add(x_rows[m], column), vectors.INDEX, 4)
                    left = builder.bitcast(vectors.spread(builder, word), factor)
                    for part in range(2):
                        where = tile[2 * m + part][1]
                        old = builder.load(where)
                        add_up = vectors.fused if wide else add_products
                        builder.store(add_up(builder, left, right[part], old), where)
            for at, where in tile:
                vectors.store(builder, builder.load(where), at, LINE)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 10), generate

    return add


add_pairs_1, add_pairs_2 = _adding(1, wide=False), _adding(2, wide=False)
add_numbers_1, add_numbers_2 = _adding(1, wide=True), _adding(2, wide=True)
