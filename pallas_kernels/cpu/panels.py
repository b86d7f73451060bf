"""Products of rows with weights [in, out] of bfloat16 or float32 on CPUs, by numba.

XLA's library lays out the weights again for each product, on one thread and before it multiplies,
which takes as long as multiplying few rows. Here each thread lays out the panel of columns that it
multiplies, block by block, in its core's cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi, pairs, vectors

DEPTH = 32  # words
PANEL = 128  # columns of a share


def takes(rows: int, weights: jax.Array, *, transposed: bool) -> bool:
    """Whether `skinny_matmul` supports the product of this many rows with these weights."""
    depth, columns = weights.shape
    if transposed or columns % pairs.TILE_COLUMNS:
        return False
    if weights.dtype == jnp.float32:
        return pairs.has_vectors()
    return depth % 2 == 0 and weights.dtype == jnp.bfloat16 and pairs.has_pairs()


def skinny_matmul(x: jax.Array, weights: jax.Array, *, transposed: bool) -> jax.Array:
    """x [T, in] @ weights [in, out] -> float32 [T, out], if `takes`. Both of bfloat16 or float32,
    on one CPU device. Sums are in float32."""
    assert not transposed
    name = target(wide=weights.dtype == jnp.float32)
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(name, result, vmap_method="sequential")(x, weights)


@numba_ffi.compiled_once
def target(*, wide: bool) -> str:
    """The name of the kernel, which is compiled at the first call. Operands: x [T, in] and weights
    [in, out] of bfloat16, wide: of float32; result: [T, out], float32."""
    name = f"jaxserve_panels_{32 if wide else 16}"

    @njit(**numba_ffi.INLINE)
    def panel(given: Any, _: int, i: int) -> None:
        _panel(given, i, wide)

    return numba_ffi.register(name, _panels, panel, __file__, pairs.__file__, vectors.__file__)


@njit(**numba_ffi.OPTIONS)
def _panels(given: Any) -> Any:
    return (numba_ffi.dims(given[2], 2)[1] + PANEL - 1) // PANEL, 0


@njit(**numba_ffi.INLINE)
def _panel(given: Any, i: int, wide: bool) -> None:
    """Computes share i: PANEL columns of the result, or the remaining ones. A 32-bit word is one
    number, or two consecutive numbers of a column."""
    a_word = 1 if wide else 2
    count, depth = numba_ffi.dims(given[0], 2)
    words, columns = depth // a_word, numba_ffi.dims(given[2], 2)[1]
    x_at, weights_at = numba_ffi.data_address(given[0]), numba_ffi.data_address(given[1])
    out_at = numba_ffi.data_address(given[2]) + 4 * i * PANEL
    weights_at += i * PANEL * 4 // a_word
    mine = min(PANEL, columns - i * PANEL)
    padded = (count + pairs.TILE_ROWS - 1) // pairs.TILE_ROWS * pairs.TILE_ROWS
    row_bytes = 4 * mine  # of sums, and of words
    memory = numba_ffi.allocate(
        (padded * (row_bytes + 4 * DEPTH) + DEPTH * row_bytes + pairs.LINE) // 8
    )
    sums_at = (memory + pairs.LINE - 1) // pairs.LINE * pairs.LINE
    packed_at = sums_at + padded * row_bytes
    some_at = packed_at + DEPTH * row_bytes
    carray(numba_ffi.pointer(sums_at), (padded * mine,), np.float32)[:] = np.float32(0)
    carray(numba_ffi.pointer(some_at), (padded * DEPTH,), np.uint32)[:] = np.uint32(0)
    next_row = 4 * columns  # from a word's row to the next
    for k in range(0, words, DEPTH):
        deep = min(DEPTH, words - k)
        for row in range(count):
            numba_ffi.copy(some_at + 4 * row * DEPTH, x_at + 4 * (row * words + k), 4 * deep)
        row_at = weights_at + k * next_row
        _pack(row_at, next_row, packed_at, row_bytes, mine, deep, wide)
        ahead = row_at + DEPTH * next_row
        if k + DEPTH >= words:
            ahead = 0
        _add(
            sums_at, some_at, packed_at, row_bytes, padded, mine, deep, ahead, next_row,
            wide,
        )  # fmt: skip
    for row in range(count):
        numba_ffi.copy(out_at + 4 * row * columns, sums_at + row * row_bytes, row_bytes)
    numba_ffi.free(memory)


@njit(**numba_ffi.INLINE)
def _pack(
    at: int, next_row: int, packed_at: int, packed_row: int, mine: int, deep: int, wide: bool
) -> None:  # fmt: skip
    """Packs weights from an address on as words [deep, mine]."""
    if wide:
        for k in range(deep):
            numba_ffi.copy(packed_at + k * packed_row, at + k * next_row, packed_row)
    else:
        for k in range(deep):
            row_at, to = at + k * next_row, packed_at + k * packed_row
            for j in range(0, mine, pairs.TILE_COLUMNS):
                pairs.interleave(row_at + 2 * j, row_at + next_row // 2 + 2 * j, to + 4 * j)


@njit(**numba_ffi.INLINE)
def _add(
    sums_at: int, x_at: int, packed_at: int, row_bytes: int, rows: int, mine: int, deep: int,
    ahead: int, next_row: int, wide: bool,
) -> None:  # fmt: skip
    """sums [rows, mine] += x [rows, DEPTH] @ packed, words. Meanwhile as many weights are
    prefetched from `ahead` on, a line or two with every word; 0: there are none, so `packed` itself
    is prefetched."""
    step, other = next_row, pairs.LINE if wide else next_row // 2
    if ahead == 0:
        ahead, step, other = packed_at, 0, 0
    for row in range(0, rows, pairs.TILE_ROWS):
        for j in range(0, mine, pairs.TILE_COLUMNS):
            sums_here, x_here = sums_at + row * row_bytes + 4 * j, x_at + 4 * row * DEPTH
            packed_here = packed_at + 4 * j
            ahead_here = ahead + (4 if wide else 2) * j
            turn = ahead_here + row // pairs.TILE_ROWS % 2 * other
            given = (sums_here, row_bytes, x_here, 4 * DEPTH, packed_here, row_bytes, deep)
            if wide and rows == pairs.TILE_ROWS:
                pairs.add_numbers_2(*given, ahead_here, step, other)
            elif wide:
                pairs.add_numbers_1(*given, turn, step, 0)
            elif rows == pairs.TILE_ROWS:
                pairs.add_pairs_2(*given, ahead_here, step, other)
            else:
                pairs.add_pairs_1(*given, turn, step, 0)
