"""The running softmax of flash attention, for any memory and backend.

Scores are in units of log 2 (`prepare` folds log2(e) into the scale), so that weights are exp2, the
one exponential that GPUs have in hardware (Milakov and Gimelshein 2018, section 3; Dao 2023,
section 3.1). Plain jnp on [M, N] score tiles: kernels and tests alike can call it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.backends import Scoring

LOG2_E = math.log2(math.e)
# Finite, so that a row that has seen nothing gets weights of 0, not NaN.
NOTHING_SEEN = -1e30
# The scales of N vectors: float32 [N], one for all, or None for 1.
Scales = jax.Array | float | None


class Softmax(NamedTuple):
    """The state of a running softmax for M queries.

    Attributes:
        peak: float32 [M], highest score so far.
        total: float32 [M], sum of weights relative to the peak.
        acc: float32 [M, D], weighted sum of values.
    """

    peak: jax.Array
    total: jax.Array
    acc: jax.Array


def start(rows: int, width: int) -> Softmax:
    """The state before any scores, for `rows` queries of values `width` wide."""
    return Softmax(
        jnp.full((rows,), NOTHING_SEEN, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def prepare(products: jax.Array, scoring: Scoring) -> jax.Array:
    """Scores in units of log 2 from raw products q . k, float32 of any shape."""
    scale, soft_cap = scoring.scale, scoring.soft_cap
    if soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2_E)


def dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """a [M, K] @ b [K, N] (or b [N, K] transposed) -> float32 [M, N]; no TF32 for float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=exact, preferred_element_type=jnp.float32)


def step(state: Softmax, scores: jax.Array, values: jax.Array, scales: Scales = None) -> Softmax:
    """Adds a tile (Dao 2023, section 3.1, Algorithm 1).

    Args:
        state: The state so far.
        scores: float32 [M, N], -inf where not seen.
        values: [N, D], all finite.
        scales: Scales of the values.
    """
    peak = jnp.maximum(state.peak, scores.max(axis=1))
    fade = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(scores - peak[:, None])
    total = state.total * fade + weights.sum(axis=1)
    acc = state.acc * fade[:, None] + dot(scaled(weights, scales).astype(values.dtype), values)
    return Softmax(peak, total, acc)


def scaled(products: jax.Array, scales: Scales, axis: int = 1) -> jax.Array:
    """Multiplies products of N vectors, [M, N] or with axis 0 [N, M], by the vectors' scales."""
    if scales is None or isinstance(scales, float):
        return products if scales is None else products * scales
    return products * jnp.expand_dims(scales, 1 - axis)


def with_sinks(state: Softmax, sinks: jax.Array) -> Softmax:
    """The state after one more score without a value for each query, float32 [M] in units of log
    2."""
    peak = jnp.maximum(state.peak, sinks)
    fade = jnp.exp2(state.peak - peak)
    total = state.total * fade + jnp.exp2(sinks - peak)
    return Softmax(peak, total, state.acc * fade[:, None])


def finish(state: Softmax) -> jax.Array:
    """The output [M, D]; zeros where nothing was seen."""
    return state.acc / jnp.where(state.total == 0, 1.0, state.total)[:, None]
