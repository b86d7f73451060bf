"""C of a pair of blocks of rows, or of one alone, in AMX's registers: 0 and 1 are those of the
first block and of two sides, 16 outputs each, 2 and 3 those of the second."""

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
    """From memory, one tile behind the other."""
    row, tile = 4 * columns, columns * LINE
    instructions.load(0, at, row)
    instructions.load(1, at + tile, row)
    if two:
        instructions.load(2, at + 2 * tile, row)
        instructions.load(3, at + 3 * tile, row)


@njit(**numba_ffi.INLINE)
def store(at: int, columns: int, two: bool) -> None:
    """To memory, likewise."""
    row, tile = 4 * columns, columns * LINE
    instructions.store(0, at, row)
    instructions.store(1, at + tile, row)
    if two:
        instructions.store(2, at + 2 * tile, row)
        instructions.store(3, at + 3 * tile, row)
