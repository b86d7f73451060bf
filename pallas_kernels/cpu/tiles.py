"""Small products in vector registers, for kernels that numba compiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic

LANES = 16  # numbers of a vector: one register with AVX-512, two with AVX2, four with NEON
ROWS = 4  # of a tile
BYTES = 4  # of a number
_NUMBER = ir.FloatType()
_VECTOR = ir.VectorType(_NUMBER, LANES)
WORD = ir.IntType(64)
INDEX = ir.IntType(32)
_FUSED = ("contract",)  # a product and a sum are one instruction


def load(builder: Any, address: Any, kind: Any, align: int = BYTES) -> Any:
    """Emits a load.

    Args:
        builder: The LLVM builder.
        address: int64, where the value is.
        kind: The value's LLVM type.
        align: Bytes that the address is a multiple of.
    """
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int = BYTES) -> None:
    """Emits a store.

    Args:
        builder: The LLVM builder.
        value: What to store.
        address: int64, where to.
        align: Bytes that the address is a multiple of.
    """
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Emits a shuffle of two vectors into one.

    Args:
        builder: The LLVM builder.
        a, b: The vectors.
        lanes: The lane that each lane of the result comes from; those of b are counted after those
            of a.
    """
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INDEX, len(lanes)), lanes))


def spread(builder: Any, value: Any) -> Any:
    """The value in all lanes."""
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(INDEX, 0))
    return shuffle(builder, first, empty, [0] * LANES)


def fetch(builder: Any, address: Any, locality: int) -> None:
    """Emits a prefetch of a cache line that will be read. locality: 3 for what is read often."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INDEX, INDEX, INDEX])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(INDEX, value) for value in (0, locality, 1)]  # reads, of data
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), *hints])


def _plus(builder: Any, address: Any, row: Any, numbers: int) -> Any:
    """The address moved by `row` bytes (None: 0) and by a number of float32 numbers."""
    moved = address if row is None else builder.add(address, row)
    return builder.add(moved, ir.Constant(WORD, numbers * BYTES))


def _product(vectors: int) -> Any:
    @intrinsic
    def product(
        _: Any, c: Any, c_row: Any, a: Any, a_row: Any, b: Any, b_row: Any, depth: Any
    ) -> Any:
        """c [ROWS, vectors * LANES] += a [ROWS, depth] @ b [depth, vectors * LANES], float32.

        Args:
            c: Address.
            c_row: Bytes from one row of c to the next.
            a: Address.
            a_row: Bytes from one row of a to the next.
            b: Address.
            b_row: Bytes from one row of b to the next.
            depth: Rows of b.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            c, c_row, a, a_row, b, b_row, depth = args
            tile = [
                [cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(ROWS)
            ]
            c_rows = [builder.mul(c_row, ir.Constant(WORD, m)) for m in range(ROWS)]
            a_rows = [builder.add(a, builder.mul(a_row, ir.Constant(WORD, m))) for m in range(ROWS)]
            for m in range(ROWS):
                for n in range(vectors):
                    at = _plus(builder, c, c_rows[m], n * LANES)
                    builder.store(load(builder, at, _VECTOR), tile[m][n])
            with cgutils.for_range(builder, depth) as loop:
                line = builder.add(b, builder.mul(b_row, loop.index))
                column = builder.mul(loop.index, ir.Constant(WORD, BYTES))
                many = [
                    load(builder, _plus(builder, line, None, n * LANES), _VECTOR)
                    for n in range(vectors)
                ]
                for m in range(ROWS):
                    one = load(builder, builder.add(a_rows[m], column), _NUMBER)
                    factor = spread(builder, one)
                    for n in range(vectors):
                        old = builder.load(tile[m][n])
                        builder.store(fused(builder, factor, many[n], old), tile[m][n])
            for m in range(ROWS):
                for n in range(vectors):
                    at = _plus(builder, c, c_rows[m], n * LANES)
                    store(builder, builder.load(tile[m][n]), at)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 7), generate

    return product


product_1 = _product(1)
product_2 = _product(2)


# Two numbers of bfloat16 are the halves of a word of 32 bits, the first the lower one; a float32 is
# one of them above 16 zeros. So a vector of words is two of numbers, those at even and odd places.
PAIRS = 2 * LANES
WORDS = ir.VectorType(INDEX, LANES)


