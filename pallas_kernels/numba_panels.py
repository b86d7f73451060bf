"""Products of some tens of rows with weights of bfloat16 on CPUs, compiled by numba.

XLA's library lays the weights out anew for each product, by itself and before it multiplies, which
takes as long as multiplying so few rows. Here each panel of columns is laid out by whoever
multiplies it, block by block, in its core's cache.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels import numba_ffi, numba_pairs
from jaxserve.pallas_kernels.numba_ffi import (
    FAST,
    address_of,
    allocate,
    begin,
    copy,
    data_address,
    dims,
    done,
    finish,
    free,
    operands,
    pointer,
    take,
)
from jaxserve.pallas_kernels.numba_pairs import (
    LANES,
    LINE,
    TILE_COLUMNS,
    TILE_ROWS,
    add_pairs_1,
    add_pairs_2,
    has_pairs,
    interleave,
    transpose,
)

MOST_ROWS = 128
DEPTH = 64
PANEL = 128  # columns of a share
FEW = 16  # shares, below which they are halved

_lock = threading.Lock()  # steps are compiled by several threads


def takes(rows: int, weights: jax.Array, *, transposed: bool) -> bool:
    """Whether `panels` has the product of so many rows with these weights."""
    depth, columns = weights.shape[::-1] if transposed else weights.shape
    whole = depth % (2 * LANES if transposed else 2) == columns % TILE_COLUMNS == 0
    return rows <= MOST_ROWS and weights.dtype == jnp.bfloat16 and whole and has_pairs()


def panels(x: jax.Array, weights: jax.Array, *, transposed: bool) -> jax.Array:
    """x [T, in] @ weights [in, out] -> float32 [T, out], that `takes`, both of bfloat16, on one CPU
    device. transposed: the weights are [out, in]. Sums are in float32."""
    columns = weights.shape[0 if transposed else 1]
    call = jax.ffi.ffi_call(
        target(transposed=transposed),
        jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32),
        vmap_method="sequential",
    )
    return call(x, weights)


def target(*, transposed: bool) -> str:
    """The name of the kernel, compiled if it is the first time. Operands: x [T, in] and weights
    [in, out], transposed: [out, in], of bfloat16; result: [T, out], float32."""
    with _lock:
        return _registered(transposed)


@functools.cache
def _registered(transposed: bool) -> str:
    name = f"jaxserve_panels_{'transposed' if transposed else 'straight'}"
    symbol = numba_ffi.task_symbol(name)
    digest = numba_ffi.digest(__file__, numba_pairs.__file__)

    def handler(frame: int) -> int:
        len(digest)
        block = begin(frame)
        if block == 0:
            return 0
        columns = dims(operands(block)[2], 2)[1]
        return finish(frame, block, (columns + PANEL - 1) // PANEL, 0, address_of(symbol))

    def task(block: int) -> int:
        len(digest)
        i = take(block)
        while i >= 0:
            _panel(operands(block), i, transposed)
            done(block)
            i = take(block)
        return 0

    numba_ffi.register(name, handler, task)
    return name


@njit(**FAST)
def _panel(given: Any, i: int, transposed: bool) -> None:
    """Share i: PANEL columns of the result, or what is left of them."""
    count, depth = dims(given[0], 2)
    columns = dims(given[2], 2)[1]
    x_at, weights_at = data_address(given[0]), data_address(given[1])
    out_at = data_address(given[2]) + 4 * i * PANEL
    weights_at += 2 * i * PANEL * (depth if transposed else 1)
    mine = min(PANEL, columns - i * PANEL)
    padded = (count + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    row_bytes = 4 * mine  # of sums, and of pairs of numbers of 16 bits
    memory = allocate((padded * (row_bytes + 2 * DEPTH) + DEPTH // 2 * row_bytes + LINE) // 8)
    sums_at = (memory + LINE - 1) // LINE * LINE
    packed_at = sums_at + padded * row_bytes
    some_at = packed_at + DEPTH // 2 * row_bytes
    carray(pointer(sums_at), (padded * mine,), np.float32)[:] = np.float32(0)
    carray(pointer(some_at), (padded * DEPTH,), np.uint16)[:] = np.uint16(0)
    for k in range(0, depth, DEPTH):
        deep = min(DEPTH, depth - k)
        for row in range(count):
            copy(some_at + 2 * row * DEPTH, x_at + 2 * (row * depth + k), 2 * deep)
        row_at, next_row = weights_at + 2 * k * columns, 2 * columns
        if transposed:
            row_at, next_row = weights_at + 2 * k, 2 * depth
        _pack(row_at, next_row, packed_at, row_bytes, mine, deep, transposed)
        ahead = row_at + (2 * DEPTH if transposed else DEPTH * next_row)
        if k + DEPTH >= depth:
            ahead, next_row = packed_at, 0
        _add(
            sums_at, some_at, packed_at, row_bytes, padded, mine, deep, ahead, next_row, transposed
        )
    for row in range(count):
        copy(out_at + 4 * row * columns, sums_at + row * row_bytes, row_bytes)
    free(memory)


@njit(**FAST)
def _pack(
    at: int, next_row: int, packed_at: int, packed_row: int, mine: int, deep: int, transposed: bool
) -> None:
    """Weights from an address on, [deep, mine], transposed [mine, deep], as pairs."""
    if transposed:
        for j in range(0, mine, LANES):
            for k in range(0, deep, 2 * LANES):
                to = packed_at + k // 2 * packed_row + 4 * j
                transpose(at + j * next_row + 2 * k, next_row, to, packed_row)
    else:
        for k in range(0, deep, 2):
            row_at, to = at + k * next_row, packed_at + k // 2 * packed_row
            for j in range(0, mine, TILE_COLUMNS):
                interleave(row_at + 2 * j, row_at + next_row + 2 * j, to + 4 * j)


@njit(**FAST)
def _add(
    sums_at: int, x_at: int, packed_at: int, row_bytes: int, rows: int, mine: int, deep: int,
    ahead: int, next_row: int, transposed: bool,
) -> None:  # fmt: skip
    """sums [rows, mine] += x [rows, DEPTH] @ packed. Meanwhile as many weights are fetched from
    `ahead` on, a line or two with every pair; next_row 0: there are none, it is packed itself."""
    step, other = (next_row, LINE) if transposed else (2 * next_row, next_row)
    if next_row == 0:
        step, other = 0, 0
    for row in range(0, rows, TILE_ROWS):
        for j in range(0, mine, TILE_COLUMNS):
            sums_here, x_here = sums_at + row * row_bytes + 4 * j, x_at + 2 * row * DEPTH
            packed_here = packed_at + 4 * j
            ahead_here = ahead + j * (next_row if transposed else 2)
            if rows == TILE_ROWS:
                add_pairs_2(
                    sums_here, row_bytes, x_here, 2 * DEPTH, packed_here, row_bytes, deep // 2,
                    ahead_here, step, other,
                )  # fmt: skip
            else:
                add_pairs_1(
                    sums_here, row_bytes, x_here, 2 * DEPTH, packed_here, row_bytes, deep // 2,
                    ahead_here + row // TILE_ROWS % 2 * other, step, 0,
                )  # fmt: skip
