"""Low-rank products whose factors differ by row: what adapters add to a projection."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import platform_backend

RANKS = (8, 16, 32, 64, 128, 256)
"""Columns that an adapter may take; kernels rely on multiples of 8."""


def skips_columns() -> bool:
    """Whether the first device has a kernel that only reads the columns of the rows' adapters."""
    return platform_backend().add_low_rank is not None


def add_low_rank(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: Sequence[jax.Array],
    numbers: jax.Array,
    owner: jax.Array,
) -> jax.Array | None:
    """Adds to each row of y its own low-rank product, on one device. The product of a row does not
    depend on other rows, and rows with number 0 stay as they are. None if the platform has no
    kernel for these.

    Args:
        y: [T, sum of out], float32.
        x: [T, in].
        a: [columns, parts, in].
        b: [columns, out] for each part.
        numbers: int32 [T], the adapter of each row; 0: none.
        owner: int32 [columns], the adapter of each column, the same for every 8.
    """
    choose = platform_backend().add_low_rank
    kernel = choose and choose(a) if y.dtype == jnp.float32 else None
    return None if kernel is None else kernel(y, x, a, b, numbers, owner)
