"""Lays out the rows of a product on AMX, for all shares that multiply them."""

from __future__ import annotations

from typing import Any

from numba import njit

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.cpu.amx import layout, plan
from jaxserve.pallas_kernels.cpu.amx.instructions import DEPTH, SIDE
from jaxserve.pallas_kernels.cpu.amx.work import Form
from jaxserve.pallas_kernels.cpu.pairs import LINE


def laying_out(form: Form) -> Any:
    """A jitted function (operands, address of the plan, number of the share): lays out some inputs
    of a part's rows as B, in blocks of 16 rows, each followed by the sums of its inputs by group,
    if needed."""
    tiles, beside = form.tiles, form.beside
    wide, number = tiles > 1, 2 * tiles  # bytes of a number of x

    @njit(**numba_ffi.OPTIONS)
    def lay_out_rows(given: Any, about: int, i: int) -> None:
        head, x_row = plan.head(about), numba_ffi.dims(given[0], 2)[1] * number
        _, first, rows, to = plan.part(about, i // head[plan.CUTS])
        steps, columns = x_row // (DEPTH * number), min(rows, SIDE)
        a_group, tile = steps // head[plan.GROUPS], columns * LINE
        cut, cuts, least = i % head[plan.CUTS], head[plan.CUTS], a_group if beside else 1
        whole = steps // least
        begin, stop = cut * whole // cuts * least, (cut + 1) * whole // cuts * least
        halves = numba_ffi.allocate(2 * SIDE * LINE // 8)
        for row in range(0, rows, SIDE):
            x = numba_ffi.data_address(given[0]) + (first + row) * x_row
            some, sums = min(rows - row, SIDE), to + steps * tiles * tile
            for k in range(begin, stop):
                here, here_row = x + k * DEPTH * number, x_row
                for r in range(some if wide else 0):
                    layout.split(here + r * x_row, halves + r * LINE)
                if wide:
                    here, here_row = halves, LINE
                for n in range(tiles):
                    at = to + (k * tiles + n) * tile
                    layout.turn(
                        here + n * SIDE * LINE, here_row, some, SIDE, at, 4 * columns, columns
                    )
                    if beside:
                        sum_at = sums + k // a_group * 4 * columns
                        layout.add_inputs(k % a_group + n == 0, at, columns, sum_at)
            to = sums + beside * head[plan.GROUPS] * 4 * columns
        numba_ffi.free(halves)

    return lay_out_rows
