"""Paged attention of KV rows on CPUs, compiled by numba: decodes and prompt chunks, on all cores.

A share is a row's tile of queries, for some of its heads. One query reads its context's blocks
where they lie (PagedAttention, Kwon et al. 2023, section 4.1); several are multiplied with chunks
of it, which are put in order first, under a running softmax (FlashAttention, Dao et al. 2022,
section 3.1).
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels import numba_ffi, numba_tiles
from jaxserve.pallas_kernels.batch import KV, LEFT
from jaxserve.pallas_kernels.numba_ffi import (
    FAST,
    OPTIONS,
    address_of,
    allocate,
    begin,
    data,
    dims,
    done,
    finish,
    operands,
    plan,
    take,
    words,
)
from jaxserve.pallas_kernels.numba_tiles import BYTES, LANES, ROWS, prefetch, product_1, product_2

TILE = 64  # queries, heads of a group times tokens, that are multiplied at once
CHUNK = 64  # tokens of context that they are multiplied with
FEW = 8  # queries that are not worth putting the context in order for
ALONE = 1 << 17  # numbers of context: below, other threads come too late to help
ENOUGH = 8  # shares that a call should have, else heads are cut too
SHARES = 64  # at most, about
_HEAD, _UNIT = 2, 5  # words, see `_plan`

# Operands and the result, see `target`.
_Q, _POOL, _TABLES, _LENS, _START, _MANY, _SIDE, _KIND, _TOKEN_ROW, _INTS, _FLOATS, _OUT = range(12)
_LOG2E = np.float32(1.4426950408889634)
_MASKED = np.float32(-1e30)


_lock = threading.Lock()  # steps are compiled by several threads


def target(head_dim: int) -> str:
    """The name of the kernel for heads of this width, compiled if it is the first time.

    Operands: q [T, H, D], pool [L, B, K, S, D], float32; of `AttentionBatch`: tables, context_lens,
    query_start, query_lens, direction, kind, token_row; int32 [2]: layer, sliding_window (0: none);
    float32 [2]: scale, soft_cap (0: none). Result: [T, H, D].
    """
    with _lock:
        return _registered(head_dim)


@functools.cache
def _registered(head_dim: int) -> str:
    name = f"jaxserve_paged_attention_{head_dim}"
    symbol = numba_ffi.task_symbol(name)
    digest = numba_ffi.digest(__file__, numba_tiles.__file__)

    def handler(frame: int) -> int:
        len(digest)
        block = begin(frame)
        if block == 0:
            return 0
        shares, address = _plan(operands(block))
        return finish(frame, block, shares, address, address_of(symbol))

    def task(block: int) -> int:
        len(digest)
        i = take(block)
        while i >= 0:
            _share(operands(block), plan(block), i, head_dim)
            done(block)
            i = take(block)
        return 0

    numba_ffi.register(name, handler, task)
    return name


@njit(**OPTIONS)
def _plan(given: Any) -> Any:
    """Zeros for tokens of nobody; and the shares: (row, first query token, tokens, first kv head,
    heads), those of most work first."""
    tokens, heads, head_dim = dims(given[_Q], 3)
    kv_heads = dims(given[_POOL], 5)[2]
    rows = dims(given[_LENS], 1)[0]
    lens = carray(data(given[_LENS]), (rows,), np.int32)
    many = carray(data(given[_MANY]), (rows,), np.int32)
    kind = carray(data(given[_KIND]), (rows,), np.int32)
    token_row = carray(data(given[_TOKEN_ROW]), (tokens,), np.int32)
    out = carray(data(given[_OUT]), (tokens, heads * head_dim), np.float32)
    for token in range(tokens):
        row = token_row[token]
        if row < 0 or row >= rows or kind[row] != KV:
            out[token] = np.float32(0)
    tile = max(1, TILE // (heads // kv_heads))
    tiles, work = 0, 0
    for row in range(rows):
        if kind[row] == KV and many[row] > 0:
            tiles += (many[row] + tile - 1) // tile
            work += lens[row] * kv_heads * head_dim * ((many[row] + FEW) // FEW)
    cuts = 1  # of the heads
    if work >= ALONE:
        while cuts < kv_heads and tiles * cuts < ENOUGH:
            cuts += 1
    per = (kv_heads + cuts - 1) // cuts
    cuts = (kv_heads + per - 1) // per
    address = allocate(_HEAD + tiles * cuts * _UNIT)
    head = words(address, _HEAD)
    units = words(address + 8 * _HEAD, tiles * cuts * _UNIT).reshape((tiles * cuts, _UNIT))
    at = 0
    for row in range(rows):
        if kind[row] != KV or many[row] <= 0:
            continue
        for i in range((many[row] + tile - 1) // tile - 1, -1, -1):
            for cut in range(cuts):
                units[at, 0], units[at, 1] = row, i * tile
                units[at, 2] = min(tile, many[row] - i * tile)
                units[at, 3] = cut * per
                units[at, 4] = min(per, kv_heads - cut * per)
                at += 1
    # A few at a time where there are many, all of them where others would come too late.
    head[0], head[1] = at, max(1, at // SHARES) if work >= ALONE else max(1, at)
    return (at + head[1] - 1) // head[1], address


@njit(**FAST)
def _softmax(scores: Any, exponents: Any, count: int, top: float) -> Any:
    """Makes exp(score - top) of the scores; their sum. 2^f for 0 <= f < 1 is a polynomial of
    six terms, right to 2e-7, so that the loop is one of vectors."""
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
def _one_query(
    out: Any, query: Any, layer: Any, table: Any, head: int, side: int, first: int, last: int,
    cap: float, scores: Any, exponents: Any, head_dim: int,
) -> None:  # fmt: skip
    """out [D]: what the query [D] (scaled) makes of positions [first, last)."""
    size = layer.shape[2]
    begin = first // size
    for b in range(begin, (last + size - 1) // size):
        keys = layer[table[0, b], head]
        plane, following = (0, b + 1) if (b + 1) * size < last else (1, begin)
        ahead = layer[table[plane, following], head].ctypes.data
        at = (b - begin) * size
        for t in range(min(size, last - b * size)):
            slot = t if side == LEFT else size - 1 - t
            prefetch(ahead + slot * head_dim * BYTES, head_dim)
            total = np.float32(0)
            for d in range(head_dim):
                total += query[d] * keys[slot, d]
            scores[at + t] = total
    low = first - begin * size
    count = last - first
    mine, mine_exponents = scores[low : low + count], exponents[low : low + count]
    if cap > 0:
        for i in range(count):
            mine[i] = cap * np.tanh(mine[i] / cap)
    top = _MASKED
    for i in range(count):
        top = max(top, mine[i])
    inverse = np.float32(1) / _softmax(mine, mine_exponents, count, top)
    for d in range(head_dim):
        out[d] = np.float32(0)
    for b in range(begin, (last + size - 1) // size):
        values = layer[table[1, b], head]
        following = b + 1 if (b + 1) * size < last else b
        ahead = layer[table[1, following], head].ctypes.data
        for position in range(max(first, b * size), min(last, (b + 1) * size)):
            t = position - b * size
            slot = t if side == LEFT else size - 1 - t
            prefetch(ahead + slot * head_dim * BYTES, head_dim)
            weight = scores[position - begin * size] * inverse
            for d in range(head_dim):
                out[d] += weight * values[slot, d]


@njit(**FAST)
def _put_in_order(
    layer: Any, table: Any, head: int, side: int, first: int, last: int, keys: Any, values: Any,
    head_dim: int,
) -> None:  # fmt: skip
    """keys [D, CHUNK] and values [CHUNK, width] of positions [first, last); zeros behind."""
    size = layer.shape[2]
    for j in range(last - first):
        position = first + j
        b = position // size
        t = position - b * size
        slot = t if side == LEFT else size - 1 - t
        key, value = layer[table[0, b], head, slot], layer[table[1, b], head, slot]
        for d in range(head_dim):
            keys[d, j] = key[d]
            values[j, d] = value[d]
    for j in range(last - first, CHUNK):
        for d in range(head_dim):
            keys[d, j] = np.float32(0)
            values[j, d] = np.float32(0)


@njit(**FAST)
def _many_queries(
    out: Any, q: Any, layer: Any, table: Any, head: int, side: int, token: int, count: int,
    position: int, scale: float, window: int, cap: float, head_dim: int,
) -> None:  # fmt: skip
    """Fills out [T, H, D] for `count` tokens from `token` on, the first at `position`, and the
    query heads of one kv head."""
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
            for d in range(head_dim):
                left[i * group + g, d] = q[token + i, head * group + g, d] * scale
    low = max(0, position - window + 1) if window > 0 else 0
    for first in range(low // CHUNK * CHUNK, position + count, CHUNK):
        begin, end = max(first, low), min(first + CHUNK, position + count)
        _put_in_order(layer, table, head, side, begin, end, keys, values, head_dim)
        scores[:] = np.float32(0)
        _multiply(scores, left, keys, head_dim, CHUNK)
        for m in range(queries):
            at = position + m // group
            lower = max(begin, at - window + 1) if window > 0 else begin
            upper = min(end, at + 1)
            line = scores[m]
            if cap > 0:
                for j in range(end - begin):
                    line[j] = cap * np.tanh(line[j] / cap)
            for j in range(min(lower, end) - begin):
                line[j] = _MASKED
            for j in range(max(upper - begin, 0), CHUNK):
                line[j] = _MASKED
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


@njit(**FAST)
def _share(given: Any, address: int, i: int, head_dim: int) -> None:
    tokens, heads, _ = dims(given[_Q], 3)
    pool_shape = dims(given[_POOL], 5)
    blocks, kv_heads, size = pool_shape[1], pool_shape[2], pool_shape[3]
    rows, _, table_width = dims(given[_TABLES], 3)
    q = carray(data(given[_Q]), (tokens, heads, head_dim), np.float32)
    pool = carray(data(given[_POOL]), (pool_shape[0], blocks, kv_heads, size, head_dim), np.float32)
    tables = carray(data(given[_TABLES]), (rows, 2, table_width), np.int32)
    lens = carray(data(given[_LENS]), (rows,), np.int32)
    start = carray(data(given[_START]), (rows,), np.int32)
    many = carray(data(given[_MANY]), (rows,), np.int32)
    sides = carray(data(given[_SIDE]), (rows,), np.int32)
    ints = carray(data(given[_INTS]), (2,), np.int32)
    floats = carray(data(given[_FLOATS]), (2,), np.float32)
    out = carray(data(given[_OUT]), (tokens, heads, head_dim), np.float32)
    layer, window = pool[ints[0]], ints[1]
    scale, cap = floats[0], floats[1]
    group = heads // kv_heads
    head_words = words(address, _HEAD)
    number, per = head_words[0], head_words[1]
    units = words(address + 8 * _HEAD, number * _UNIT).reshape((number, _UNIT))
    scores = np.empty(table_width * size, np.float32)
    exponents = np.empty(table_width * size, np.int32)
    query = np.empty(head_dim, np.float32)
    for unit in range(i * per, min((i + 1) * per, number)):
        row, first, count, head, count_heads = units[unit]
        position = lens[row] - many[row] + first
        token = start[row] + first
        for h in range(head, head + count_heads):
            if count * group > FEW:
                _many_queries(
                    out, q, layer, tables[row], h, sides[row], token, count, position, scale,
                    window, cap, head_dim,
                )  # fmt: skip
                continue
            for j in range(count):
                last = position + j + 1
                low = max(0, last - window) if window > 0 else 0
                for g in range(h * group, (h + 1) * group):
                    for d in range(head_dim):
                        query[d] = q[token + j, g, d] * scale
                    _one_query(
                        out[token + j, g], query, layer, tables[row], h, sides[row], low, last,
                        cap, scores, exponents, head_dim,
                    )  # fmt: skip
