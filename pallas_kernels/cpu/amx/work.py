"""What the parts of a kernel of products share: what it is made for, and what a share works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.cpu.amx import plan
from jaxserve.pallas_kernels.cpu.amx.instructions import BYTES, DEPTH, SIDE
from jaxserve.pallas_kernels.cpu.pairs import LINE

STEP = 12  # times DEPTH inputs, whose weights are laid out at once for many rows: 24 KB


class Form(NamedTuple):
    """What a kernel is made for: numbers that are constants in its code.

    Attributes:
        bits: Of a weight.
        few: 1 for few bits, which have scales.
        tiles: Of a block's DEPTH inputs: 2 where x is float32.
        beside: 1 where there are zero points or minimums beside the scales.
        points: 1 for zero points.
        lead: 1 where groups of rows have weights of their own.
    """

    bits: int
    few: int
    tiles: int
    beside: int
    points: int
    lead: int


class Work(NamedTuple):
    """What a share needs to know of its part. All are int; addresses are of what is named.

    Attributes:
        rows: Of the part.
        columns: Of B and C.
        pairs: Of blocks, 32 rows.
        x: The rows as they are laid out.
        block: Bytes of 16 rows there.
        tile: Bytes of B or C.
        steps: DEPTH inputs each.
        groups: Of inputs.
        a_group: Steps of a group.
        weights: Of the part's group of rows.
        row: Bytes of an output's weights.
        scale: Scales, as they are stored.
        least: Zero points or minimums, as they are stored.
        out: The part's results.
        laid_out: A of 32 outputs, two for each step.
        sums: [pairs, blocks, sides] of C, added up.
        unfinished: The same of groups that go on.
        c: C of one pair.
        places: See `layout.add_scaled`.
        scales: Of 32 outputs, [sides, groups, 16].
        leasts: Minimums, likewise.
        products: Minimums made of zero points, as scales are stored.
    """

    rows: int
    columns: int
    pairs: int
    x: int
    block: int
    tile: int
    steps: int
    groups: int
    a_group: int
    weights: int
    row: int
    scale: int
    least: int
    out: int
    laid_out: int
    sums: int
    unfinished: int
    c: int
    places: int
    scales: int
    leasts: int
    products: int


def preparing(form: Form) -> Any:
    """(Operands, address of the plan, number of the part) -> Work, and the address of its memory.
    Jitted."""
    bits, few, tiles, beside, points, lead = form
    least_size = 1 if points else 4

    @njit(**numba_ffi.OPTIONS)
    def prepare(given: Any, about: int, number: int) -> Any:
        groups = plan.head(about)[plan.GROUPS]
        depth, outputs = numba_ffi.dims(given[0], 2)[1], numba_ffi.dims(given[1], 2 + lead)[lead]
        group, first, rows, x = plan.part(about, number)
        steps, columns = depth // DEPTH, min(rows, SIDE)
        pairs_of_blocks, tile = (rows + 2 * SIDE - 1) // (2 * SIDE), columns * LINE
        row, block = depth * bits // 8, steps * tiles * tile + beside * groups * 4 * columns
        weights = numba_ffi.data_address(given[1]) + group * outputs * row
        out = numba_ffi.data_address(given[len(given) - 1]) + 4 * first * outputs
        scale = least = 0
        if few:
            scale = numba_ffi.data_address(given[2]) + 4 * group * outputs * groups
        if beside:
            least = numba_ffi.data_address(given[3]) + least_size * group * outputs * groups
        sums = 2 * BYTES * (STEP if pairs_of_blocks > 1 else few)
        unfinished = sums + few * 4 * tile * pairs_of_blocks
        c = unfinished + 4 * tile * pairs_of_blocks
        places = c + few * 4 * tile
        scales = places + few * 2 * tile
        leasts = scales + few * 2 * groups * LINE
        products = leasts + beside * 2 * groups * LINE
        memory = numba_ffi.allocate((products + points * SIDE * groups * 4 + LINE) // 8)
        at = (memory + LINE - 1) // LINE * LINE
        if few:
            place = carray(numba_ffi.pointer(at + places), (2, SIDE * columns), np.int32)
            for n in range(SIDE * columns):
                place[0, n], place[1, n] = n // columns, n % columns
        return Work(
            rows, columns, pairs_of_blocks, x, block, tile, steps, groups, steps // groups,
            weights, row, scale, least, out, at, at + sums, at + unfinished, at + c, at + places,
            at + scales, at + leasts, at + products,
        ), memory  # fmt: skip

    return prepare
