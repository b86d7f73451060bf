"""How a product on AMX is cut into shares: first shares that lay out rows for all others, then
shares that multiply a part of the rows with the weights of some outputs, then shares for rows of no
group."""

from __future__ import annotations

from typing import Any

from numba import njit

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.cpu.amx.instructions import DEPTH, SIDE
from jaxserve.pallas_kernels.cpu.pairs import LINE

OUTPUTS = 2 * SIDE  # outputs, and rows, that are multiplied at once
ROWS = 1 << 20  # laid-out bytes of a part's rows, about: fits a core's cache
SHARE = 1 << 19  # bytes of a share's weights, about
TAIL = 64  # rows of no group that a share fills with zeros
# Words of the plan: number of shares that lay out rows, and how many are done; pieces that a part's
# inputs are cut into for that; parts, shares of each part, outputs of a share; the first row of no
# group; groups of inputs that have scales of their own.
PACKS, _DONE, CUTS, PARTS, SHARES, EACH, START, GROUPS = range(8)
_HEAD, _PART = 8, 4  # then each part's group, first row, rows, and their address


@njit(**numba_ffi.OPTIONS)
def head(address: int) -> Any:
    """The words that all shares need, see above."""
    return numba_ffi.words(address, _HEAD)


@njit(**numba_ffi.OPTIONS)
def part(address: int, number: int) -> Any:
    """Group, first row and rows of a part, and the address where they are laid out: blocks of 16
    rows by DEPTH inputs, one after the other."""
    return numba_ffi.words(address + 8 * (_HEAD + _PART * number), _PART)


@njit(**numba_ffi.OPTIONS)
def plan(given: Any, bits: int, lead: int, tiles: int, beside: int) -> Any:
    """The number of shares, and the address of what they need to know.

    Args:
        given: Operands and result.
        bits: Bits of a weight.
        lead: 1 if groups of rows have weights of their own.
        tiles: Number of tiles for 16 rows by DEPTH inputs.
        beside: 1 if sums of each group of inputs are needed.
    """
    count, depth = numba_ffi.dims(given[0], 2)
    shape, steps, threads = numba_ffi.dims(given[1], 2 + lead), depth // DEPTH, numba_ffi.threads()
    number, outputs = shape[0] if lead else 1, shape[lead]
    groups = numba_ffi.dims(given[2], 2 + lead)[1 + lead] if bits < 16 else 1
    size = steps * tiles * LINE + beside * groups * 4  # bytes of a row
    most = max(OUTPUTS, ROWS // size // OUTPUTS * OUTPUTS)  # rows of a part
    parts_at_most = count // most + min(number, count)
    words = _HEAD + (_PART + LINE // 8) * parts_at_most
    # Fewer than 16 rows are not padded; more are rounded up to a multiple of 16, which is less than
    # twice as many.
    address = numba_ffi.allocate(words + 2 * count * size // 8 + 8)
    to = address + 8 * (_HEAD + _PART * parts_at_most)
    parts, start = 0, 0
    for group in range(number):
        rows = numba_ffi.int32s(given[len(given) - 2])[group] if lead else count
        cuts = (rows + most - 1) // most
        for cut in range(cuts):
            each = ((rows + cuts - 1) // cuts + OUTPUTS - 1) // OUTPUTS * OUTPUTS
            mine = min(each, rows - cut * each)
            to = (to + LINE - 1) // LINE * LINE
            about = part(address, parts)
            about[0], about[1], about[2], about[3] = group, start + cut * each, mine, to
            parts, to = parts + 1, to + size * (mine if mine < SIDE else -(-mine // SIDE) * SIDE)
        start += rows
    shares = max((2 * threads - 1) // max(parts, 1) + 1, outputs * depth * bits // 8 // SHARE)
    each = ((outputs + shares - 1) // shares + OUTPUTS - 1) // OUTPUTS * OUTPUTS
    shares = (outputs + each - 1) // each
    about, cuts = head(address), min(groups if beside else steps, threads)
    about[PACKS], about[_DONE], about[CUTS], about[PARTS] = parts * cuts, 0, cuts, parts
    about[SHARES], about[EACH], about[START], about[GROUPS] = shares, each, start, groups
    return parts * (cuts + shares) + (count - start + TAIL - 1) // TAIL, address


@njit(**numba_ffi.OPTIONS)
def laid_out(address: int) -> None:
    """Counts a share that has laid out its rows."""
    numba_ffi.fetch_add(address + 8 * _DONE, 1)


@njit(**numba_ffi.OPTIONS)
def wait(address: int) -> None:
    """Waits until all rows are laid out; other threads have taken those shares."""
    while numba_ffi.fetch_add(address + 8 * _DONE, 0) < head(address)[PACKS]:
        numba_ffi.sched_yield()
