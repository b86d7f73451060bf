"""Scales, zero points and minimums of quantised weights: how they are laid out and applied to C."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.cpu.amx import layout
from jaxserve.pallas_kernels.cpu.amx.instructions import SIDE
from jaxserve.pallas_kernels.cpu.amx.work import Form, Work
from jaxserve.pallas_kernels.cpu.pairs import LINE


@njit(**numba_ffi.OPTIONS)
def turn_scales(at: int, groups: int, to: int) -> None:
    """[16 outputs, groups] of float32 -> [groups, 16]."""
    for n in range(0, groups, SIDE):
        group = max(min(n, groups - SIDE), 0)  # the last may overlap the ones before
        here, there = at + 4 * group, to + group * LINE
        if groups >= SIDE:  # without masks
            layout.turn(here, 4 * groups, SIDE, SIDE, there, LINE, SIDE)
        else:
            layout.turn(here, 4 * groups, SIDE, groups, there, LINE, SIDE)


@njit(**numba_ffi.OPTIONS)
def multiply_points(points: int, scale: int, count: int, to: int) -> None:
    """Turns zero points into minimums.

    Args:
        points: Address of int8 zero points.
        scale: Address of their float32 scales.
        count: Number of zero points.
        to: Address of the float32 minimums.
    """
    given = carray(numba_ffi.pointer(points), (count,), np.int8)
    factors = carray(numba_ffi.pointer(scale), (count,), np.float32)
    found = carray(numba_ffi.pointer(to), (count,), np.float32)
    for i in range(count):
        found[i] = -np.float32(given[i]) * factors[i]


def laying_out(form: Form) -> Any:
    """A jitted function (work, first output of the first side, of the second): lays out scales and
    minimums of both sides by group."""
    beside, points = form.beside, form.points

    @njit(**numba_ffi.OPTIONS)
    def lay_out_scales(w: Work, low: int, high: int) -> None:
        for side in range(2):
            count, to = (high if side else low) * w.groups, side * w.groups * LINE
            turn_scales(w.scale + 4 * count, w.groups, w.scales + to)
            if points:
                multiply_points(w.least + count, w.scale + 4 * count, SIDE * w.groups, w.products)
                turn_scales(w.products, w.groups, w.leasts + to)
            elif beside:
                turn_scales(w.least + 4 * count, w.groups, w.leasts + to)

    return lay_out_scales


def finishing(form: Form) -> Any:
    """A jitted function (work, group of inputs, pair of blocks, whether both are there, C in
    memory): adds the group's result to the sums."""
    beside = form.beside

    @njit(**numba_ffi.INLINE)
    def finish(w: Work, group: int, pair: int, two: bool, c: int) -> None:
        sums = w.sums + 4 * pair * w.tile
        for n in range(4 if two else 2):
            of = (n % 2 * w.groups + group) * LINE
            block_at = w.x + (2 * pair + n // 2) * w.block
            inputs = block_at + w.block - (w.groups - group) * 4 * w.columns
            layout.add_scaled(
                beside, group == 0, c + n * w.tile, w.columns, sums + n * w.tile, w.scales + of,
                w.leasts + of, inputs, w.places,
            )  # fmt: skip

    return finish
