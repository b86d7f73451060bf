"""Tiles of dot products in vector registers, for `dots`: the layout of weights and rows, and the
multiplication.

Without fast products of pairs of bfloat16 (`pairs.has_fast_pairs`), pairs are laid out as two
vectors of float32, the numbers at even places and those at odd ones, and multiplied in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu import pairs, vectors
from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic
from jaxserve.pallas_kernels.cpu.pairs import LINE

ZEROS, MINIMUMS = 1, 2  # what quantised weights have beside scales; 0: nothing
# The form of a tile's weights: as stored (integers, or wide ones), stored float8 (e4m3fn), or laid
# out by `widen`; then the rows are laid out, too, as they are for all weights of fewer bits.
INTEGERS, WIDE, FLOATS = range(3)
AHEAD = 4096  # bytes that a tile of one output fetches ahead

_NUMBER, _BYTE, _HALF = ir.FloatType(), ir.IntType(8), ir.IntType(16)
_SUMS = ir.VectorType(_NUMBER, vectors.LANES)
_WORDS = vectors.WORDS
_HALVES = ir.VectorType(_HALF, 2 * vectors.LANES)


def _all(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * vectors.LANES)


def _widened(builder: Any, words: Any, bits: int, stream: int, form: int) -> list[Any]:
    """The numbers at one place in each 16 bits of a vector: pairs of bfloat16 in words, or two
    vectors of float32; of 32 bits one.

    A byte put below the exponent of 2 ** 23 makes the float32 2 ** 23 + byte; subtracting 2 ** 23
    and the offset gives the signed number. Such a float32 has only zeros in its lower half.
    """
    if bits >= 16:
        return _split(builder, words) if bits == 16 else [builder.bitcast(words, _SUMS)]
    if bits == 4 and form != FLOATS and pairs.has_pairs():
        places = builder.bitcast(words, _HALVES)
        places = builder.lshr(places, ir.Constant(_HALVES, [4 * stream] * 2 * vectors.LANES))
        return _split(builder, pairs.numbers_of_4_bits(builder, builder.bitcast(places, _WORDS)))
    numbers, sign = [], 1 << (bits - 1)
    if form != FLOATS:
        words = builder.xor(words, _all(sum(sign << place for place in range(0, 32, bits))))
    for half in range(2):
        place = builder.lshr(words, _all(16 * half + bits * stream))
        place = builder.and_(place, _all(2 * sign - 1))
        if form == FLOATS:
            numbers.append(vectors.of_float8(builder, place))
            continue
        least = ir.Constant(_SUMS, [float(2**23 + sign)] * vectors.LANES)
        place = builder.bitcast(builder.or_(place, _all(0x4B000000)), _SUMS)
        numbers.append(builder.fsub(place, least))
    if not pairs.has_fast_pairs():
        return numbers
    low, high = (builder.bitcast(number, _WORDS) for number in numbers)
    return [builder.or_(builder.lshr(low, _all(16)), high)]


def _split(builder: Any, words: Any) -> list[Any]:
    """Pairs of bfloat16 as they are multiplied: in words, or as two vectors of float32."""
    return [words] if pairs.has_fast_pairs() else list(vectors.halves(builder, words))


def vectors_of_pairs() -> int:
    """How many vectors `_split` makes of one."""
    return 1 if pairs.has_fast_pairs() else 2


def _streams(bits: int) -> int:
    """Vectors of pairs for one vector of stored weights, of at most 16 bits."""
    return 16 // bits


@intrinsic(prefer_literal=True)
def widen(_: Any, bits: Any, form: Any, at: Any, steps: Any, tail: Any, to: Any) -> Any:
    """Lays out an output's weights as pairs of bfloat16, by place.

    Args:
        bits: Literal, bits of a weight, at most 16.
        form: Literal, INTEGERS or FLOATS.
        at: Address of the weights.
        steps: Number of whole vectors.
        tail: Words of a last, partial vector.
        to: Address of the result, a multiple of LINE.
    """
    streams = _streams(bits.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, at, steps, tail, to = args

        def step(index: Any, count: Any) -> None:
            place = vectors.moved(builder, at, index, LINE)
            vectors.fetch(builder, builder.add(place, vectors.constant(AHEAD)), 3)
            words = vectors.masked(builder, place, _WORDS, count)
            wide = [
                value
                for stream in range(streams)
                for value in _widened(
                    builder, words, bits.literal_value, stream, form.literal_value
                )
            ]
            _lay_out(builder, wide, to, index)

        _over(builder, steps, tail, step)
        return context.get_dummy_value()

    return types.none(bits, form, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def part(_: Any, bits: Any, zeros: Any, at: Any, steps: Any, tail: Any, to: Any) -> Any:
    """Lays out a row like its quantised weights, by place.

    Args:
        bits: Literal, bits of a weight.
        zeros: Literal; if not 0, the inputs of each vector of weights are followed by a vector of
            their negative sums.
        at: Address of the row, bfloat16.
        steps: Number of whole vectors of weights.
        tail: Words of a last, partial vector.
        to: Address of the result, a multiple of LINE.
    """
    streams, sums = _streams(bits.literal_value), bool(zeros.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, at, steps, tail, to = args

        def step(index: Any, count: Any) -> None:
            found = []
            for i in range(streams):  # each is a vector of pairs
                left = None
                if count is not None:
                    left = builder.mul(count, vectors.constant(streams))
                    left = builder.sub(left, vectors.constant(i * vectors.LANES))
                place = vectors.moved(builder, at, index, streams * LINE, i * LINE)
                found.append(builder.bitcast(vectors.masked(builder, place, _WORDS, left), _HALVES))
            pairs_of = [builder.bitcast(value, _WORDS) for value in _by_place(builder, found)]
            laid_out = [value for words in pairs_of for value in _split(builder, words)]
            if sums:
                total = ir.Constant(_SUMS, [0.0] * vectors.LANES)
                for words in pairs_of:
                    for half in vectors.halves(builder, words):
                        total = builder.fsub(total, half)
                laid_out.append(total)
            _lay_out(builder, laid_out, to, index)

        _over(builder, steps, tail, step)
        return context.get_dummy_value()

    return types.none(bits, zeros, *[types.int64] * 4), generate


def _lay_out(builder: Any, values: list[Any], to: Any, index: Any) -> None:
    """Stores vectors beside each other, as element `index` of an array of so many."""
    for i, value in enumerate(values):
        place = vectors.moved(builder, to, index, len(values) * LINE, i * LINE)
        vectors.store(builder, value, place, LINE)


def _over(builder: Any, steps: Any, tail: Any, step: Callable[[Any, Any], None]) -> None:
    """Emits step(index, None) for whole vectors, and step(steps, tail) if there is a tail."""
    with cgutils.for_range(builder, steps) as loop:
        step(loop.index, None)
    with builder.if_then(builder.icmp_signed(">", tail, vectors.constant(0))):
        step(steps, tail)


def _by_place(builder: Any, given: list[Any]) -> list[Any]:
    """Distributes the numbers of consecutive vectors to the same number of vectors in turn."""
    if len(given) == 1:
        return given
    dealt = [
        _by_place(
            builder,
            [
                vectors.shuffle(builder, a, b, list(range(first, 4 * vectors.LANES, 2)))
                for a, b in zip(given[::2], given[1::2], strict=True)
            ],
        )
        for first in range(2)
    ]
    return [one for both in zip(*dealt, strict=True) for one in both]


def _add(builder: Any, x: Any, weights: Any, total: Any) -> Any:
    """total + x * weights, lane by lane: vectors of float32, or of pairs in words."""
    if x.type == _SUMS:
        return vectors.fused(builder, x, weights, total)
    return pairs.add_products(builder, x, weights, total)


@dataclass(frozen=True)
class _Tile:
    """Emits a tile's code. Fields are the arguments of `tile`.

    Attributes:
        literals: bits, rows, outputs, parts, zeros, form.
        given: LLVM values of the other arguments.
        laid_out: Whether the rows are laid out by `part`.
        streams: Vectors of numbers for one vector of stored weights.
        wide: Vectors of a row, or of wide weights, for one vector of stored weights.
    """

    builder: Any
    literals: tuple[int, ...]
    given: tuple[Any, ...]

    @property
    def few(self) -> bool:
        return self.literals[0] < 16

    @property
    def laid_out(self) -> bool:
        return self.few or self.literals[5] == WIDE

    @property
    def streams(self) -> int:
        return _streams(self.literals[0]) if self.literals[0] <= 16 else 1

    @property
    def wide(self) -> int:
        return self.streams * vectors_of_pairs() if self.laid_out else 1

    def emit(self) -> None:
        """Emits the whole tile."""
        builder, (_, rows, outputs, parts, zeros, form) = self.builder, self.literals
        x, x_row, weights, weights_row, steps, tail, scale, *_, to, to_row = self.given
        nothing = ir.Constant(_SUMS, [0.0] * vectors.LANES)
        x_rows = [builder.add(x, builder.mul(x_row, vectors.constant(m))) for m in range(rows)]
        lines = [
            builder.add(weights, builder.mul(weights_row, vectors.constant(n)))
            for n in range(outputs)
        ]
        sums = [[cgutils.alloca_once_value(builder, nothing) for _ in lines] for _ in x_rows]

        def step(index: Any, count: Any) -> None:
            self._fetch(index)
            size = self.wide * LINE if form == WIDE else LINE
            places = [vectors.moved(builder, line, index, size) for line in lines]
            after = (self.wide + (zeros > 0)) * LINE
            here = [vectors.moved(builder, row, index, after) for row in x_rows]
            now = [[nothing if parts else builder.load(one) for one in row] for row in sums]
            if zeros == ZEROS:
                self._subtract_zeros(here, index, count, now)
            self._multiply(here, places, count, now)
            for n in range(outputs):
                factor = self._by_group(scale, n, _NUMBER, index, count) if parts else None
                least = None
                if zeros == MINIMUMS:  # sums of inputs are stored negated
                    least = self._by_group(self.given[7], n, _NUMBER, index, count)
                    least = builder.fneg(least)
                for m in range(rows):
                    value = now[m][n]
                    if factor is not None:
                        value = vectors.fused(builder, value, factor, builder.load(sums[m][n]))
                    if least is not None:
                        inputs = self._negative_sums(here[m])
                        value = vectors.fused(builder, inputs, least, value)
                    builder.store(value, sums[m][n])

        if self.few:
            _over(builder, steps, tail, step)
        else:
            with cgutils.for_range(builder, steps) as loop:
                step(loop.index, None)
        self._store(sums, to, to_row)

    def _fetch(self, index: Any) -> None:
        """Prefetches weights, which are read as they lie in memory."""
        builder, outputs = self.builder, self.literals[2]
        ahead, stride = self.given[10:12]
        if outputs == 1:
            ahead = builder.add(self.given[2], vectors.constant(AHEAD))
            vectors.fetch(builder, vectors.moved(builder, ahead, index, LINE), 3)
            return
        first = builder.add(ahead, builder.mul(index, stride))
        last = builder.add(first, builder.sub(stride, vectors.constant(2 * LINE)))
        for start in (first, last):  # the same lines with a stride of two
            for line in range(2):
                vectors.fetch(builder, builder.add(start, vectors.constant(line * LINE)), 2)

    def _subtract_zeros(self, here: list[Any], index: Any, count: Any, now: list[Any]) -> None:
        """Starts the sums with the negative sums of inputs times zero points."""
        builder = self.builder
        for n in range(self.literals[2]):
            points = self._by_group(self.given[7], n, _BYTE, index, count)
            points = builder.sitofp(builder.sext(points, _WORDS), _SUMS)
            for m, at in enumerate(here):
                now[m][n] = builder.fmul(points, self._negative_sums(at))

    def _negative_sums(self, at: Any) -> Any:
        """Negative sums of a row's inputs, stored after the inputs for a vector of weights."""
        at = self.builder.add(at, vectors.constant(self.wide * LINE))
        return vectors.load(self.builder, at, _SUMS, LINE)

    def _multiply(self, here: list[Any], places: list[Any], count: Any, now: list[Any]) -> None:
        """Adds the products of a vector of weights of each output to its sums."""
        builder, bits, form = self.builder, self.literals[0], self.literals[5]
        stored = [
            None if form == WIDE else vectors.masked(builder, at, _WORDS, count) for at in places
        ]
        for stream in range(self.streams):
            if self.laid_out:
                rows = [self._laid_out(at, stream) for at in here]
            else:
                loaded = [vectors.load(builder, at, _WORDS, bits // 8) for at in here]
                rows = [_widened(builder, row, bits, stream, INTEGERS) for row in loaded]
            for n, (place, words) in enumerate(zip(places, stored, strict=True)):
                if words is None:
                    numbers = self._laid_out(place, stream)
                else:
                    numbers = _widened(builder, words, bits, stream, form)
                for mine, row in zip(now, rows, strict=True):
                    for one, other in zip(row, numbers, strict=True):
                        mine[n] = _add(builder, one, other, mine[n])

    def _laid_out(self, at: Any, stream: int) -> list[Any]:
        """Numbers that were laid out: a vector of pairs, or two of float32."""
        each = vectors_of_pairs()
        return [
            vectors.load(
                self.builder,
                self.builder.add(at, vectors.constant((stream * each + i) * LINE)),
                _WORDS if each == 1 else _SUMS,
                LINE,
            )
            for i in range(each)
        ]

    def _by_group(self, address: Any, n: int, kind: Any, index: Any, count: Any) -> Any:
        """The scales, zero points or minimums of an output's groups in a vector of weights, each in
        the lanes of its group."""
        builder, parts, groups, a_group = self.builder, self.literals[3], *self.given[8:10]
        group = builder.udiv(index, a_group) if parts == 1 else None
        group = group or builder.mul(index, vectors.constant(parts))
        row = builder.mul(groups, vectors.constant(n))
        at = vectors.moved(builder, address, builder.add(row, group), 4 if kind == _NUMBER else 1)
        left = builder.sub(groups, group) if count is not None and parts > 1 else None
        found = vectors.masked(builder, at, ir.VectorType(kind, parts), left)
        lanes = [lane * parts // vectors.LANES for lane in range(vectors.LANES)]
        return vectors.shuffle(builder, found, found, lanes)

    def _store(self, sums: list[list[Any]], to: Any, to_row: Any) -> None:
        """Stores the results: the sum of the lanes, times the scale if there is only one."""
        builder, (_, rows, outputs, parts, *_) = self.builder, self.literals
        factor, row = None, 0
        if self.few and not parts:
            factor = vectors.load(builder, self.given[6], ir.VectorType(_NUMBER, outputs))
        while row < rows:
            some = next(n for n in (4, 2, 1) if n <= rows - row)
            ended = [builder.load(one) for mine in sums[row : row + some] for one in mine]
            found = vectors.totals(builder, ended)
            for m in range(some):
                lanes = list(range(outputs * m, outputs * (m + 1)))
                value = vectors.shuffle(builder, found, found, lanes)
                value = value if factor is None else builder.fmul(value, factor)
                place = builder.add(to, builder.mul(to_row, vectors.constant(row + m)))
                vectors.store(builder, value, place)
            row += some


@intrinsic(prefer_literal=True)
def tile(
    _: Any, bits: Any, rows: Any, outputs: Any, parts: Any, zeros: Any, form: Any,
    x: Any, x_row: Any, weights: Any, weights_row: Any, steps: Any, tail: Any,
    scale: Any, zero: Any, groups: Any, a_group: Any, ahead: Any, stride: Any,
    to: Any, to_row: Any,
) -> Any:  # fmt: skip
    """Products of some rows with some outputs.

    Args:
        bits, parts, zeros: Literals, see `target`.
        rows, outputs: Literals, numbers of rows and outputs.
        form: Literal, form of quantised weights; WIDE if laid out by `widen`.
        x: Address of the rows; for quantised weights laid out by `part`.
        x_row: Bytes from one row to the next.
        weights: Address of the weights.
        weights_row: Bytes from one output's weights to the next one's.
        steps: Number of whole vectors of an output's stored weights.
        tail: Words of a last, partial vector.
        scale, zero: Addresses of the first output's scales, and zero points or minimums.
        groups: Scales of an output.
        a_group: Vectors of weights that share a scale, if no vector has several.
        ahead: Address of the weights to prefetch, if there are several outputs.
        stride: Bytes of them for each vector: 2 or 4 * LINE.
        to: Address of the results.
        to_row: Bytes from one row of results to the next.
    """
    literals = tuple(one.literal_value for one in (bits, rows, outputs, parts, zeros, form))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Tile(builder, literals, tuple(args[len(literals) :])).emit()
        return context.get_dummy_value()

    return types.none(bits, rows, outputs, parts, zeros, form, *[types.int64] * 14), generate
