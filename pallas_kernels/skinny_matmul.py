"""Skinny matmuls: few rows, fewer than in a chunk of a prompt, times weights of bfloat16 or
float32, if the platform has a kernel for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import platform_backend


def has_skinny_matmul(rows: int, weights: jax.Array, *, transposed: bool) -> bool:
    """Whether the first device has a `skinny_matmul` for this many rows and these weights."""
    choose = platform_backend().skinny_matmul
    return choose is not None and choose(rows, weights, transposed=transposed) is not None


def by_columns(weights: jax.Array) -> bool:
    """Whether the first device multiplies few rows by weights [..., in, out] faster, and many rows
    as fast, if they are kept as [..., out, in]."""
    chosen = platform_backend().by_columns
    return chosen is not None and chosen(weights)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def skinny_matmul(x: jax.Array, weights: jax.Array, transposed: bool) -> jax.Array:
    """x [T, in] @ weights [in, out] -> float32 [T, out], both of bfloat16 or float32, on one
    device. Sums are in float32. transposed: the weights are [out, in]. Only if
    `has_skinny_matmul`."""
    choose = platform_backend().skinny_matmul
    kernel = choose and choose(x.shape[0], weights, transposed=transposed)
    assert kernel is not None
    return kernel(x, weights, transposed=transposed)


@skinny_matmul.defjvp
def _derived(
    transposed: bool, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """The derivative, for training: kernels have none of their own."""
    (x, weights), (dx, dweights) = primals, tangents
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32
    )
    return skinny_matmul(x, weights, transposed), product(dx, weights) + product(x, dweights)
