"""Attention of one row's queries over its context on CPUs, compiled by numba: a running softmax
over chunks of the context (FlashAttention, Dao et al. 2022, section 3.1). Few queries read the
blocks in place (PagedAttention, Kwon et al. 2023, section 4.1); for more queries, a chunk is
widened and put in order first. Chunks begin at multiples of CHUNK, and every sum has a fixed order.
So a query's result only depends on its position and its context: not on how many queries are
computed with it, nor on where a prompt was cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.batch import LEFT
from jaxserve.pallas_kernels.cpu.numba_ffi import INLINE, allocate, pointer
from jaxserve.pallas_kernels.cpu.scores import (
    CHUNK,
    QUERIES,
    add_values,
    largest,
    score_keys,
    weigh,
)
from jaxserve.pallas_kernels.cpu.vectors import BYTES, LANES, prefetch, upper_bytes, widened

FEW = 8  # up to this many queries read the context in place
_MASKED = np.float32(-1e30)
NO_SINK = -1e30  # of a head without a sink
LINE = 64  # alignment of vectors in bytes, so that none crosses a line


@njit(**INLINE)
def room(queries: int, head_dim: int) -> Any:
    """The address of scratch memory for `attend`, for this many queries of one head; release it by
    `free`."""
    width = (head_dim + LANES - 1) // LANES * LANES
    queries += QUERIES - 1  # the last ones may be none
    numbers = 2 * queries * width + 2 * queries + 2 * CHUNK * width + (2 + QUERIES) * CHUNK
    return allocate((numbers * BYTES + LINE) // 8 + 1)


@njit(**INLINE)
def _parts(memory: int, queries: int, width: int) -> Any:
    """It in parts: queries and sums [queries, width]; maxima and totals [queries]; keys and values
    [CHUNK, width]; scores [QUERIES, CHUNK]; factors of keys and values [2, CHUNK]. All of float32,
    by addresses: the compiler does not see what intrinsics write into arrays of its own."""
    left = (memory + LINE - 1) // LINE * LINE
    sums = left + BYTES * queries * width
    keys = sums + BYTES * queries * width
    values = keys + BYTES * CHUNK * width
    lines = values + BYTES * CHUNK * width
    factors = lines + BYTES * QUERIES * CHUNK
    tops = factors + 2 * BYTES * CHUNK
    return left, sums, keys, values, lines, factors, tops, tops + BYTES * queries


@njit(**INLINE)
def _floats(address: int, rows: int, columns: int) -> Any:
    return carray(pointer(address), (rows, columns), np.float32)


@njit(**INLINE)
def attend(  # noqa: PLR0915 whole: LLVM drops stores of `add_values` in a function of its own
    out: Any, q: Any, layer: Any, scales: Any, table: Any, head: int, first_head: int, group: int,
    side: int, token: int, count: int, position: int, context: int, ahead: int, scale: float,
    window: int, cap: float, sinks: Any, head_dim: int, halves: int, memory: Any,
) -> None:  # fmt: skip
    """Attention of one or several tokens of a row, for query heads of one KV head.

    Args:
        out: float32 [T, H, D], or [T, H, 2 * halves], filled in for these tokens and heads.
        q: float32 [T, H, D].
        layer: [blocks, kv_heads, block_size, D] of the pool, of the `attention.NUMBERS`; with
            halves of the width of one.
        scales: float32 [blocks, kv_heads, block_size], or None.
        table: int32 [2, W], the row's block ids.
        head: KV head.
        first_head: The first of the query heads.
        group: Number of query heads.
        side: The row's direction, LEFT or RIGHT.
        token: Index of the first token in q.
        count: Number of tokens.
        position: Position of the first token.
        context: Tokens of the row that are cached.
        ahead: Number of later tokens that a token sees; 0: attention is causal.
        scale: Factor of the queries.
        window: Sliding window; 0 for none.
        cap: Soft cap; 0 for none.
        sinks: float32 [H], scores without a value; `NO_SINK` for none.
        head_dim: D.
        halves: See `Scoring`.
        memory: Of `room`, for count * group queries at least.
    """
    size = layer.shape[2]
    queries, width = count * group, (head_dim + LANES - 1) // LANES * LANES
    together = 1 if queries == 1 else QUERIES  # the last of them may be none
    room_for = (queries + together - 1) // together * together
    row = BYTES * width
    left_at, sums_at, keys_at, values_at, lines_at, factors_at, tops_at, totals_at = _parts(
        memory, room_for, width
    )
    result_dim, value_width = head_dim, width
    if halves:
        # A chunk is put in order once: first what are values, then the rest of the keys.
        values_at, result_dim = keys_at, 2 * halves
        value_width = (result_dim + LANES - 1) // LANES * LANES
    left, sums = _floats(left_at, room_for, width), _floats(sums_at, room_for, width)
    keys, values = _floats(keys_at, CHUNK, width), _floats(values_at, CHUNK, width)
    lines, factors = _floats(lines_at, QUERIES, CHUNK), _floats(factors_at, 2, CHUNK)
    tops, totals = _floats(tops_at, 1, queries)[0], _floats(totals_at, 1, queries)[0]
    left[queries:], sums[queries:], lines[:] = np.float32(0), np.float32(0), np.float32(0)
    # The queries, scaled and padded to whole vectors; the running softmax of each: its maximum (or
    # its sink), the sum of weights, the weighted sum of values.
    for m in range(queries):
        sink = sinks[first_head + m % group]
        tops[m], totals[m] = _MASKED, np.float32(0)
        if sink > _MASKED:
            tops[m], totals[m] = sink, np.float32(1)
        query = q[token + m // group, first_head + m % group]
        for d in range(head_dim):
            left[m, d] = query[d] * scale
        for d in range(head_dim, width):
            left[m, d] = np.float32(0)
        for d in range(width):
            sums[m, d] = np.float32(0)
    # Few queries read K and V in place; for many it pays to copy a chunk first. Halves are joined
    # by their scales.
    factored = scales is not None and not halves
    in_place = queries <= FEW and width == head_dim and size % LANES == 0 and not halves
    low = max(0, position - window + 1) if window > 0 else 0
    if window > 0:
        ahead = min(ahead, window - 1)
    high = min(position + count + ahead, context)
    # Chunks begin at multiples of CHUNK, so that it does not matter where a prompt was cut.
    for first in range(low // CHUNK * CHUNK, high, CHUNK):
        begin, end = max(first, low), min(first + CHUNK, high)
        if not in_place:
            if halves:
                _join(layer, scales, table, head, side, first, begin, end, keys, halves, head_dim)
            else:
                _in_order(layer, table, head, side, first, begin, end, keys, values, head_dim)
        if factored:
            _scales_in_order(scales, table, head, side, first, begin, end, factors)
        for some in range(0, queries, together):
            last = min(some + together, queries) - 1
            lower, _ = _seen(position + some // group, begin, end, first, window, ahead)
            _, upper = _seen(position + last // group, begin, end, first, window, ahead)
            # Scores of the keys that any of them sees, LANES at a time, to `lines`.
            for j in range(lower // LANES * LANES, upper, LANES):
                query_at, to = left_at + some * row, lines_at + BYTES * j
                here, step = keys_at + j * row, row
                if in_place:
                    here, step = _place(layer, table, 0, head, side, first + j)
                    _fetch(layer, table, 1, head, side, first + j)
                    if together == 1:
                        score_keys(1, layer, here, step, query_at, row, width, to)
                    else:
                        score_keys(QUERIES, layer, here, step, query_at, row, width, to)
                else:
                    score_keys(QUERIES, keys, here, step, query_at, row, width, to)
            for m in range(some, last + 1):
                line, line_at = lines[m - some], lines_at + BYTES * CHUNK * (m - some)
                lower, upper = _seen(position + m // group, begin, end, first, window, ahead)
                if lower >= upper:  # the query sees nothing of this chunk
                    continue
                if factored:
                    for j in range(lower, upper):
                        line[j] *= factors[0, j]
                if cap > 0:
                    for j in range(lower, upper):
                        line[j] = cap * np.tanh(line[j] / cap)
                # For a new maximum, the sums so far are rescaled.
                top = largest(line_at, lower, upper, tops[m])
                if top > tops[m]:
                    old = np.exp(tops[m] - top)
                    totals[m] *= old
                    for d in range(width):
                        sums[m, d] *= old
                    tops[m] = top
                # Scores become weights in place.
                totals[m] += weigh(line_at, lower, upper, top)
                if factored:
                    for j in range(lower, upper):
                        line[j] *= factors[1, j]
            # The values, weighted, in the order of positions: those that all queries see, at once;
            # those before and behind for each query that sees them.
            all_lower, _ = _seen(position + last // group, begin, end, first, window, ahead)
            _, all_upper = _seen(position + some // group, begin, end, first, window, ahead)
            if all_lower >= all_upper:
                all_lower, all_upper = CHUNK, CHUNK
            for stage in range(3):
                for m in range(some, some + 1 if stage == 1 else last + 1):
                    lower, upper = _seen(position + m // group, begin, end, first, window, ahead)
                    if stage == 0:
                        upper = min(upper, all_lower)
                    elif stage == 1:
                        lower, upper = all_lower, all_upper
                    else:
                        lower = max(lower, all_upper)
                    weights_at, sum_at = lines_at + BYTES * CHUNK * (m - some), sums_at + m * row
                    for part in range(lower // LANES * LANES, upper, LANES):
                        j = max(part, lower)
                        many, weights = min(part + LANES, upper) - j, weights_at + BYTES * j
                        if in_place:
                            here, step = _place(layer, table, 1, head, side, first + j)
                            if first + part + CHUNK < high:
                                _fetch(layer, table, 0, head, side, first + part + CHUNK)
                            elif head + 1 < layer.shape[1]:
                                _fetch(layer, table, 0, head + 1, side, low // CHUNK * CHUNK + part)
                            if stage == 1 and together > 1:
                                add_values(
                                    QUERIES, layer, here, step, weights, many, width, sum_at, row
                                )
                            else:
                                add_values(1, layer, here, step, weights, many, width, sum_at, row)
                        elif stage == 1:
                            here = values_at + j * row
                            add_values(
                                QUERIES, values, here, row, weights, many, value_width, sum_at, row
                            )
                        else:
                            here = values_at + j * row
                            add_values(
                                1, values, here, row, weights, many, value_width, sum_at, row
                            )
    for m in range(queries):
        inverse = np.float32(1) / totals[m]
        result = out[token + m // group, first_head + m % group]
        for d in range(result_dim):
            result[d] = sums[m, d] * inverse


@njit(**INLINE)
def _place(layer: Any, table: Any, plane: int, head: int, side: int, position: int) -> Any:
    """Where a position's K (plane 0) or V (1) is, and bytes from there to the next one's in its
    block."""
    size, row = layer.shape[2], layer.shape[3] * layer.itemsize
    b = position // size
    t = position - b * size
    block = layer[table[plane, b], head]
    if side == LEFT:
        return block.ctypes.data + t * row, row
    return block.ctypes.data + (size - 1 - t) * row, -row


@njit(**INLINE)
def _seen(at: int, begin: int, end: int, first: int, window: int, ahead: int) -> Any:
    """The part [lower, upper) of the chunk from `first` on that the query at a position sees, if
    lower < upper.

    Args:
        at: Position of the query.
        begin, end: Positions of the chunk that any query sees.
        first: Position of the chunk.
        window, ahead: See `attend`.
    """
    lower = max(begin, at - window + 1) - first if window > 0 else 0
    return lower, min(end, at + 1 + ahead) - first


@njit(**INLINE)
def _fetch(layer: Any, table: Any, plane: int, head: int, side: int, position: int) -> None:
    """Prefetches K (plane 0) or V (1) of LANES positions in one block."""
    at, row = _place(layer, table, plane, head, side, position)
    prefetch(min(at, at + (LANES - 1) * row), LANES * abs(row))


@njit(**INLINE)
def _in_order(
    layer: Any, table: Any, head: int, side: int, first: int, begin: int, end: int, keys: Any,
    values: Any, head_dim: int,
) -> None:  # fmt: skip
    """Fills keys and values [CHUNK, width] with positions [begin, end) of the chunk from first on.
    The rest stays."""
    size = layer.shape[2]
    for position in range(begin, end):
        b = position // size
        t = position - b * size
        slot = t if side == LEFT else size - 1 - t
        key, value = layer[table[0, b], head, slot], layer[table[1, b], head, slot]
        for d in range(head_dim):
            keys[position - first, d] = widened(key[d])
        for d in range(head_dim):
            values[position - first, d] = widened(value[d])
        for d in range(head_dim, keys.shape[1]):
            keys[position - first, d] = values[position - first, d] = np.float32(0)


@njit(**INLINE)
def _join(
    layer: Any, scales: Any, table: Any, head: int, side: int, first: int, begin: int, end: int,
    keys: Any, halves: int, head_dim: int,
) -> None:  # fmt: skip
    """Fills keys [CHUNK, width] likewise: the first `halves` of K and of V, then the rest of both,
    see `pool.join_halves`."""
    size, rest = layer.shape[2], layer.shape[3] - halves
    for position in range(begin, end):
        b = position // size
        t = position - b * size
        slot = t if side == LEFT else size - 1 - t
        key, value = layer[table[0, b], head, slot], layer[table[1, b], head, slot]
        whole = keys[position - first]
        of_key, of_value = np.float32(1), np.float32(1)
        if scales is not None:
            of_key, of_value = scales[table[0, b], head, slot], scales[table[1, b], head, slot]
        for d in range(halves):
            whole[d] = widened(key[d]) * of_key
        for d in range(halves):
            whole[halves + d] = widened(value[d]) * of_value
        if layer.itemsize == 1:
            for d in range(rest):
                whole[2 * halves + d] = upper_bytes(key[halves + d], value[halves + d])
        else:
            for d in range(rest):
                whole[2 * halves + d] = widened(key[halves + d])
                whole[2 * halves + rest + d] = widened(value[halves + d])
        for d in range(head_dim, keys.shape[1]):
            whole[d] = np.float32(0)


@njit(**INLINE)
def _scales_in_order(
    scales: Any, table: Any, head: int, side: int, first: int, begin: int, end: int, factors: Any
) -> None:  # fmt: skip
    """Fills factors [2, CHUNK] likewise, of K and V."""
    size = scales.shape[2]
    for position in range(begin, end):
        b = position // size
        t = position - b * size
        slot = t if side == LEFT else size - 1 - t
        factors[0, position - first] = scales[table[0, b], head, slot]
        factors[1, position - first] = scales[table[1, b], head, slot]
