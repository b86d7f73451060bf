"""Low-rank products whose factors differ by row: what adapters add to a projection."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.backends import platform_backend

RANKS = (8, 16, 32, 64, 128, 256)
"""Columns that an adapter may take; kernels rely on multiples of 8."""


def skips_columns() -> bool:
    """Whether the first device has a kernel that reads no columns but those that rows have."""
    return platform_backend().add_low_rank is not None


def add_low_rank(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: Sequence[jax.Array],
    numbers: jax.Array,
    owner: jax.Array,
) -> jax.Array | None:
    """Adds to each row of y its own low-rank product, on one device. What is added to a row does
    not depend on which others there are, and rows of number 0 stay as they are. None where the
    platform has no kernel for these.

    Args:
        y: [T, sum of out], float32.
        x: [T, in].
        a: [columns, parts, in].
        b: of each part, [columns, out].
        numbers: int32 [T], whose columns each row has; 0: nobody's.
        owner: int32 [columns], whose each is, the same for every 8.
    """
    choose = platform_backend().add_low_rank
    kernel = choose and choose(a) if y.dtype == jnp.float32 else None
    return None if kernel is None else kernel(y, x, a, b, numbers, owner)
