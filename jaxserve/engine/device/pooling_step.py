"""Vectors of prompts, computed on the device after the model's step: sums of hidden states, and
logits of a few tokens.

As with log-probabilities of prompts (`prompt_logprobs_step.py`), a separate program reads the
output of the model's step. It runs only after batches in which a request wants a vector, so others
pay nothing. A prompt computed in several steps gets a sum from each, and the host adds these up.
Whole numbers are added, so that a sum has the same bits in any order and in any pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.step_model import StepModel
from jaxserve.models.base import Params
from jaxserve.sched.request import MAX_SCORED_TOKENS

NOBODY = -1
"""No request wants the token's hidden state."""
DIGITS = 4
"""Number of whole numbers that stand for a number: the part before the point, then BITS each. Sums
of as many tokens as a step may have fit in 32 bits."""
BITS = 14


class Wanted(NamedTuple):
    """Requested results of a step, NumPy arrays.

    Attributes:
        places: int32 [T], the index of the sum that each token's hidden state is added to, or
        NOBODY.
        scored: int32 [R, MAX_SCORED_TOKENS], token ids for each row of logits.
    """

    places: np.ndarray
    scored: np.ndarray

    @classmethod
    def nothing(cls, layout: Layout) -> Wanted:
        """A request for nothing yet, for a step of this layout."""
        scored = np.zeros((layout.rows, MAX_SCORED_TOKENS), np.int32)
        return cls(np.full(layout.tokens, NOBODY, np.int32), scored)


class Pooled(NamedTuple):
    """The results of a step for `Wanted`.

    Attributes:
        sums: int32 [R, DIGITS, d_model], sums of the `digits` of hidden states after the last norm,
        by place.
        finite: bool [R], whether all of those are numbers. Other requests cannot affect it.
        scores: float32 [R, MAX_SCORED_TOKENS], the logits of `Wanted.scored`.
    """

    sums: jax.Array
    finite: jax.Array
    scores: jax.Array


# (params, hidden [T, d_model], logits [R, V], places, scored)
PoolingStep = Callable[..., Pooled]


@lru_cache(maxsize=8)
def make_pooling_step(model: StepModel) -> PoolingStep:
    """The program of the model, jitted. Engines of the same model in one process share it."""
    whole = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())
    return jax.jit(partial(_pooling_step, model), out_shardings=whole)


def _pooling_step(
    model: StepModel,
    params: Params,
    hidden: jax.Array,
    logits: jax.Array,
    places: jax.Array,
    scored: jax.Array,
) -> Pooled:
    rows = logits.shape[0]
    normed = model.family.finish(params, model.config, hidden, mesh=model.mesh)
    normed = normed.astype(jnp.float32)
    # Too large counts as not a number, too: sums might not fit.
    finite = jnp.all(jnp.abs(normed) < 2.0**31 / len(normed), axis=-1)
    where = jnp.where(places == NOBODY, rows, places)
    parts = digits(jnp.where(finite[:, None], normed, 0))
    sums = jnp.zeros((rows, *parts.shape[1:]), jnp.int32).at[where].add(parts, mode="drop")
    whole = jnp.ones(rows, bool).at[where].min(finite, mode="drop")
    scores = jnp.take_along_axis(logits.astype(jnp.float32), scored, axis=-1)
    return Pooled(sums, whole, scores)


def digits(x: jax.Array) -> jax.Array:
    """Represents x, float32 [T, D], to 2**-42 as whole numbers: int32 [T, DIGITS, D]."""
    parts = []
    for _ in range(DIGITS):
        whole = jnp.trunc(x)
        parts.append(whole.astype(jnp.int32))
        x = (x - whole) * 2.0**BITS  # exact
    return jnp.stack(parts, axis=1)


def from_digits(parts: np.ndarray) -> np.ndarray:
    """The number that a sum of digits represents: [DIGITS, D] -> float64 [D]."""
    return (np.exp2(-BITS * np.arange(DIGITS))[:, None] * parts).sum(axis=0)
