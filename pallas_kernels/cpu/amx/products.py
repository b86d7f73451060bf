"""Products of rows with weights [out, in] on AMX: the weights of `dots` with at most 16 bits, for
any number of rows. The first shares lay out the rows by 16, for all shares. Each other share has
some outputs, by 32: it lays out their weights for some inputs in the cache, and multiplies them
with all rows. A result has a fixed order of sums: 32 inputs at a time, in the order of the
instruction; for float32 the rounded inputs and then the remainders; groups one after the other. No
row affects another's sums. With quantised weights, scales and sums are float32, and weights are
converted to bfloat16 exactly.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu import dot_tiles, numba_ffi, pairs, vectors
from jaxserve.pallas_kernels.cpu.amx import (
    instructions,
    layout,
    plan,
    registers,
    rows,
    scales,
    tiles,
    work,
)
from jaxserve.pallas_kernels.cpu.amx.instructions import DEPTH, SIDE
from jaxserve.pallas_kernels.cpu.amx.work import Form

_CODE = (instructions, layout, plan, registers, rows, scales, tiles, work)
_FILES = tuple(str(one.__file__) for one in (dot_tiles, pairs, vectors, *_CODE))
_BESIDE = ("", "_zeros", "_minimums")  # suffixes of kernels' names


def takes(rows: int, weights: jax.Array | jax.ShapeDtypeStruct, *, transposed: bool) -> bool:
    """See `dots.takes`."""
    outputs, inputs = weights.shape
    right = transposed and weights.dtype == jnp.bfloat16
    return right and outputs >= SIDE and inputs % DEPTH == 0


def skinny_matmul(x: jax.Array, weights: jax.Array, *, transposed: bool) -> jax.Array:
    """See `dots.skinny_matmul`."""
    assert transposed
    return _products(x, weights, bits=16)


def takes_groups(weights: jax.Array | jax.ShapeDtypeStruct, *, transposed: bool) -> bool:
    """See `dots.takes_groups`."""
    one = jax.ShapeDtypeStruct(weights.shape[1:], weights.dtype)
    return takes(1, one, transposed=transposed)


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """See `dots.grouped_matmul`."""
    return _products(x, weights, sizes, bits=16, grouped=True)


def takes_few_bits(
    x: jax.ShapeDtypeStruct,
    q: jax.ShapeDtypeStruct,
    scale: jax.ShapeDtypeStruct,
    *,
    transposed: bool,
) -> bool:
    """See `dots.takes_few_bits`; groups of any number of DEPTH inputs."""
    right = transposed and q.dtype == jnp.int8
    return right and q.shape[0] >= SIDE and x.shape[1] % (DEPTH * scale.shape[1]) == 0


def few_bits_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    minimum: jax.Array | None = None,
) -> jax.Array:
    """See `dots.few_bits_matmul`."""
    return _of_few_bits(x, q, scale, zero if minimum is None else minimum)


def few_bits_grouped_matmul(
    x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array | None, sizes: jax.Array
) -> jax.Array:
    """See `dots.few_bits_grouped_matmul`."""
    return _of_few_bits(x, q, scale, zero, sizes)


def _of_few_bits(
    x: jax.Array, q: jax.Array, scale: jax.Array, beside: jax.Array | None, *sizes: jax.Array
) -> jax.Array:
    """beside: zero points or minimums."""
    wide = x.dtype != jnp.bfloat16
    given = [x.astype(jnp.float32) if wide else x, q, scale.astype(jnp.float32)]
    zeros = 0
    if beside is not None:
        zeros = dot_tiles.ZEROS if beside.dtype == jnp.int8 else dot_tiles.MINIMUMS
        given.append(beside)
    bits = 8 * q.shape[-1] // x.shape[1]
    return _products(*given, *sizes, bits=bits, wide=wide, zeros=zeros, grouped=bool(sizes))


def _products(x: jax.Array, *given: jax.Array, **how: Any) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[0], given[0].shape[-2]), jnp.float32)
    return jax.ffi.ffi_call(target(**how), result, vmap_method="sequential")(x, *given)


@numba_ffi.compiled_once
def target(*, bits: int, wide: bool = False, zeros: int = 0, grouped: bool = False) -> str:
    """The name of the kernel, which is compiled at the first call. Operands and result as for
    `dots.target`, but x may be float32 with quantised weights.

    Args:
        bits: Bits of a weight.
        wide: Whether x is float32.
        zeros: Zero points or minimums beside the scales, see `dot_tiles.ZEROS`.
        grouped: Whether groups of rows have their own weights.
    """
    assert instructions.usable()
    form = Form(
        bits=bits,
        few=int(bits < 16),
        tiles=1 + int(wide),
        beside=int(zeros > 0),
        points=int(zeros == dot_tiles.ZEROS),
        lead=int(grouped),
    )
    few, a_block, beside, lead = form.few, form.tiles, form.beside, form.lead
    lay_out_rows, prepare = rows.laying_out(form), work.preparing(form)
    lay_out_scales = scales.laying_out(form)
    few_rows, many_rows = tiles.few_rows_of(form), tiles.many_rows_of(form)

    @njit(**numba_ffi.OPTIONS)
    def planned(given: Any) -> Any:
        return plan.plan(given, bits, lead, a_block, beside)

    @njit(**numba_ffi.INLINE)
    def share(given: Any, about: int, i: int) -> None:
        head = plan.head(about)
        count = numba_ffi.dims(given[0], 2)[0]
        outputs, out = numba_ffi.dims(given[1], 2 + lead)[lead], given[len(given) - 1]
        if i < head[plan.PACKS]:
            lay_out_rows(given, about, i)
            plan.laid_out(about)
            return
        i -= head[plan.PACKS]
        behind = i - head[plan.PARTS] * head[plan.SHARES]
        if behind >= 0:
            start = head[plan.START] + behind * plan.TAIL
            at = numba_ffi.data_address(out) + 4 * start * outputs
            size = min(plan.TAIL, count - start) * outputs
            carray(numba_ffi.pointer(at), (size,), np.float32)[:] = 0
            return
        plan.wait(about)
        w, memory = prepare(given, about, i // head[plan.SHARES])
        begin = i % head[plan.SHARES] * head[plan.EACH]
        instructions.begin(w.columns)
        for n in range(begin, min(begin + head[plan.EACH], outputs), 2 * SIDE):
            # The last outputs may overlap the ones before.
            low, high = min(n, outputs - SIDE), min(n + SIDE, outputs - SIDE)
            if few:
                lay_out_scales(w, low, high)
            if w.pairs == 1:
                few_rows(w, low, high)
            else:
                many_rows(w, low, high)
            for m in range(4 * w.pairs):
                row, output = m // 2 * SIDE, high if m % 2 else low
                some, to = min(w.rows - row, SIDE), w.out + 4 * (row * outputs + output)
                if some > 0:
                    at = w.sums + m * w.tile
                    layout.turn(at, 4 * w.columns, SIDE, some, to, 4 * outputs, SIDE)
        instructions.end()
        numba_ffi.free(memory)

    name = f"jaxserve_amx_{bits}{'_wide' if wide else ''}{_BESIDE[zeros]}"
    name += "_grouped" if grouped else ""
    parts = (lay_out_rows, prepare, lay_out_scales, few_rows, many_rows)
    return numba_ffi.register(name, planned, share, __file__, *_FILES, parts=parts)
