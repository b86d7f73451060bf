"""The vector operations of attention: scores of keys, softmax weights, and sums of values."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu import vectors
from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic
from jaxserve.pallas_kernels.cpu.vectors import BYTES, LANES

CHUNK = 64  # tokens of context that have one maximum
QUERIES = 4  # queries that read a key or value at once
_VECTORS = CHUNK // LANES
_AT_ONCE = 4  # vectors of a value


@intrinsic(prefer_literal=True)
def score_keys(
    _: Any, queries: Any, kind: Any, keys: Any, row: Any, query: Any, query_row: Any, width: Any,
    to: Any,
) -> Any:  # fmt: skip
    """Writes the products of some queries with LANES keys: each summed lane by lane in order of the
    width, then over the lanes.

    Args:
        queries: Literal, number of queries: 1 or QUERIES.
        kind: An array of the keys' numbers, see `vectors.widened`.
        keys: Address of the first key.
        row: Bytes from one key to the next; may be negative.
        query: Address of the first query, float32.
        query_row: Bytes from one query to the next.
        width: Width of a key; a multiple of LANES.
        to: Address of LANES float32 numbers; those of the next query are CHUNK numbers further.
    """
    many = queries.literal_value
    each = LANES // many  # keys at once: their sums fit into registers

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, keys, row, query, query_row, width, to = args
        number = signature.args[1].dtype
        size, nothing = number.bitwidth // 8, vectors.everywhere(0.0)
        sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(LANES)]
        lines = [
            builder.add(query, builder.mul(query_row, vectors.constant(m))) for m in range(many)
        ]
        for first in range(0, LANES, each):
            for one in sums:
                builder.store(nothing, one)
            places = [
                builder.add(keys, builder.mul(row, vectors.constant(first + i)))
                for i in range(each)
            ]
            with cgutils.for_range(builder, builder.udiv(width, vectors.constant(LANES))) as loop:
                here = [vectors.moved(builder, one, loop.index, LANES * BYTES) for one in lines]
                left = [vectors.load(builder, at, vectors.VECTOR) for at in here]
                for i, place in enumerate(places):
                    at = vectors.moved(builder, place, loop.index, LANES * size)
                    key = vectors.numbers_of(builder, at, number)
                    for m in range(many):
                        one = sums[m * each + i]
                        builder.store(vectors.fused(builder, left[m], key, builder.load(one)), one)
            found = vectors.totals(builder, [builder.load(one) for one in sums])
            for m in range(many):
                mine = vectors.shuffle(builder, found, found, list(range(m * each, (m + 1) * each)))
                at = builder.add(to, vectors.constant((m * CHUNK + first) * BYTES))
                vectors.store(builder, mine, at)
        return context.get_dummy_value()

    return types.none(queries, kind, *[types.int64] * 6), generate


def _inside(builder: Any, i: int, lower: Any, upper: Any) -> Any:
    """Which lanes of vector i are in [lower, upper)."""
    index = ir.Constant(vectors.WORDS, list(range(i * LANES, (i + 1) * LANES)))
    above = builder.icmp_signed(">=", index, lower)
    return builder.and_(above, builder.icmp_signed("<", index, upper))


def _bounds(builder: Any, *numbers: Any) -> list[Any]:
    return [vectors.spread(builder, builder.trunc(one, vectors.INDEX)) for one in numbers]


@intrinsic
def largest(_: Any, line: Any, lower: Any, upper: Any, top: Any) -> Any:
    """The maximum of some scores of a chunk and of the previous maximum. NaN scores are ignored.

    Args:
        line: Address of CHUNK float32 scores.
        lower, upper: Range of valid scores, [lower, upper).
        top: The previous maximum.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line, lower, upper, top = args
        bounds, best = _bounds(builder, lower, upper), vectors.spread(builder, top)
        for i in range(_VECTORS):
            at = builder.add(line, vectors.constant(i * LANES * BYTES))
            found = vectors.load(builder, at, vectors.VECTOR)
            more = builder.fcmp_ordered(">", found, best)
            more = builder.and_(more, _inside(builder, i, *bounds))
            best = builder.select(more, found, best)
        width = LANES
        while width > 1:
            width //= 2
            empty = ir.Constant(best.type, ir.Undefined)
            one, other = (
                vectors.shuffle(builder, best, empty, list(range(first, first + width)))
                for first in (0, width)
            )
            best = builder.select(builder.fcmp_ordered(">", one, other), one, other)
        return builder.extract_element(best, ir.Constant(vectors.INDEX, 0))

    return types.float32(types.int64, types.int64, types.int64, types.float32), generate


