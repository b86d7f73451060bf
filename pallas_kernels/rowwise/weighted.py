"""Sums of rows by weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import platform_backend


def add_weighted(
    base: jax.Array | None, y: jax.Array, weights: jax.Array, places: jax.Array | None = None
) -> jax.Array:
    """base plus weights[t, k] * y[places[t, k]], added for each k in turn. Whether XLA's CPU
    compiler rounds a product before it is added depends on its fusions, and so on the number of
    rows. A kernel of the platform always rounds it.

    Args:
        base: [T, D]; None for zeros.
        y: [N, D].
        weights: float32 [T, K].
        places: int32 [T, K]; None for each row's own place, if K is 1 and N is T.

    Returns:
        [T, D], in the dtype of y.
    """
    choose = platform_backend().add_weighted
    kernel = choose and choose(y)
    if kernel is None:
        many = y[:, None] if places is None else y[places]
        sums = (many * weights[..., None].astype(y.dtype)).sum(axis=1)
        return sums if base is None else base + sums
    if places is None:
        places = jnp.arange(len(y), dtype=jnp.int32)[:, None]
    if base is None:
        base = jnp.zeros((len(places), y.shape[1]), y.dtype)
    return kernel(base, y, weights, places)