def halves(builder: Any, found: Any) -> tuple[Any, Any]:
    """PAIRS numbers of bfloat16, a vector of words: those at even places, those at odd ones."""
    low = builder.shl(found, ir.Constant(WORDS, [16] * LANES))
    high = builder.and_(found, ir.Constant(WORDS, [0xFFFF0000] * LANES))
    return builder.bitcast(low, _VECTOR), builder.bitcast(high, _VECTOR)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emits a * b + c.

    Args:
        builder: The LLVM builder.
        a, b, c: Numbers or vectors.
    """
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def total(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    width = LANES
    while width > 1:
        width //= 2
        empty = ir.Constant(vector.type, ir.Undefined)
        parts = (list(range(first, first + width)) for first in (0, width))
        vector = builder.fadd(*(shuffle(builder, vector, empty, lanes) for lanes in parts))
    return builder.extract_element(vector, ir.Constant(INDEX, 0))


@intrinsic
def widened(_: Any, number: Any) -> Any:
    """The float32 of an int8, of the 16 bits of a bfloat16 or the 8 of a float8 (e4m3fn); a float32
    stays as it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        if kind == types.float32:
            return args[0]
        if kind == types.int8:
            return builder.sitofp(args[0], _NUMBER)
        word = builder.zext(args[0], INDEX)
        if kind == types.uint8:
            return _of_float8(builder, word)
        return builder.bitcast(builder.shl(word, ir.Constant(INDEX, 16)), _NUMBER)

    return types.float32(number), generate


def _of_float8(builder: Any, word: Any) -> Any:
    """The float32 of a float8's 8 bits in a word: 1 of sign, 4 of exponent (bias 7), 3 of mantissa;
    127 is NaN. Never a denormal float32 in between, which XLA's threads take for 0."""

    def constant(value: int) -> Any:
        return ir.Constant(INDEX, value)

    size = builder.and_(word, constant(0x7F))
    bits = builder.add(builder.shl(size, constant(20)), constant((127 - 7) << 23))
    normal = builder.bitcast(bits, _NUMBER)
    small = builder.fmul(builder.uitofp(size, _NUMBER), ir.Constant(_NUMBER, 2.0**-9))
    found = builder.select(builder.icmp_unsigned("<", size, constant(8)), small, normal)
    nan = builder.bitcast(constant(0x7FC00000), _NUMBER)
    found = builder.select(builder.icmp_unsigned("==", size, constant(0x7F)), nan, found)
    sign = builder.shl(builder.and_(word, constant(0x80)), constant(24))
    return builder.bitcast(builder.or_(builder.bitcast(found, INDEX), sign), _NUMBER)


@intrinsic
def prefetch(_: Any, address: Any, size: Any) -> Any:
    """Prefetches `size` bytes at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = BYTES * LANES
        lines = builder.udiv(
            builder.add(args[1], ir.Constant(WORD, line - 1)), ir.Constant(WORD, line)
        )
        with cgutils.for_range(builder, lines) as loop:
            at = builder.add(args[0], builder.mul(loop.index, ir.Constant(WORD, line)))
            fetch(builder, at, 3)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


TOGETHER = 8  # rows of weights that `add_rows` takes at once


def _add_rows(count: int) -> Any:
    @intrinsic
    def add_rows(
        _: Any, sums: Any, sums_row: Any, x: Any, x_row: Any, weights: Any, row: Any, columns: Any
    ) -> Any:
        """sums [count, columns] += x [count, TOGETHER] @ weights [TOGETHER, columns].

        Args:
            sums: Address of float32 numbers; of each PAIRS columns those at even places come first.
            sums_row: Bytes from one row of sums to the next.
            x: Address of float32 numbers.
            x_row: Bytes from one row of x to the next.
            weights: Address of bfloat16 numbers.
            row: Bytes from one row of weights to the next.
            columns: A multiple of PAIRS.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, sums_row, x, x_row, weights, row, columns = args

            def constant(value: int) -> Any:
                return ir.Constant(WORD, value)

            factors = [
                [
                    spread(builder, load(builder, _plus(builder, line, None, k), _NUMBER))
                    for k in range(TOGETHER)
                ]
                for line in (builder.add(x, builder.mul(x_row, constant(m))) for m in range(count))
            ]
            rows = [builder.add(weights, builder.mul(row, constant(k))) for k in range(TOGETHER)]
            lines = [builder.add(sums, builder.mul(sums_row, constant(m))) for m in range(count)]
            with cgutils.for_range(builder, builder.udiv(columns, constant(PAIRS))) as loop:
                here = builder.mul(loop.index, constant(PAIRS * BYTES))
                at = [builder.add(line, here) for line in lines]
                odd_at = [_plus(builder, line, None, LANES) for line in at]
                even = [load(builder, where, _VECTOR) for where in at]
                odd = [load(builder, where, _VECTOR) for where in odd_at]
                there = builder.mul(loop.index, constant(PAIRS * 2))
                for k in range(TOGETHER):
                    low, high = halves(builder, load(builder, builder.add(rows[k], there), WORDS))
                    for m in range(count):
                        even[m] = fused(builder, factors[m][k], low, even[m])
                        odd[m] = fused(builder, factors[m][k], high, odd[m])
                for m in range(count):
                    for where, found in ((at[m], even[m]), (odd_at[m], odd[m])):
                        store(builder, found, where)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 7), generate

    return add_rows


add_rows_1, add_rows_2, add_rows_3, add_rows_4 = (_add_rows(count) for count in (1, 2, 3, 4))
