"""Multiplies two sides, 16 outputs each, with the rows of a part: A of the sides are in AMX's
registers 4 and 5, B of two blocks of rows in 6 and 7, for C see `registers`."""

from __future__ import annotations

from typing import Any

from numba import njit

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.pallas_kernels.cpu.amx import instructions, layout
from jaxserve.pallas_kernels.cpu.amx.instructions import BYTES, DEPTH, SIDE
from jaxserve.pallas_kernels.cpu.amx.registers import clear, load, store
from jaxserve.pallas_kernels.cpu.amx.scales import finishing
from jaxserve.pallas_kernels.cpu.amx.work import STEP, Form, Work
from jaxserve.pallas_kernels.cpu.pairs import LINE


def few_rows_of(form: Form) -> Any:
    """A jitted function (work, first output of the first side, of the second), for up to 32
    rows."""
    bits, few, tiles = form.bits, form.few, form.tiles
    line = DEPTH * bits // 8  # bytes of an output's DEPTH weights
    multiply, finish = _multiplying(tiles), finishing(form)

    @njit(**numba_ffi.INLINE)
    def few_rows(w: Work, low: int, high: int) -> None:
        # Sums stay in registers. Quantised weights are laid out just before they are multiplied,
        # 16-bit weights are multiplied in place.
        low, high = w.weights + low * w.row, w.weights + high * w.row
        two, group, left, c, before = w.rows > SIDE, 0, w.a_group, w.c, w.unfinished
        clear(two)
        for k in range(w.steps):
            x, more = w.x + k * tiles * w.tile, w.block if two else 0
            if few:
                layout.lay_out(bits, low + k * line, w.row, w.laid_out)
                layout.lay_out(bits, high + k * line, w.row, w.laid_out + BYTES)
                multiply(w.laid_out, w.laid_out + BYTES, LINE, x, w.columns, more)
            else:
                multiply(low + k * line, high + k * line, w.row, x, w.columns, more)
            left -= 1
            if few and left == 0:
                store(c, w.columns, two)
                # One group later, since vectors would otherwise wait until C's short rows are in
                # the cache.
                if group > 0:
                    finish(w, group - 1, 0, two, before)
                clear(two)
                group, left, c, before = group + 1, w.a_group, before, c
        if few:
            finish(w, group - 1, 0, two, before)
        else:
            store(w.sums, w.columns, two)

    return few_rows


def many_rows_of(form: Form) -> Any:
    """A jitted function (work, first output of the first side, of the second), for more rows."""
    bits, few, tiles = form.bits, form.few, form.tiles
    line = DEPTH * bits // 8
    multiply, finish = _multiplying(tiles), finishing(form)

    @njit(**numba_ffi.INLINE)
    def many_rows(w: Work, low: int, high: int) -> None:
        # Weights of STEP times DEPTH inputs stay in the cache, and so do sums.
        low, high = w.weights + low * w.row, w.weights + high * w.row
        for k in range(0, w.steps, STEP):
            stop = min(k + STEP, w.steps)
            for n in range(k, stop):
                to = w.laid_out + 2 * (n - k) * BYTES
                layout.lay_out(bits, low + n * line, w.row, to)
                layout.lay_out(bits, high + n * line, w.row, to + BYTES)
            for pair in range(w.pairs):
                two, unfinished = w.rows > (2 * pair + 1) * SIDE, w.unfinished + 4 * pair * w.tile
                more, x = w.block if two else 0, w.x + 2 * pair * w.block
                begin, group = k, k // w.a_group
                while begin < stop:
                    end = min(stop, (group + 1) * w.a_group)
                    if begin == group * w.a_group:
                        clear(two)
                    else:
                        load(unfinished, w.columns, two)
                    for n in range(begin, end):
                        at = w.laid_out + 2 * (n - k) * BYTES
                        multiply(at, at + BYTES, LINE, x + n * tiles * w.tile, w.columns, more)
                    begin, group = end, group + 1
                    if few and end == group * w.a_group:
                        store(w.c, w.columns, two)
                        finish(w, group - 1, pair, two, w.c)
                    else:
                        store(unfinished, w.columns, two)

    return many_rows


def _multiplying(tiles: int) -> Any:
    @njit(**numba_ffi.INLINE)
    def multiply(low: int, high: int, row: int, x: int, columns: int, more: int) -> None:
        """Adds the products of 32 outputs' weights with up to 16 rows to registers 0 and 1.

        Args:
            low, high: Addresses of the weights of both sides.
            row: Bytes from one output's weights to the next one's.
            x: Address of the laid-out rows.
            columns: Number of rows.
            more: Bytes from there to a second block, whose products go to registers 2 and 3; 0:
                there is none.
        """
        x_row = 4 * columns
        instructions.load(4, low, row)
        instructions.load(5, high, row)
        for _ in range(tiles):
            instructions.load(6, x, x_row)
            instructions.multiply(0, 4, 6)
            instructions.multiply(1, 5, 6)
            if more > 0:
                instructions.load(7, x + more, x_row)
                instructions.multiply(2, 4, 7)
                instructions.multiply(3, 5, 7)
            x += x_row * SIDE

    return multiply
