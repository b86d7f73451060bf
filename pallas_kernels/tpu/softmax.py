"""The running softmax over chunks of context (Milakov and Gimelshein 2018), in VMEM.

peak, total: float32 [N, M, 128], the highest score so far and the sum of weights, the same in all
lanes; acc: float32 [N, M, D], the weighted sum of values. N: heads, M: queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.tpu.common import LANES, Options

# Finite, so that a query that has seen nothing gets weights of 0, not NaN.
NOTHING_SEEN = -1e30


def scratch(heads: int, queries: int, width: int, sums: int = 1) -> list[Any]:
    """The scratch shapes of peak, total and acc.

    Args:
        heads: N.
        queries: M.
        width: D.
        sums: weighted sums of a head, each a head of acc.
    """
    return [
        pltpu.VMEM((heads, queries, LANES), jnp.float32),
        pltpu.VMEM((heads, queries, LANES), jnp.float32),
        pltpu.VMEM((sums * heads, queries, width), jnp.float32),
    ]


def sinks_of(
    sinks: jax.Array | None, kv_heads: int, heads: int, each: int
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    """Sinks as an operand of programs, and its specs, for `finished`; empty for none.

    Args:
        sinks: float32 [num_heads], or None.
        kv_heads: KV heads of the pool.
        heads: KV heads of a program.
        each: queries of a program for each of its query heads.
    """
    if sinks is None:
        return (), ()
    spread = jnp.repeat(sinks.reshape(kv_heads, -1), each, axis=1)
    queries = spread.shape[1]
    wide = jnp.broadcast_to(spread[..., None], (kv_heads, queries, LANES))
    return (wide,), (pl.BlockSpec((heads, queries, LANES), lambda h, i, *_: (h, 0, 0)),)


def reset(state: tuple[Any, Any, Any]) -> None:
    """Sets the state to nothing seen yet."""
    peak, total, acc = state
    peak[...] = jnp.full(peak.shape, NOTHING_SEEN, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)


def dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """a [N, M, K] @ b [N, K, S] (or b [N, S, K] transposed) -> float32 [N, M, S]; without N too.
    float32 operands are multiplied in full precision."""
    lead = a.ndim - 2
    heads = tuple(range(lead))
    numbers = (((lead + 1,), (lead + 1 if transposed else lead,)), (heads, heads))
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, numbers, precision=exact, preferred_element_type=jnp.float32)


def scored(products: jax.Array, seen: jax.Array, options: Options) -> jax.Array:
    """Scores from products q . k; -inf where not seen."""
    scores = products * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return jnp.where(seen, scores, -jnp.inf)


def weigh(scores: jax.Array, peak: Any, total: Any, at: Any) -> tuple[jax.Array, jax.Array]:
    """Updates peak and total with the scores of a chunk.

    Args:
        scores: float32 [n, M, S], -inf where not seen.
        peak, total: VMEM float32 [N, M, 128].
        at: Index of the n heads.

    Returns:
        (the weights [n, M, S], the factor [n, M, 1] of earlier sums), float32.
    """
    old = peak[at][..., :1]
    new = jnp.maximum(old, scores.max(axis=-1, keepdims=True))
    weights, fade = jnp.exp(scores - new), jnp.exp(old - new)
    summed = total[at][..., :1] * fade + weights.sum(axis=-1, keepdims=True)
    shape = (*new.shape[:-1], LANES)
    peak[at] = jnp.broadcast_to(new, shape)
    total[at] = jnp.broadcast_to(summed, shape)
    return weights, fade


def update(
    state: tuple[Any, Any, Any],
    at: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    options: Options,
    scales: tuple[jax.Array | None, jax.Array | None] = (None, None),
) -> None:
    """Adds one chunk of context to the state of some heads.

    Args:
        state: peak, total and acc, refs in VMEM.
        at: Index of the n heads.
        q: [n, M, D].
        k: [n, S, D].
        v: [n, S, D], finite if any query sees part of the chunk.
        seen: bool, broadcasts to [n, M, S].
        options: How products become scores.
        scales: Of k and of v, float32 [n, 1, S] each, finite as v is; None for 1.
    """
    peak, total, acc = state
    scores = scored(scaled(dot(q, k, transposed=True), scales[0]), seen, options)
    weights, fade = weigh(scores, peak, total, at)
    acc[at] = acc[at] * fade + dot(scaled(weights, scales[1]).astype(v.dtype), v)


def scaled(products: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Multiplies products of vectors by their scales; None for 1."""
    return products if scales is None else products * scales


def finished(state: tuple[Any, Any, Any], at: Any = ..., sinks: tuple[Any, ...] = ()) -> jax.Array:
    """The output, float32 [n, M, D]; zeros where nothing was seen. A query's own NaN stays. sinks:
    empty, or VMEM float32 [n, M, 128] of scores without a value."""
    peak, total, acc = state
    summed = total[at][..., :1]
    if sinks:
        old, extra = peak[at][..., :1], sinks[0][...][..., :1]
        top = jnp.maximum(old, extra)
        fade = jnp.exp(old - top)
        return acc[at] * fade / (summed * fade + jnp.exp(extra - top))
    return jnp.where(summed == 0, 0.0, acc[at] / jnp.where(summed == 0, 1.0, summed))
