"""Data that the parts of a product's kernel share: its form, and the work of a share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.cpu.amx import plan
from jaxserve.pallas_kernels.cpu.amx.instructions import BYTES, DEPTH, SIDE
from jaxserve.pallas_kernels.cpu.pairs import LINE

STEP = 12  # times DEPTH inputs are laid out at once for many rows: 24 KB


class Form(NamedTuple):
    """The form of a kernel: numbers that are constants in its code.

    Attributes:
        bits: Bits of a weight.
        few: 1 for quantised weights, which have scales.
        tiles: Tiles for DEPTH inputs of a block: 2 if x is float32.
        beside: 1 if there are zero points or minimums beside the scales.
        points: 1 for zero points.
        lead: 1 if groups of rows have weights of their own.
    """

    bits: int
    few: int
    tiles: int
    beside: int
    points: int
    lead: int


class Work(NamedTuple):
    """What a share needs to know of its part. All are int; arrays are given by their addresses.

    Attributes:
        rows: Rows of the part.
        columns: Columns of B and C.
        pairs: Pairs of blocks, 32 rows each.
        x: The laid-out rows.
        block: Bytes of 16 laid-out rows.
        tile: Bytes of B or C.
        steps: Steps of DEPTH inputs.
        groups: Groups of inputs.
        a_group: Steps of a group.
        weights: Weights of the part's group of rows.
        row: Bytes of an output's weights.
        scale: Scales, as they are stored.
        least: Zero points or minimums, as they are stored.
        out: The part's results.
        laid_out: A of 32 outputs, two for each step.
        sums: [pairs, blocks, sides] of C, added up.
        unfinished: The same for unfinished groups.
        c: C of one pair.
        places: See `layout.add_scaled`.
        scales: Scales of 32 outputs, [sides, groups, 16].
        leasts: Minimums, likewise.
        products: Minimums computed from zero points, in the order of the scales.
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
    """A jitted function (operands, address of the plan, number of the part) -> Work, and the
    address of its memory."""
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
