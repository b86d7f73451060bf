"""Latent vectors, of which a token has half where others have K, the other half where they have V
(`Scoring.halves`): both are its key, and parts of both its value, for all query heads. The halves
take the place of two heads of queries and results, with the weights of one (DeepSeek-V2, section
2.1.2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.backends import KernelShape
from jaxserve.pallas_kernels.tpu import softmax
from jaxserve.pallas_kernels.tpu.common import Options


def apart(q: jax.Array) -> jax.Array:
    """Queries [N, H, 2 * D] -> [N, 2 * H, D]: those of all heads for K's half, then for V's."""
    number, heads, width = q.shape
    halves = q.reshape(number, heads, 2, width // 2).transpose(0, 2, 1, 3)
    return halves.reshape(number, 2 * heads, width // 2)


def together(out: jax.Array, halves: int) -> jax.Array:
    """Results [N, 2 * H, D], in the order of `apart`, -> [N, H, 2 * halves]."""
    number, heads, width = out.shape
    by_half = out.reshape(number, 2, heads // 2, width)[..., :halves]
    return by_half.transpose(0, 2, 1, 3).reshape(number, heads // 2, 2 * halves)


def update(
    state: tuple[Any, Any, Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    options: Options,
) -> None:
    """Adds one chunk of context, see `softmax.update`.

    Args:
        state: peak and total of one head, acc of two.
        q: [2, M, D].
        k, v: [1, S, D], finite if any query sees part of the chunk.
        seen: bool, broadcasts to [1, M, S].
        options: How products become scores.
    """
    peak, total, acc = state
    products = softmax.dot(q[:1], k, transposed=True) + softmax.dot(q[1:], v, transposed=True)
    weights, fade = softmax.weigh(softmax.scored(products, seen, options), peak, total, ...)
    for n, x in enumerate((k, v)):
        one = pl.ds(n, 1)
        acc[one] = acc[one] * fade + softmax.dot(weights.astype(x.dtype), x)


def supports(shape: KernelShape) -> str | None:
    """Why the kernels do not support latent vectors of this shape (of one shard), or None."""
    if shape.kv_heads != 1 or jnp.dtype(shape.dtype).itemsize == 1:
        return "latent vectors: must be one a token, of 16 or 32 bits"
    return None
