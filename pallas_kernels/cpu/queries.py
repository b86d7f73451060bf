"""CPUs: what queries of one row make of its context, compiled by numba.

One query reads the blocks where they lie (PagedAttention, Kwon et al. 2023, section 4.1); several
are multiplied with chunks of the context, which are put in order first, under a running softmax
(FlashAttention, Dao et al. 2022, section 3.1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from jaxserve.pallas_kernels.batch import LEFT
from jaxserve.pallas_kernels.cpu.numba_ffi import FAST
from jaxserve.pallas_kernels.cpu.tiles import (
    BYTES,
    LANES,
    ROWS,
    prefetch,
    product_1,
    product_2,
    widened,
)

CHUNK = 64  # tokens of context that several queries are multiplied with
_LOG2E = np.float32(1.4426950408889634)
_MASKED = np.float32(-1e30)
NO_SINK = -1e30  # of a head that has none


@njit(**FAST)
def _softmax(scores: Any, exponents: Any, count: int, top: float) -> Any:
    """Replaces the scores by exp(score - top) and returns their sum. 2^f for 0 <= f < 1 is a
    polynomial of six terms, right to 2e-7, so that the loop vectorizes."""
    factors = exponents.view(np.float32)
    for i in range(count):
        y = max((scores[i] - top) * _LOG2E, np.float32(-126))
        whole = np.floor(y)
        f = y - whole
        p = np.float32(1.8775767e-3)
        p = p * f + np.float32(8.9893397e-3)
        p = p * f + np.float32(5.5826318e-2)
        p = p * f + np.float32(2.4015361e-1)
        p = p * f + np.float32(6.9315308e-1)
        scores[i] = p * f + np.float32(9.9999994e-1)
        exponents[i] = (np.int32(whole) + np.int32(127)) << 23
    total = np.float32(0)
    for i in range(count):
        scores[i] *= factors[i]
        total += scores[i]
    return total


@njit(**FAST)
def one_query(
    out: Any, query: Any, layer: Any, scales: Any, table: Any, head: int, side: int, first: int,
    last: int, cap: float, sink: float, scores: Any, exponents: Any, head_dim: int,
) -> None:  # fmt: skip
    """Attention of one query over positions [first, last) of one KV head.

    Args:
        out: float32 [D], the result.
        query: float32 [D], scaled.
        layer: [blocks, kv_heads, block_size, D] of the pool, of the `attention.NUMBERS`.
        scales: float32 [blocks, kv_heads, block_size], or None.
        table: int32 [2, W], the row's block ids.
        head: KV head.
        side: The row's direction, LEFT or RIGHT.
        first, last: Positions that the query sees, last not included.
        cap: Soft cap; 0 for none.
        sink: Score without a value, of the query's head; `NO_SINK` for none.
        scores: float32 [W * block_size], scratch.
        exponents: int32 [W * block_size], scratch.
        head_dim: D.
    """
    size, vector = layer.shape[2], head_dim * layer.itemsize
    begin = first // size
    for b in range(begin, (last + size - 1) // size):
        keys = layer[table[0, b], head]
        plane, following = (0, b + 1) if (b + 1) * size < last else (1, begin)
        ahead = layer[table[plane, following], head].ctypes.data
        at = (b - begin) * size
        for t in range(min(size, last - b * size)):
            slot = t if side == LEFT else size - 1 - t
            prefetch(ahead + slot * vector, vector)
            total = np.float32(0)
            for d in range(head_dim):
                total += query[d] * widened(keys[slot, d])
            if scales is not None:
                total *= scales[table[0, b], head, slot]
            scores[at + t] = total
    low = first - begin * size
    count = last - first
    mine, mine_exponents = scores[low : low + count], exponents[low : low + count]
    if cap > 0:
        for i in range(count):
            mine[i] = cap * np.tanh(mine[i] / cap)
    top = sink
    for i in range(count):
        top = max(top, mine[i])
    total = _softmax(mine, mine_exponents, count, top)
    if sink > _MASKED:
        total += np.exp(sink - top)
    inverse = np.float32(1) / total
    for d in range(head_dim):
        out[d] = np.float32(0)
    for b in range(begin, (last + size - 1) // size):
        values = layer[table[1, b], head]
        following = b + 1 if (b + 1) * size < last else b
        ahead = layer[table[1, following], head].ctypes.data
        for position in range(max(first, b * size), min(last, (b + 1) * size)):
            t = position - b * size
            slot = t if side == LEFT else size - 1 - t
            prefetch(ahead + slot * vector, vector)
            weight = scores[position - begin * size] * inverse
            if scales is not None:
                weight *= scales[table[1, b], head, slot]
            for d in range(head_dim):
                out[d] += weight * widened(values[slot, d])


@njit(**FAST)
def _put_in_order(
    layer: Any, scales: Any, table: Any, head: int, side: int, first: int, last: int, keys: Any,
    values: Any, head_dim: int,
) -> None:  # fmt: skip
    """Fills keys [D, CHUNK] and values [CHUNK, width] with positions [first, last). The rest
    stays."""
    size = layer.shape[2]
    for j in range(last - first):
        position = first + j
        b = position // size
        t = position - b * size
        slot = t if side == LEFT else size - 1 - t
        key, value = layer[table[0, b], head, slot], layer[table[1, b], head, slot]
        of_key = of_value = np.float32(1)
        if scales is not None:
            of_key = scales[table[0, b], head, slot]
            of_value = scales[table[1, b], head, slot]
        for d in range(head_dim):
            keys[d, j] = widened(key[d]) * of_key
            values[j, d] = widened(value[d]) * of_value


@njit(**FAST)
def _mask(line: Any, lower: int, upper: int, cap: float) -> None:
    """Caps scores [CHUNK], and masks those outside of [lower, upper)."""
    if cap > 0:
        for j in range(lower, upper):
            line[j] = cap * np.tanh(line[j] / cap)
    for j in range(lower):
        line[j] = _MASKED
    for j in range(upper, CHUNK):
        line[j] = _MASKED


@njit(**FAST)
def many_queries(
    out: Any, q: Any, layer: Any, scales: Any, table: Any, head: int, side: int, token: int,
    count: int, position: int, scale: float, window: int, cap: float, sinks: Any, head_dim: int,
) -> None:  # fmt: skip
    """Attention of several tokens of a row, for the query heads of one KV head.

    Args:
        out: float32 [T, H, D], filled in for these tokens and heads.
        q: float32 [T, H, D].
        layer: [blocks, kv_heads, block_size, D] of the pool, of the `attention.NUMBERS`.
        scales: float32 [blocks, kv_heads, block_size], or None.
        table: int32 [2, W], the row's block ids.
        head: KV head.
        side: The row's direction, LEFT or RIGHT.
        token: Index of the first token in q.
        count: Number of tokens.
        position: Position of the first token.
        scale: Factor of the queries.
        window: Sliding window; 0 for none.
        cap: Soft cap; 0 for none.
        sinks: float32 [H], scores without a value; `NO_SINK` for none.
        head_dim: D.
    """
    width = (head_dim + LANES - 1) // LANES * LANES
    group = q.shape[1] // layer.shape[1]
    queries = count * group
    padded = (queries + ROWS - 1) // ROWS * ROWS
    left = np.zeros((padded, head_dim), np.float32)
    sums = np.zeros((padded, width), np.float32)
    scores = np.empty((padded, CHUNK), np.float32)
    exponents = np.empty(CHUNK, np.int32)
    tops = np.full(padded, _MASKED, np.float32)
    totals = np.zeros(padded, np.float32)
    keys = np.empty((head_dim, CHUNK), np.float32)
    values = np.zeros((CHUNK, width), np.float32)
    for i in range(count):
        for g in range(group):
            m, sink = i * group + g, sinks[head * group + g]
            if sink > _MASKED:
                tops[m], totals[m] = sink, np.float32(1)
            for d in range(head_dim):
                left[i * group + g, d] = q[token + i, head * group + g, d] * scale
    low = max(0, position - window + 1) if window > 0 else 0
    for first in range(low // CHUNK * CHUNK, position + count, CHUNK):
        begin, end = max(first, low), min(first + CHUNK, position + count)
        _put_in_order(layer, scales, table, head, side, begin, end, keys, values, head_dim)
        scores[:] = np.float32(0)
        _multiply(scores, left, keys, head_dim, CHUNK)
        for m in range(queries):
            line, at = scores[m], position + m // group
            lower = max(begin, at - window + 1) if window > 0 else begin
            _mask(line, min(lower, end) - begin, max(min(end, at + 1) - begin, 0), cap)
            top = tops[m]
            for j in range(CHUNK):
                top = max(top, line[j])
            if top == _MASKED:  # it sees nothing of this chunk, and saw nothing before
                line[:] = np.float32(0)
                continue
            old = np.exp(tops[m] - top)
            totals[m] = totals[m] * old + _softmax(line, exponents, CHUNK, top)
            tops[m] = top
            for d in range(width):
                sums[m, d] *= old
        _multiply(sums, scores, values, CHUNK, width)
    for i in range(count):
        for g in range(group):
            m = i * group + g
            inverse = np.float32(1) / totals[m]
            for d in range(head_dim):
                out[token + i, head * group + g, d] = sums[m, d] * inverse


@njit(**FAST)
def _multiply(c: Any, a: Any, b: Any, depth: int, columns: int) -> None:
    """c += a @ b, whose rows are a multiple of ROWS and columns of LANES."""
    c_at, a_at, b_at = c.ctypes.data, a.ctypes.data, b.ctypes.data
    c_row, a_row, b_row = BYTES * c.shape[1], BYTES * a.shape[1], BYTES * b.shape[1]
    for m in range(0, c.shape[0], ROWS):
        column = 0
        while column + 2 * LANES <= columns:
            where = c_at + m * c_row + column * BYTES
            product_2(where, c_row, a_at + m * a_row, a_row, b_at + column * BYTES, b_row, depth)
            column += 2 * LANES
        if column < columns:
            where = c_at + m * c_row + column * BYTES
            product_1(where, c_row, a_at + m * a_row, a_row, b_at + column * BYTES, b_row, depth)
