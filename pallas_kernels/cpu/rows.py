"""Products of a few rows with weights [in, out] of bfloat16 on CPUs, by numba: the weights are read
once, as they are, by all cores, while XLA's CPU compiler converts all of them first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi, tiles

MOST_ROWS = 4
SHARE, MOST_SHARES = 1 << 18, 64  # bytes of weights that a share reads, about
LINE = 64  # bytes that vectors of sums begin with, so that none lies in two


def takes(rows: int, weights: jax.Array, *, transposed: bool) -> bool:
    """Whether `skinny_matmul` supports the product of this many rows with these weights."""
    if transposed or weights.dtype != jnp.bfloat16:
        return False
    depth, columns = weights.shape
    return rows <= MOST_ROWS and depth % tiles.TOGETHER == columns % tiles.PAIRS == 0


def skinny_matmul(x: jax.Array, weights: jax.Array, *, transposed: bool) -> jax.Array:
    """x [T, in] @ weights [in, out] -> float32 [T, out], if `takes`. Both of bfloat16, on one CPU
    device. Sums are in float32."""
    assert not transposed
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(target(), result, vmap_method="sequential")(x, weights)


@numba_ffi.compiled_once
def target() -> str:
    """The name of the kernel, compiled if it is the first time."""
    name = "jaxserve_skinny_matmul"
    return numba_ffi.register(name, _plan_add_up, _add_up, __file__, tiles.__file__)


@njit(**numba_ffi.OPTIONS)
def _shares(lines: int, grain: int, size: int) -> Any:
    """Lines of weights, of so many bytes each, are shared out in multiples of `grain`: (number of
    shares, lines of each but the last, which may have fewer)."""
    wanted = min(MOST_SHARES, max(1, lines * size // SHARE))
    each = max(1, (lines // wanted + grain - 1) // grain) * grain
    return (lines + each - 1) // each, each


@njit(**numba_ffi.OPTIONS)
def _plan_add_up(given: Any) -> Any:
    """Whatever all shares know: how many are done, and the sums of each."""
    count = numba_ffi.dims(given[0], 2)[0]
    depth, columns = numba_ffi.dims(given[1], 2)
    shares = _shares(depth, tiles.TOGETHER, 2 * columns)[0]
    address = numba_ffi.allocate((2 * LINE + tiles.BYTES * shares * count * columns) // 8)
    numba_ffi.words(address, 1)[0] = 0
    return shares, address


@njit(**numba_ffi.FAST)
def _add_up(given: Any, address: int, i: int) -> None:
    """Share i of weights [in, out]: some of their rows, times a number each, added up. So each
    share reads memory from one end to the other. Whoever is last adds the shares' sums, in
    order."""
    count, depth = numba_ffi.dims(given[0], 2)
    columns = numba_ffi.dims(given[1], 2)[1]
    x = carray(numba_ffi.data(given[0]), (count, depth), np.uint16)
    shares, each = _shares(depth, tiles.TOGETHER, 2 * columns)
    first = i * each
    mine = min(each, depth - first)
    sums_at = (address + 8 + LINE - 1) // LINE * LINE
    sums = carray(numba_ffi.pointer(sums_at), (shares, count, columns), np.float32)
    wide = np.empty((count, mine), np.float32)
    for row in range(count):
        for k in range(mine):
            wide[row, k] = tiles.widened(x[row, first + k])
    sums[i] = 0
    row_at, x_row, next_row = tiles.BYTES * columns, tiles.BYTES * mine, 2 * columns
    at = sums_at + i * count * row_at
    begin_at = numba_ffi.data_address(given[1]) + first * next_row
    for k in range(0, mine, tiles.TOGETHER):
        x_at, where = wide.ctypes.data + tiles.BYTES * k, begin_at + k * next_row
        if count == 1:
            tiles.add_rows_1(at, row_at, x_at, x_row, where, next_row, columns)
        elif count == 2:
            tiles.add_rows_2(at, row_at, x_at, x_row, where, next_row, columns)
        elif count == 3:
            tiles.add_rows_3(at, row_at, x_at, x_row, where, next_row, columns)
        else:
            tiles.add_rows_4(at, row_at, x_at, x_row, where, next_row, columns)
    if numba_ffi.fetch_add(address, 1) < shares - 1:
        return
    out = carray(numba_ffi.data(given[2]), (count, columns), np.float32)
    for row in range(count):
        for other in range(1, shares):
            for j in range(columns):
                sums[0, row, j] += sums[other, row, j]
        for j in range(0, columns, tiles.PAIRS):
            for lane in range(tiles.LANES):
                out[row, j + 2 * lane] = sums[0, row, j + lane]
                out[row, j + 2 * lane + 1] = sums[0, row, j + tiles.LANES + lane]
