"""XLA's own operations on a fixed number of rows at a time, if XLA would sum in another order for
few rows than for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import platform_backend

SIZE = 8  # rows


def in_fixed_batches(function: Callable[..., Any], *rows: jax.Array, size: int = SIZE) -> Any:
    """function(*rows), where each row of the result only depends on the same row of the arguments.
    On a batch-invariant platform, this also holds for the bits: the function is compiled for `size`
    rows and run as often as needed. Elsewhere it is called directly.

    Args:
        function: maps arrays [T, ...] to a tree of such arrays.
        rows: arrays [T, ...].
        size: rows of a batch.

    Returns:
        The function's result.
    """
    if not platform_backend().batch_invariant:
        return function(*rows)
    count = len(rows[0])
    batches = -(-count // size)

    def padded(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, [(0, batches * size - count)] + [(0, 0)] * (array.ndim - 1))
        return array.reshape(batches, size, *array.shape[1:])

    def whole(array: jax.Array) -> jax.Array:
        return array.reshape(batches * size, *array.shape[2:])[:count]

    results = jax.lax.map(lambda batch: function(*batch), tuple(map(padded, rows)))
    return jax.tree.map(whole, results)
