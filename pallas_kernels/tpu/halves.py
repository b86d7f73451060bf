"""Latent vectors, of which a token has half where others have K, the other half where they have V
(`Scoring.halves`): both are its key, and parts of both its value, for all query heads. The halves
take the place of two heads of queries and results, with the weights of one (DeepSeek-V2, section
2.1.2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.backends import KernelShape
from jaxserve.pallas_kernels.pool import Pool, halves_wide
from jaxserve.pallas_kernels.tpu import softmax
from jaxserve.pallas_kernels.tpu.common import Options
from jaxserve.pallas_kernels.tpu.stream import Buffer, own_scales


def apart(q: jax.Array, pool: Pool, halves: int) -> jax.Array:
    """Queries [N, H, keys] -> [N, 2 * H, D]: those of all heads for K's half, then for V's. If the
    rest of keys is cut into bytes (`pool.store_halves`), all of it is asked for with K's."""
    values = [q[..., :halves], q[..., halves : 2 * halves]]
    rest = q[..., 2 * halves :]
    if halves_wide(pool.dtype, halves):
        each = [rest, jnp.zeros_like(rest)]
    else:
        each = jnp.split(rest, 2, axis=-1)
    parts = [jnp.concatenate(both, axis=-1) for both in zip(values, each, strict=True)]
    return jnp.concatenate(parts, axis=1)


def together(out: jax.Array, halves: int) -> jax.Array:
    """Results [N, 2 * H, D], in the order of `apart`, -> [N, H, 2 * halves]."""
    number, heads, width = out.shape
    by_half = out.reshape(number, 2, heads // 2, width)[..., :halves]
    return by_half.transpose(0, 2, 1, 3).reshape(number, heads // 2, 2 * halves)


def update(
    state: tuple[Any, Any, Any],
    q: jax.Array,
    buffers: tuple[Buffer, Buffer],
    half: jax.Array,
    seen: jax.Array,
    own: jax.Array,
    options: Options,
) -> None:
    """Adds one chunk of context, see `softmax.update`.

    Args:
        state: peak and total of one head, acc of two.
        q: [2, M, D].
        buffers: Of K and V; their values, or else their scales, are cleaned outside of `own`.
        half: int32 [], the half of the buffers with the chunk.
        seen: bool, broadcasts to [1, M, S].
        own: bool, broadcasts to [1, 1, S]: slots that any query sees.
        options: How products become scores.
    """
    peak, total, acc = state
    read = [each.vectors((half,), q.dtype) for each in buffers]
    scales = [own_scales(each.scales_of(half, pl.ds(0, 1)), own) for each in buffers]
    products = jnp.zeros((), jnp.float32)
    if halves_wide(buffers[0].values.dtype, options.halves):
        stored = [each.values[half] for each in buffers]
        lane = lax.broadcasted_iota(jnp.int32, stored[0].shape, 2)
        plain = lane < options.halves
        rest = jnp.where(plain, 0.0, _upper_bytes(*stored)).astype(q.dtype)
        read = [jnp.where(plain, x, jnp.zeros_like(x)) for x in read]
        products = softmax.dot(q[:1], rest, transposed=True)
    for n, x in enumerate(read):
        asked = softmax.dot(q[n : n + 1], x, transposed=True)
        products += softmax.scaled(asked, scales[n])
    weights, fade = softmax.weigh(softmax.scored(products, seen, options), peak, total, ...)
    for n, x in enumerate(read):
        one = pl.ds(n, 1)
        given = softmax.scaled(weights, scales[n]).astype(x.dtype)
        acc[one] = acc[one] * fade + softmax.dot(given, x)


def _upper_bytes(high: jax.Array, low: jax.Array) -> jax.Array:
    """`pool.upper_bytes`, in words: Mosaic does not shift bytes."""
    bits = (lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32) & 255 for x in (high, low))
    first, second = bits
    return lax.bitcast_convert_type((first << 24) | (second << 16), jnp.float32)


def supports(shape: KernelShape) -> str | None:
    """Why the kernels do not support latent vectors of this shape (of one shard), or None."""
    if shape.kv_heads != 1:
        return "latent vectors: must be one a token"
    return None
