"""Vectors of float32 in registers, for kernels that numba compiles.

Sums here have a fixed order, and a product with a sum is rounded once or twice exactly as written,
whatever the compiler's flags. So a row's result depends neither on the number of rows nor on how
they are divided among threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic

LANES = 16  # numbers of a vector: one register with AVX-512, two with AVX2, four with NEON
BYTES = 4  # bytes of a number
NUMBER = ir.FloatType()
VECTOR = ir.VectorType(NUMBER, LANES)
WORD = ir.IntType(64)
INDEX = ir.IntType(32)
# Two bfloat16 are the halves of a 32-bit word, the first in the lower half; a bfloat16 above 16
# zero bits is the same number as float32. So a vector of words holds two vectors of numbers, at
# even and at odd places.
WORDS = ir.VectorType(INDEX, LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)


def constant(value: int) -> Any:
    """An int64."""
    return ir.Constant(WORD, value)


def everywhere(value: float) -> Any:
    """A float32 in all lanes."""
    return ir.Constant(VECTOR, [value] * LANES)


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


def moved(builder: Any, address: Any, index: Any, size: int, further: int = 0) -> Any:
    """An address in an array.

    Args:
        builder: The LLVM builder.
        address: int64, of the array.
        index: int64, of the element.
        size: Bytes of an element.
        further: Bytes behind its first one.
    """
    offset = builder.mul(index, constant(size))
    return builder.add(builder.add(address, offset), constant(further))


def masked(builder: Any, address: Any, kind: Any, count: Any) -> Any:
    """Loads the first numbers of a vector, padded with zeros.

    Args:
        builder: The LLVM builder.
        address: int64.
        kind: The vector's LLVM type.
        count: int64, how many numbers to load; None for all.
    """
    size = {"i8": 1, "i16": 2}.get(str(kind.element), BYTES)
    if count is None:
        return load(builder, address, kind, size)
    place = builder.inttoptr(address, kind.as_pointer())
    bits = ir.VectorType(ir.IntType(1), kind.count)
    form = ir.FunctionType(kind, [place.type, INDEX, bits, kind])
    element = "f32" if kind.element == NUMBER else str(kind.element)
    name = f"llvm.masked.load.v{kind.count}{element}.p0"
    function = cgutils.get_or_insert_function(builder.module, form, name)
    mask = below(builder, count, kind.count)
    return builder.call(function, [place, ir.Constant(INDEX, size), mask, ir.Constant(kind, None)])


def store_first(builder: Any, value: Any, address: Any, count: Any) -> None:
    """Emits a store of the first numbers of a vector of float32.

    Args:
        builder: The LLVM builder.
        value: The vector.
        address: int64, where to.
        count: int64, how many of its numbers.
    """
    place = builder.inttoptr(address, VECTOR.as_pointer())
    form = ir.FunctionType(ir.VoidType(), [VECTOR, place.type, INDEX, _BITS])
    name = f"llvm.masked.store.v{LANES}f32.p0"
    function = cgutils.get_or_insert_function(builder.module, form, name)
    builder.call(function, [value, place, ir.Constant(INDEX, BYTES), below(builder, count)])


def below(builder: Any, count: Any, lanes: int = LANES) -> Any:
    """Which of the lanes are below a count, int64."""
    numbers = ir.VectorType(INDEX, lanes)
    limit = spread(builder, builder.trunc(count, INDEX), lanes)
    return builder.icmp_signed("<", ir.Constant(numbers, list(range(lanes))), limit)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Emits a shuffle of two vectors into one.

    Args:
        builder: The LLVM builder.
        a, b: The vectors.
        lanes: The lane that each lane of the result comes from; those of b are counted after those
            of a.
    """
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INDEX, len(lanes)), lanes))


def spread(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """The value in all lanes."""
    empty = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(INDEX, 0))
    return shuffle(builder, first, empty, [0] * lanes)


