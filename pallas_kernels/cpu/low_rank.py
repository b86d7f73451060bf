"""Low-rank products that differ by row (adapters) on CPUs, compiled by numba: both factors in one
call. Only columns that some row uses are read, once; rows without an adapter are not touched. A
unit of work is some rows of one adapter and one part of the projection. Its first product, x A, is
cut by columns, its second one by outputs; a share of the second product waits until the unit's
first product is done. The result for a row does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import dot_tiles, numba_ffi, pairs, vectors
from jaxserve.pallas_kernels.cpu.pairs import LINE

COLUMNS = 8  # an adapter's columns are a multiple of this
MOST_ROWS = 32  # most rows of a unit
OUTPUTS = 512  # outputs of a block of B, which fits a core's cache
FEWEST, GRAIN = 128, 64  # least outputs of a share, about; its begin is a multiple of GRAIN
_FILES = (dot_tiles.__file__, pairs.__file__, vectors.__file__)
# Words of a plan before its units, and of a unit.
_HEAD, _UNIT = 3, 8
_FIRST, _COLUMNS, _ROWS, _COUNT, _PART, _BEFORE, _LOW, _DONE = range(_UNIT)


def takes(a: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `add_low_rank` supports these A matrices of adapters, [columns, parts, in]."""
    if a.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    return a.shape[2] % (LINE // a.dtype.itemsize) == 0 and a.shape[0] % COLUMNS == 0


def add_low_rank(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: Sequence[jax.Array],
    numbers: jax.Array,
    owner: jax.Array,
) -> jax.Array:
    """See `low_rank.add_low_rank`; if `takes`, on one CPU device."""
    call = jax.ffi.ffi_call(
        target(wide=a.dtype == jnp.float32),
        jax.ShapeDtypeStruct(y.shape, jnp.float32),
        input_output_aliases={0: 0},
        vmap_method="sequential",
    )
    return call(y, x.astype(a.dtype), numbers, owner, a, *b)


@numba_ffi.compiled_once
def target(*, wide: bool) -> str:
    """The name of the kernel, which is compiled at the first call. Operands: y, which the result
    overwrites; x; numbers; owner; a; and b of each part. wide: whether x and both factors are
    float32, else bfloat16."""
    bits = 32 if wide else 16

    @njit(**numba_ffi.INLINE)
    def share(given: Any, about: int, i: int) -> None:
        units, lows, ups = numba_ffi.words(about, _HEAD)
        first = i < units * lows
        pieces = lows if first else ups
        i = i if first else i - units * lows
        at = about + 8 * (_HEAD + i // pieces * _UNIT)
        unit = numba_ffi.words(at, _UNIT)
        columns, count, part = unit[_COLUMNS], unit[_COUNT], unit[_PART]
        rows = numba_ffi.words(unit[_ROWS], count)
        if first:
            _, parts, depth = numba_ffi.dims(given[4], 3)
            row = depth * bits // 8
            x_at = numba_ffi.data_address(given[1])
            a_at = numba_ffi.data_address(given[4]) + (unit[_FIRST] * parts + part) * row
            each = (columns // 4 + pieces - 1) // pieces * 4
            for c in range(i % pieces * each, min(columns, (i % pieces + 1) * each), 4):
                for r in range(count):
                    dot_tiles.tile(
                        bits, 1, 4, 0, 0, 0, x_at + rows[r] * row, 0, a_at + c * parts * row,
                        parts * row, row // LINE, 0, 0, 0, 1, 1,
                        a_at + (c + 4) * parts * row, 4 * LINE,
                        unit[_LOW] + 4 * (r * columns + c), 0,
                    )  # fmt: skip
            numba_ffi.fetch_add(at + 8 * _DONE, 1)
            return
        outputs, width = numba_ffi.dims(given[5 + part], 2)[1], numba_ffi.dims(given[0], 2)[1]
        size = bits // 8
        b_at = numba_ffi.data_address(given[5 + part]) + unit[_FIRST] * outputs * size
        y_at = numba_ffi.data_address(given[len(given) - 1]) + 4 * unit[_BEFORE]
        each = ((outputs + pieces - 1) // pieces + GRAIN - 1) // GRAIN * GRAIN
        begin, end = i % pieces * each, min(outputs, (i % pieces + 1) * each)
        # Several rows go by blocks that stay in a cache; a single row reads memory in longer
        # pieces.
        block = OUTPUTS if count > 2 else each
        while numba_ffi.fetch_add(at + 8 * _DONE, 0) < lows:
            numba_ffi.sched_yield()
        for j in range(begin, end, block):
            mine = min(block, end - j)
            for c in range(0, columns, COLUMNS):
                for r in range(count):
                    _add(
                        y_at + 4 * (rows[r] * width + j),
                        unit[_LOW] + 4 * (r * columns + c),
                        b_at + (c * outputs + j) * size,
                        outputs * size,
                        mine,
                        np.float32 if wide else np.uint16,
                    )

    name = f"jaxserve_low_rank_{bits}"
    return numba_ffi.register(name, _plan, share, __file__, *_FILES)


@njit(**numba_ffi.INLINE)
def _add(y_at: int, low_at: int, b_at: int, b_row: int, n: int, kind: Any) -> None:
    """y [n] += low [COLUMNS] @ b [COLUMNS, n], by their addresses. b_row: bytes from one row of b
    to the next; kind: type of its numbers."""
    y = carray(numba_ffi.pointer(y_at), (n,), np.float32)
    low = carray(numba_ffi.pointer(low_at), (COLUMNS,), np.float32)
    b0, b1 = _row(b_at, 0, b_row, n, kind), _row(b_at, 1, b_row, n, kind)
    b2, b3 = _row(b_at, 2, b_row, n, kind), _row(b_at, 3, b_row, n, kind)
    b4, b5 = _row(b_at, 4, b_row, n, kind), _row(b_at, 5, b_row, n, kind)
    b6, b7 = _row(b_at, 6, b_row, n, kind), _row(b_at, 7, b_row, n, kind)
    l0, l1, l2, l3 = low[0], low[1], low[2], low[3]
    l4, l5, l6, l7 = low[4], low[5], low[6], low[7]
    for j in range(n):
        here = l0 * vectors.widened(b0[j]) + l1 * vectors.widened(b1[j])
        here += l2 * vectors.widened(b2[j]) + l3 * vectors.widened(b3[j])
        here += l4 * vectors.widened(b4[j]) + l5 * vectors.widened(b5[j])
        here += l6 * vectors.widened(b6[j]) + l7 * vectors.widened(b7[j])
        y[j] += here


@njit(**numba_ffi.INLINE)
def _row(at: int, k: int, size: int, n: int, kind: Any) -> Any:
    return carray(numba_ffi.pointer(at + k * size), (n,), kind)


@njit(**numba_ffi.OPTIONS)
def _plan(given: Any) -> Any:
    """The number of shares, and the address of their plan: number of units, and pieces of both
    products; the units; the rows with an adapter, by adapter; and room for the low-rank values."""
    numbers, owner = numba_ffi.int32s(given[2]), numba_ffi.int32s(given[3])
    parts = numba_ffi.dims(given[4], 3)[1]
    granules = len(owner) // COLUMNS
    # Two passes over the columns: the first measures the room, the second fills it.
    address, units, listed, values, widest = 0, 0, 0, 0, COLUMNS
    rows_at, low_at = 0, 0
    for turn in range(2):
        if turn == 1:
            if units == 0:
                return 0, 0
            rows_at = 8 * (_HEAD + units * _UNIT)
            low_at = rows_at + 8 * listed
            address = numba_ffi.allocate((low_at + 4 * values) // 8 + 1)
            rows_at, low_at = address + rows_at, address + low_at
        units, listed, values, g = 0, 0, 0, 0
        while g < granules:
            number, first = owner[g * COLUMNS], g
            while g < granules and owner[g * COLUMNS] == number:
                g += 1
            columns, count = (g - first) * COLUMNS, 0
            if number == 0:
                continue
            widest = max(widest, columns)
            for row in range(len(numbers)):
                if numbers[row] == number:
                    if turn == 1:
                        numba_ffi.words(rows_at + 8 * (listed + count), 1)[0] = row
                    count += 1
            for begin in range(0, count, MOST_ROWS):
                some, before = min(MOST_ROWS, count - begin), 0
                for part in range(parts):
                    if turn == 1:
                        unit = numba_ffi.words(address + 8 * (_HEAD + units * _UNIT), _UNIT)
                        unit[_FIRST], unit[_COLUMNS] = first * COLUMNS, columns
                        unit[_ROWS], unit[_COUNT] = rows_at + 8 * (listed + begin), some
                        unit[_PART], unit[_BEFORE] = part, before
                        unit[_LOW], unit[_DONE] = low_at + 4 * values, 0
                        before += numba_ffi.dims(given[5 + part], 2)[1]
                    units, values = units + 1, values + some * columns
            listed += count
    wanted = (2 * numba_ffi.threads() + units - 1) // units
    outputs = numba_ffi.dims(given[0], 2)[1] // parts
    head = numba_ffi.words(address, _HEAD)
    head[0] = units
    head[1] = min(wanted, widest // 4)
    head[2] = min(wanted, max(1, outputs // FEWEST))
    return units * (head[1] + head[2]), address
