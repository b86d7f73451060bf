"""Products of rows with the weights of their own group: a mixture's experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import platform_backend


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies each group of rows with its own weights; rows are sorted by group. Rows are
    rounded to the weights' dtype, sums are in float32.

    XLA's own product (`jax.lax.ragged_dot`) computes every group for every row on CPUs. So CPUs
    have a kernel, which reads only the weights of groups with rows. With it, a row's result does
    not depend on other rows.

    Args:
        x: [T, in].
        weights: [groups, in, out], bfloat16, float16 or float32.
        group_sizes: int32 [groups], rows of each; together at most T.
        transposed: the weights are [groups, out, in].
        dtype: of the result; None for that of x.

    Returns:
        [T, out]; zeros in rows behind the last group.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    choose = platform_backend().grouped_matmul
    kernel = choose and choose(weights, transposed=transposed)
    x = x.astype(weights.dtype)
    if kernel is not None:
        return kernel(x, weights, group_sizes).astype(dtype)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y = jax.lax.ragged_dot_general(
        x, weights, group_sizes, numbers, preferred_element_type=jnp.float32
    )
    behind = jnp.arange(len(x))[:, None] >= group_sizes.sum()  # undefined there
    return jnp.where(behind, 0, y).astype(dtype)


def quantized_grouped_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    group_sizes: jax.Array,
    *,
    transposed: bool,
) -> jax.Array | None:
    """`grouped_matmul` with quantised weights, see `quantized_matmul`, on one device: float32 [T,
    out]. None if the device has no kernel for these.

    Args:
        x: [T, in], bfloat16 or float32.
        q, scale, zero: those of `quantized_matmul` for each group, [groups, ...].
        group_sizes: int32 [groups], rows of each; together at most T.
        transposed: q, scale and zero are [groups, out, ...].
    """
    choose = platform_backend().quantized_grouped_matmul
    kernel = choose and choose(x, q, scale, transposed=transposed)
    return None if kernel is None else kernel(x, q, scale, zero, group_sizes)