def fetch(builder: Any, address: Any, locality: int) -> None:
    """Emits a prefetch of a cache line that will be read. locality: 3 for what is read often."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INDEX, INDEX, INDEX])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(INDEX, value) for value in (0, locality, 1)]  # reads, of data
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), *hints])


def halves(builder: Any, found: Any) -> tuple[Any, Any]:
    """Splits 2 * LANES bfloat16, a vector of words, into the numbers at even and at odd places."""
    low = builder.shl(found, ir.Constant(WORDS, [16] * LANES))
    high = builder.and_(found, ir.Constant(WORDS, [0xFFFF0000] * LANES))
    return builder.bitcast(low, VECTOR), builder.bitcast(high, VECTOR)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emits a * b + c, rounded once where the processor can, else twice.

    Args:
        builder: The LLVM builder.
        a, b, c: Numbers or vectors of float32.
    """
    if not _FUSES:
        return builder.fadd(builder.fmul(a, b), c)
    kind = a.type
    name = "llvm.fma.f32" if kind == NUMBER else f"llvm.fma.v{kind.count}f32"
    form = ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, form, name), [a, b, c])


def _fuses() -> bool:
    """Whether the processor has fused multiply-add; otherwise LLVM would call a function for it."""
    x86 = llvm.get_process_triple().startswith(("x86", "i686"))
    return not x86 or bool(llvm.get_host_cpu_features().get("fma", False))


_FUSES = _fuses()


def _unary(builder: Any, name: str, value: Any) -> Any:
    kind = value.type
    form = ir.FunctionType(kind, [kind])
    function = cgutils.get_or_insert_function(builder.module, form, f"llvm.{name}.v{kind.count}f32")
    return builder.call(function, [value])


def exp(builder: Any, y: Any) -> Any:
    """Emits e^y of a vector, right to 2e-7, its power of two within 2^-126 and 2^127. 2^f for
    0 <= f < 1 is a polynomial of six terms."""
    scaled = builder.fmul(y, everywhere(1.4426950408889634))
    for sign, limit in (("<", -126.0), (">", 127.0)):
        bound = everywhere(limit)
        scaled = builder.select(builder.fcmp_ordered(sign, scaled, bound), bound, scaled)
    whole = _unary(builder, "floor", scaled)
    f = builder.fsub(scaled, whole)
    p = everywhere(1.8775767e-3)
    for term in (8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1):
        p = fused(builder, p, f, everywhere(term))
    power = builder.add(builder.fptosi(whole, WORDS), ir.Constant(WORDS, [127] * LANES))
    power = builder.shl(power, ir.Constant(WORDS, [23] * LANES))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def total(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    return builder.extract_element(totals(builder, [vector]), ir.Constant(INDEX, 0))


def totals(builder: Any, vectors: list[Any]) -> Any:
    """The sums of the lanes of 1, 2, 4, 8 or 16 vectors, in order, as one vector. Each sum has the
    same order, whatever the number of vectors."""
    width = LANES
    while width > 1:
        width //= 2
        both = len(vectors) > 1
        lanes = range(vectors[0].type.count * (2 if both else 1))
        first = [lane for lane in lanes if lane % (2 * width) < width]
        vectors = [
            builder.fadd(
                shuffle(builder, a, b, first),
                shuffle(builder, a, b, [lane + width for lane in first]),
            )
            for a, b in zip(vectors[::2], vectors[1::2] if both else vectors, strict=True)
        ]
    return vectors[0]


def numbers_of(builder: Any, address: Any, kind: Any, count: Any = None) -> Any:
    """Loads LANES numbers as float32, or the first ones, padded with zeros.

    Args:
        builder: The LLVM builder.
        address: int64.
        kind: Their numba type, see `widened`.
        count: int64, how many numbers to load; None for all.
    """
    if kind == types.float32:
        return masked(builder, address, VECTOR, count)
    size = ir.IntType(kind.bitwidth)
    found = masked(builder, address, ir.VectorType(size, LANES), count)
    if kind == types.int8:
        return builder.sitofp(builder.sext(found, WORDS), VECTOR)
    found = builder.zext(found, WORDS)
    if kind == types.uint8:
        return of_float8(builder, found)
    return builder.bitcast(builder.shl(found, ir.Constant(WORDS, [16] * LANES)), VECTOR)


@intrinsic
def widened(_: Any, number: Any) -> Any:
    """The float32 of an int8, of the 16 bits of a bfloat16 or the 8 of a float8 (e4m3fn); a float32
    stays as it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        if kind == types.float32:
            return args[0]
        if kind == types.int8:
            return builder.sitofp(args[0], NUMBER)
        word = builder.zext(args[0], INDEX)
        if kind == types.uint8:
            return of_float8(builder, word)
        return builder.bitcast(builder.shl(word, ir.Constant(INDEX, 16)), NUMBER)

    return types.float32(number), generate


@intrinsic
def upper_bytes(_: Any, high: Any, low: Any) -> Any:
    """The float32 whose upper bytes these are, both of int8 or uint8, see `pool.upper_bytes`; 0 for
    numbers of more bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] not in (types.int8, types.uint8):
            return ir.Constant(NUMBER, 0)
        first, second = (builder.zext(byte, INDEX) for byte in args)
        word = builder.or_(builder.shl(first, ir.Constant(INDEX, 8)), second)
        return builder.bitcast(builder.shl(word, ir.Constant(INDEX, 16)), NUMBER)

    return types.float32(high, low), generate


