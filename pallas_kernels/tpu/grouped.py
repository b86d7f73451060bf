"""Products with weights in groups, see `quantized_matmul`, on TPU.

The grid walks tiles of the result and, innermost, the inputs. Each step widens a tile of the
weights in VMEM, from where the matrix unit reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

_LANES = 128
_COLUMNS = (512, 256, 128)
_ROWS = 256
_SCALES, _ZEROS = 16, 32  # rows of a tile of 16 and 8 bits: so many groups are read together
_MOST_INPUTS = 4096  # of a step, where those scales are of as many
_MOST_NUMBERS = 1 << 20  # of a step, which are wide in VMEM
_VMEM = 64 << 20


def choose(
    x: Any,
    q: Any,
    scale: Any,
    zero: Any,
    *,
    transposed: bool,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> Callable[..., jax.Array] | None:
    """The kernel for weights of these shapes; None if there is none. XLA handles 8 bits with one
    scale per output. See `quantized_matmul`."""
    if transposed or (q.shape[0] == x.shape[1] and scale.shape[0] == 1 and zero is None):
        return None
    inputs, group = x.shape[1], x.shape[1] // scale.shape[0]
    if inputs % group or group % 32 or q.shape[1] % _LANES or _depth(inputs, group, zero) is None:
        return None
    return functools.partial(_matmul, dtype=dtype, interpret=interpret)


def _depth(inputs: int, group: int, zero: Any) -> int | None:
    """Inputs of a step of the grid."""
    some = (_SCALES if zero is None else _ZEROS) * group
    if some % (2 * _LANES) == 0 and some <= _MOST_INPUTS and inputs % some == 0:
        return some
    return inputs if inputs % (2 * _LANES) == 0 and inputs <= 4 * _MOST_INPUTS else None


def _matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    *,
    dtype: DTypeLike,
    interpret: bool,
) -> jax.Array:
    count, inputs = x.shape
    outputs, halves = q.shape[1], inputs // q.shape[0]
    # The inputs of the low halves, then the inputs of the high halves.
    x = jnp.moveaxis(x.reshape(count, q.shape[0], halves), 2, 0)
    rows = min(_ROWS, -(-count // 16) * 16)
    padded = -(-count // rows) * rows
    x = jnp.pad(x, ((0, 0), (0, padded - count), (0, 0)))
    group = inputs // scale.shape[0]
    depth = _depth(inputs, group, zero)
    assert depth is not None
    fitting = [columns for columns in _COLUMNS if outputs % columns == 0]
    columns = next((one for one in fitting if one * depth <= _MOST_NUMBERS), fitting[-1])
    steps = inputs // depth
    by_group = pl.BlockSpec((depth // group, columns), lambda i, j, k: (k, j))
    if scale.dtype == jnp.float16:  # kernels cannot load float16
        scale = lax.bitcast_convert_type(scale, jnp.int16)
    operands = [x, q, scale] if zero is None else [x, q, scale, zero]
    specs = [
        pl.BlockSpec((halves, rows, depth // halves), lambda i, j, k: (0, i, k)),
        pl.BlockSpec((depth // halves, columns), lambda i, j, k: (k, j)),
        *[by_group] * (len(operands) - 2),
    ]
    call = pl.pallas_call(
        functools.partial(_kernel, steps=steps, zeros=zero is not None),
        out_shape=jax.ShapeDtypeStruct((padded, outputs), dtype),
        grid=(padded // rows, outputs // columns, steps),
        in_specs=specs,
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
            vmem_limit_bytes=_VMEM,
        ),
        interpret=interpret,
        name="grouped_matmul",
    )
    y: jax.Array = call(*operands)
    return y[:count]


def _wide(scale: jax.Array) -> jax.Array:
    """Scales as float32; int16 are the bits of float16, all finite."""
    if scale.dtype != jnp.int16:
        return scale.astype(jnp.float32)
    bits = scale.astype(jnp.int32)
    rest = bits & 0x7FFF
    normal = lax.bitcast_convert_type((rest << 13) + (112 << 23), jnp.float32)
    size = jnp.where(rest < 0x400, rest.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -size, size)


def _kernel(*refs: Any, steps: int, zeros: bool) -> None:
    """refs: tiles of x [halves, T, in / halves], q, scale, zero if there is one, the result, its
    sums so far."""
    x_ref, q_ref, scale_ref, *rest = refs
    out_ref, sums = rest[-2:]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    numbers = q_ref[...]
    if x_ref.shape[0] == 1:
        parts = [numbers.astype(jnp.float32)]
    else:
        wide = numbers.astype(jnp.int32)
        parts = [((wide << 28) >> 28).astype(jnp.float32), (wide >> 4).astype(jnp.float32)]
    scale = _wide(scale_ref[...])[:, None]
    zero = rest[0][...].astype(jnp.float32)[:, None] if zeros else None
    for half, part in enumerate(parts):
        by_group = part.reshape(scale.shape[0], -1, part.shape[1])
        if zero is not None:
            by_group = by_group - zero
        weights = (by_group * scale).reshape(part.shape).astype(x_ref.dtype)
        sums[...] += jnp.dot(x_ref[half], weights, preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == steps - 1)
    def _() -> None:
        out_ref[...] = sums[...].astype(out_ref.dtype)