@intrinsic
def weigh(_: Any, line: Any, lower: Any, upper: Any, top: Any) -> Any:
    """Replaces the scores of a chunk by exp(score - top), and returns their sum: lane by lane in
    order, then over the lanes.

    Args:
        line: Address of CHUNK float32 scores.
        lower, upper: Range of valid scores, [lower, upper); others become 0.
        top: The maximum.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line, lower, upper, top = args
        bounds, tops = _bounds(builder, lower, upper), vectors.spread(builder, top)
        total = vectors.everywhere(0.0)
        for i in range(_VECTORS):
            at = builder.add(line, vectors.constant(i * LANES * BYTES))
            found = vectors.load(builder, at, vectors.VECTOR)
            value = vectors.exp(builder, builder.fsub(found, tops))
            inside = _inside(builder, i, *bounds)
            value = builder.select(inside, value, vectors.everywhere(0.0))
            vectors.store(builder, value, at)
            total = builder.fadd(total, value)
        return vectors.total(builder, total)

    return types.float32(types.int64, types.int64, types.int64, types.float32), generate


@intrinsic(prefer_literal=True)
def add_values(
    _: Any, queries: Any, kind: Any, values: Any, row: Any, weights: Any, count: Any, width: Any,
    sums: Any, sums_row: Any,
) -> Any:  # fmt: skip
    """Adds some values, times their weights, to the sums of some queries, one after another.

    Args:
        queries: Literal, number of queries.
        kind: An array of the values' numbers, see `vectors.widened`.
        values: Address of the first value.
        row: Bytes from one value to the next; may be negative.
        weights: Address of float32 numbers; those of the next query are CHUNK numbers further.
        count: Number of values.
        width: Width of a value; a multiple of LANES.
        sums: Address of float32 numbers.
        sums_row: Bytes from one query's sums to the next one's.
    """
    many = queries.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, values, row, weights, count, width, sums, sums_row = args
        number = signature.args[1].dtype
        size = number.bitwidth // 8

        def add(first: Any, wide: int) -> None:
            """Vectors of the values, from one on."""
            places = []
            for m in range(many):
                line = builder.add(sums, builder.mul(sums_row, vectors.constant(m)))
                line = vectors.moved(builder, line, first, LANES * BYTES)
                for i in range(wide):
                    places.append(builder.add(line, vectors.constant(i * LANES * BYTES)))
            kept = [cgutils.alloca_once(builder, vectors.VECTOR) for _ in places]
            for place, one in zip(places, kept, strict=True):
                builder.store(vectors.load(builder, place, vectors.VECTOR), one)
            begin = vectors.moved(builder, values, first, LANES * size)
            with cgutils.for_range(builder, count) as loop:
                here = builder.add(begin, builder.mul(row, loop.index))
                value = [
                    vectors.numbers_of(
                        builder, builder.add(here, vectors.constant(i * LANES * size)), number
                    )
                    for i in range(wide)
                ]
                for m in range(many):
                    at = vectors.moved(builder, weights, loop.index, BYTES, m * CHUNK * BYTES)
                    weight = vectors.spread(builder, vectors.load(builder, at, vectors.NUMBER))
                    for i, one in enumerate(kept[m * wide : (m + 1) * wide]):
                        added = vectors.fused(builder, weight, value[i], builder.load(one))
                        builder.store(added, one)
            for place, one in zip(places, kept, strict=True):
                vectors.store(builder, builder.load(one), place)

        whole = builder.udiv(width, vectors.constant(LANES))
        at_once = builder.udiv(whole, vectors.constant(_AT_ONCE))
        with cgutils.for_range(builder, at_once) as loop:
            add(builder.mul(loop.index, vectors.constant(_AT_ONCE)), _AT_ONCE)
        done = builder.mul(at_once, vectors.constant(_AT_ONCE))
        with cgutils.for_range(builder, builder.sub(whole, done)) as loop:
            add(builder.add(done, loop.index), 1)
        return context.get_dummy_value()

    return types.none(queries, kind, *[types.int64] * 7), generate