def of_float8(builder: Any, word: Any) -> Any:
    """The float32 of a float8's 8 bits in a word, or of a vector of words: 1 of sign, 4 of exponent
    (bias 7), 3 of mantissa; 127 is NaN. No intermediate float32 is denormal, since XLA's threads
    treat those as 0."""
    words = word.type
    numbers = NUMBER if words == INDEX else VECTOR

    def whole(value: int) -> Any:
        return ir.Constant(words, value if words == INDEX else [value] * LANES)

    def real(value: float) -> Any:
        return ir.Constant(numbers, value if words == INDEX else [value] * LANES)

    size = builder.and_(word, whole(0x7F))
    bits = builder.add(builder.shl(size, whole(20)), whole((127 - 7) << 23))
    normal = builder.bitcast(bits, numbers)
    small = builder.fmul(builder.uitofp(size, numbers), real(2.0**-9))
    found = builder.select(builder.icmp_unsigned("<", size, whole(8)), small, normal)
    nan = builder.bitcast(whole(0x7FC00000), numbers)
    found = builder.select(builder.icmp_unsigned("==", size, whole(0x7F)), nan, found)
    sign = builder.shl(builder.and_(word, whole(0x80)), whole(24))
    return builder.bitcast(builder.or_(builder.bitcast(found, words), sign), numbers)


@intrinsic
def prefetch(_: Any, address: Any, size: Any) -> Any:
    """Prefetches `size` bytes at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = BYTES * LANES
        lines = builder.udiv(builder.add(args[1], constant(line - 1)), constant(line))
        with cgutils.for_range(builder, lines) as loop:
            fetch(builder, moved(builder, args[0], loop.index, line), 3)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


def _sum(term: Any, numbers: int, more: tuple[Any, ...] = ()) -> Any:
    """An intrinsic (addresses of `numbers` rows of float32, their length, *more) -> the sum of
    term(builder, *vectors, *more): lane by lane in order, then over the lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, n, given = args[:numbers], args[numbers], args[numbers + 1 :]
        so_far = cgutils.alloca_once_value(builder, everywhere(0.0))

        def add(index: Any, count: Any) -> None:
            found = [
                masked(builder, moved(builder, row, index, BYTES * LANES), VECTOR, count)
                for row in rows
            ]
            value = term(builder, *found, *given)
            if count is not None:
                value = builder.select(below(builder, count), value, everywhere(0.0))
            builder.store(builder.fadd(builder.load(so_far), value), so_far)

        whole, left = builder.udiv(n, constant(LANES)), builder.urem(n, constant(LANES))
        with cgutils.for_range(builder, whole) as loop:
            add(loop.index, None)
        with builder.if_then(builder.icmp_signed(">", left, constant(0))):
            add(whole, left)
        return total(builder, builder.load(so_far))

    return types.float32(*[types.int64] * (numbers + 1), *more), generate


@intrinsic
def sum_of(_: Any, x: Any, n: Any) -> Any:
    """The sum of n float32 at an address."""
    return _sum(lambda builder, x: x, 1)


@intrinsic
def sum_of_squares(_: Any, x: Any, n: Any) -> Any:
    """The sum of their squares."""
    return _sum(lambda builder, x: builder.fmul(x, x), 1)


@intrinsic
def sum_of_exp(_: Any, x: Any, n: Any, top: Any) -> Any:
    """The sum of exp(x - top).

    Args:
        x: Address of float32 numbers.
        n: Count of numbers.
        top: float32.
    """

    def term(builder: Any, x: Any, top: Any) -> Any:
        return exp(builder, builder.fsub(x, spread(builder, top)))

    return _sum(term, 1, (types.float32,))
