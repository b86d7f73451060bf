"""C of one or two blocks of rows in AMX's registers: 0 and 1 have the first block, for two sides of
16 outputs each, 2 and 3 the second block."""

from __future__ import annotations

from numba import njit

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.cpu.amx import instructions
from jaxserve.pallas_kernels.cpu.pairs import LINE


@njit(**numba_ffi.INLINE)
def clear(two: bool) -> None:
    """Fills C with zeros."""
    instructions.zero(0)
    instructions.zero(1)
    if two:
        instructions.zero(2)
        instructions.zero(3)


@njit(**numba_ffi.INLINE)
def load(at: int, columns: int, two: bool) -> None:
    """Loads C from memory, one tile after the other."""
    row, tile = 4 * columns, columns * LINE
    instructions.load(0, at, row)
    instructions.load(1, at + tile, row)
    if two:
        instructions.load(2, at + 2 * tile, row)
        instructions.load(3, at + 3 * tile, row)


@njit(**numba_ffi.INLINE)
def store(at: int, columns: int, two: bool) -> None:
    """Stores C to memory, likewise."""
    row, tile = 4 * columns, columns * LINE
    instructions.store(0, at, row)
    instructions.store(1, at + tile, row)
    if two:
        instructions.store(2, at + 2 * tile, row)
        instructions.store(3, at + 3 * tile, row)
