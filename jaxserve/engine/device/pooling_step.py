"""Vectors of prompts, on the device, behind the model's step: sums of hidden states, and logits of
a few tokens.

As with log-probabilities of prompts (`prompt_logprobs_step.py`), a program of its own reads what
the model's step leaves. It runs behind batches in which somebody wants a vector: the others pay
nothing. A prompt that is computed in several steps gets a sum of each, which the host adds up. What
is added are whole numbers, so that a sum has the same bits in any order and in any pieces.
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
"""Nobody wants the token's hidden state."""
DIGITS = 4
"""Whole numbers that a number is taken apart into: what is before the point, then BITS each. Sums
of so many tokens as a step may have fit in 32 bits."""
BITS = 14


class Wanted(NamedTuple):
    """What is wanted of a step, NumPy arrays.

    Attributes:
        places: int32 [T], the place of the sum that each token's hidden state is part of, or
            NOBODY.
        scored: int32 [R, MAX_SCORED_TOKENS], token ids, of each row of logits.
    """

    places: np.ndarray
    scored: np.ndarray

    @classmethod
    def nothing(cls, layout: Layout) -> Wanted:
        """Nothing of a step of this layout, yet."""
        scored = np.zeros((layout.rows, MAX_SCORED_TOKENS), np.int32)
        return cls(np.full(layout.tokens, NOBODY, np.int32), scored)


class Pooled(NamedTuple):
    """What a step knows of it.

    Attributes:
        sums: int32 [R, DIGITS, d_model], of the `digits` of hidden states behind the last norm, by
            place.
        finite: bool [R], whether all of those are numbers. What others have computed cannot get
            there.
        scores: float32 [R, MAX_SCORED_TOKENS], the logits of `Wanted.scored`.
    """

    sums: jax.Array
    finite: jax.Array
    scores: jax.Array


# (params, hidden [T, d_model], logits [R, V], places, scored)
PoolingStep = Callable[..., Pooled]


@lru_cache(maxsize=8)
def make_pooling_step(model: StepModel) -> PoolingStep:
    """The model's program, jitted. Engines of the same model in one process share it."""
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
    # Too large is no number either: sums of so many might not fit.
    finite = jnp.all(jnp.abs(normed) < 2.0**31 / len(normed), axis=-1)
    where = jnp.where(places == NOBODY, rows, places)
    parts = digits(jnp.where(finite[:, None], normed, 0))
    sums = jnp.zeros((rows, *parts.shape[1:]), jnp.int32).at[where].add(parts, mode="drop")
    whole = jnp.ones(rows, bool).at[where].min(finite, mode="drop")
    scores = jnp.take_along_axis(logits.astype(jnp.float32), scored, axis=-1)
    return Pooled(sums, whole, scores)


def digits(x: jax.Array) -> jax.Array:
    """What stands for x, float32 [T, D], to 2**-42: int32 [T, DIGITS, D]."""
    parts = []
    for _ in range(DIGITS):
        whole = jnp.trunc(x)
        parts.append(whole.astype(jnp.int32))
        x = (x - whole) * 2.0**BITS  # exact
    return jnp.stack(parts, axis=1)


def from_digits(parts: np.ndarray) -> np.ndarray:
    """What a sum of digits stands for: [DIGITS, D] -> float64 [D]."""
    return (np.exp2(-BITS * np.arange(DIGITS))[:, None] * parts).sum(axis=0)
