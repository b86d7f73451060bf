"""Products of rows with the weights of their own group: a mixture's experts, or heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.backends import platform_backend
from jaxserve.pallas_kernels.rowwise.fixed_batches import in_fixed_batches


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


def head_matmul(
    x: jax.Array, weights: jax.Array, *, transposed: bool = False, alone: bool = True
) -> jax.Array:
    """Multiplies each head of every token with the head's own weights. x is rounded to the weights'
    dtype, sums are in float32. On a batch-invariant platform a token's result does not depend on
    other tokens.

    Args:
        x: [T, heads, in].
        weights: [heads, in, out], bfloat16, float16 or float32.
        transposed: the weights are [heads, out, in].
        alone: whether one device has all of the weights.

    Returns:
        [T, heads, out], in the dtype of x.
    """
    tokens, heads, inputs = x.shape
    platform, dtype = platform_backend(), x.dtype
    choose = platform.grouped_matmul if alone and platform.batch_invariant else None
    kernel = choose and choose(weights, transposed=transposed)
    x = x.astype(weights.dtype)
    if kernel is not None:
        rows = x.transpose(1, 0, 2).reshape(-1, inputs)
        y = kernel(rows, weights, jnp.full(heads, tokens, jnp.int32))
        return y.reshape(heads, tokens, -1).transpose(1, 0, 2).astype(dtype)
    axes = "thi,hoi->tho" if transposed else "thi,hio->tho"
    # XLA's CPU compiler, where x is wider, has no such product of 16 by 16 bits.
    x, weights = x.astype(dtype), weights.astype(dtype)

    def product(x: jax.Array) -> jax.Array:
        return jnp.einsum(axes, x, weights, preferred_element_type=jnp.float32)

    return (in_fixed_batches(product, x) if alone else product(x)).astype(dtype)
