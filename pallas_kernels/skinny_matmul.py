"""Products of few rows, less than a chunk of prompts has, with weights of bfloat16 or float32,
where the platform has a kernel for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import resolve_backend


def few_rows_kernel(rows: int, weights: jax.Array, *, transposed: bool) -> bool:
    """Whether `few_rows` is to be taken for the product of so many rows with these weights, on the
    first device: where numba has kernels, see `resolve_backend`."""
    if resolve_backend("auto") != "numba":
        return False
    from jaxserve.pallas_kernels.cpu import panels  # as backends are, when chosen
    from jaxserve.pallas_kernels.cpu import rows as numba_rows

    return any(
        kernel.takes(rows, weights, transposed=transposed) for kernel in (numba_rows, panels)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def few_rows(x: jax.Array, weights: jax.Array, transposed: bool) -> jax.Array:
    """x [T, in] @ weights [in, out] -> float32 [T, out], both of bfloat16 or float32, on one
    device; sums in float32. transposed: the weights are [out, in]."""
    from jaxserve.pallas_kernels.cpu import panels
    from jaxserve.pallas_kernels.cpu import rows as numba_rows

    if numba_rows.takes(x.shape[0], weights, transposed=transposed):
        return numba_rows.few_rows(x, weights, transposed=transposed)
    return panels.panels(x, weights, transposed=transposed)


@few_rows.defjvp
def _derived(
    transposed: bool, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """For training: a kernel says nothing of its derivative."""
    (x, weights), (dx, dweights) = primals, tangents
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32
    )
    return few_rows(x, weights, transposed), product(dx, weights) + product(x, dweights)
