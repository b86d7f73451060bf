"""Products with quantised weights, if the platform has a kernel for them, which reads the weights
as they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import platform_backend


def quantized_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    minimum: jax.Array | None = None,
    *,
    transposed: bool,
    dtype: DTypeLike,
    axes: tuple[str | None, str | None],
    mesh: Mesh | None,
) -> jax.Array | None:
    """x [T, in] @ ((q - zero) * scale + minimum) -> [T, out]. Sums are in float32. None if the
    first device has no kernel for these.

    Args:
        x: [T, in], bfloat16, float16 or float32.
        q: int8 or float8_e4m3fn [in, out]; or int8 [in / 2, out], two neighbouring inputs in each,
            the first in the low half.
        scale: [groups, out]; a group is in / groups consecutive inputs.
        zero: int8 [groups, out], or None.
        minimum: float32 [groups, out], or None.
        transposed: q, scale, zero and minimum are [out, ...].
        dtype: dtype of the result.
        axes: mesh axes over which inputs and outputs are cut; None for uncut.
        mesh: the devices; None for one.
    """
    backend = platform_backend()
    choose = backend.quantized_matmul
    if choose is None:
        return None
    rows, columns = axes if mesh is not None else (None, None)
    weight = PartitionSpec(columns, rows) if transposed else PartitionSpec(rows, columns)
    # A single scale per output is not cut with the inputs.
    single = scale.shape[1 if transposed else 0] == 1
    by_group = PartitionSpec(*(None if single and axis == rows else axis for axis in weight))
    specs = (PartitionSpec(None, rows), weight, by_group, by_group, by_group)

    def local(array: jax.Array | None, spec: PartitionSpec) -> jax.ShapeDtypeStruct | None:
        if array is None:
            return None
        shape = [
            size if mesh is None or axis is None else size // mesh.shape[axis]
            for size, axis in zip(array.shape, spec, strict=True)
        ]
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    operands = (x, q, scale, zero, minimum)
    apart = minimum is not None and not backend.adds_minimums
    result = jnp.float32 if apart else dtype
    kernel = choose(*map(local, operands[:-1], specs), transposed=transposed, dtype=result)
    if kernel is None:
        return None

    def part(*operands: Any) -> jax.Array:
        y = kernel(*operands) if backend.adds_minimums else kernel(*operands[:-1])
        if apart:
            y += _of_minimum(operands[0], operands[-1], transposed=transposed)
        y = y.astype(dtype)
        return y if rows is None else jax.lax.psum(y, rows)

    if mesh is None:
        return part(*operands)

    return jax.shard_map(
        part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, columns), check_vma=False
    )(*operands)


def _of_minimum(x: jax.Array, minimum: jax.Array, *, transposed: bool) -> jax.Array:
    """Sums of x by group, times the groups' minimums: float32 [T, out]. As exact as x: matrix units
    multiply float32 in several passes."""
    rows, groups = x.shape[0], minimum.shape[1 if transposed else 0]
    sums = x.astype(jnp.float32).reshape(rows, groups, -1).sum(axis=-1)
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(sums, minimum, numbers, precision=precision)[:rows]
