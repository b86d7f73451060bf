"""A running softmax over chunks of context, in float32 (Milakov & Gimelshein 2018)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that a row that has seen nothing yet gets no NaN.
NOTHING_SEEN = -1e30
BATCH_AND_HEAD = ((0, 1), (0, 1))


class Softmax(NamedTuple):
    """The running softmax of N rows, each with M queries a head that attend together.

    With absorbed queries the heads are parts of one hidden vector and share their weights: peak and
    total then have a single head.

    Attributes:
        peak: float32 [N, kv_heads or 1, M, 1], the highest score so far.
        total: float32 [N, kv_heads or 1, M, 1], sum of weights.
        acc: float32 [N, kv_heads, M, D], weighted sum of values.
    """

    peak: jax.Array
    total: jax.Array
    acc: jax.Array


class Step(Protocol):
    """Adds one chunk of S context tokens to a running softmax, see `step`."""

    def __call__(
        self, state: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
    ) -> Softmax:
        """q [N, kv_heads, M, D] (scaled), k, v [N, kv_heads, S, D]; seen, bool, broadcasts to [N,
        kv_heads, M, S]. v is finite also where a row that sees any of it does not look."""
        ...


def start(shape: tuple[int, int, int], head_dim: int, *, shared: bool = False) -> Softmax:
    """The state before any scores, for shape [N, kv_heads, M]."""
    one = (shape[0], 1 if shared else shape[1], shape[2], 1)
    return Softmax(
        jnp.full(one, NOTHING_SEEN, jnp.float32),
        jnp.zeros(one, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )


def finish(state: Softmax, sinks: jax.Array | None = None) -> jax.Array:
    """The attention output [N, kv_heads, M, D]; zeros where nothing was seen. A row's own NaN
    stays NaN. sinks: float32 [kv_heads, M, 1], scores without a value; None for none."""
    if sinks is None:
        return jnp.where(state.total == 0, 0, state.acc / state.total)
    peak = jnp.maximum(state.peak, sinks)
    fade = jnp.exp(state.peak - peak)
    return state.acc * fade / (state.total * fade + jnp.exp(sinks - peak))


def step(soft_cap: float | None, *, shared: bool = False, axis_name: str | None = None) -> Step:
    """The step with these options. shared: the heads are parts of one vector, whose scores add up
    (over the mesh axis too, if named)."""

    def add(state: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> Softmax:
        scores = lax.dot_general(
            q, k, (((3,), (3,)), BATCH_AND_HEAD), preferred_element_type=jnp.float32
        )
        if shared:
            scores = scores.sum(axis=1, keepdims=True)
        if axis_name is not None:
            scores = lax.psum(scores, axis_name)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, -jnp.inf)
        peak = jnp.maximum(state.peak, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - peak)
        fade = jnp.exp(state.peak - peak)
        total = state.total * fade + weights.sum(axis=-1, keepdims=True)
        if shared:
            weights = jnp.broadcast_to(weights, (*v.shape[:2], *weights.shape[2:]))
        # 16-bit weights would lose as much precision again as the inputs.
        out = lax.dot_general(weights, v.astype(jnp.float32), (((3,), (2,)), BATCH_AND_HEAD))
        return Softmax(peak, total, state.acc * fade + out)

    return add
