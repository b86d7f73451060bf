"""Vectors of prompts, on the device, behind the model's step: sums of hidden states, and logits of
a few tokens.

As with log-probabilities of prompts (`prompt_logprobs_step.py`), a program of its own reads what
the model's step leaves. It runs behind batches in which somebody wants a vector: the others pay
nothing. A prompt that is computed in several steps gets a sum of each, which the host adds up.
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
        sums: float32 [R, d_model], of hidden states behind the last norm, by place. NaN where one
            of them is no number: what others have computed cannot get there.
        scores: float32 [R, MAX_SCORED_TOKENS], the logits of `Wanted.scored`.
    """

    sums: jax.Array
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
    finite = jnp.all(jnp.isfinite(normed), axis=-1)
    # 0 and 1 are exact in any dtype, and the sums are in float32.
    mine = jnp.arange(rows)[:, None] == places
    sums = jnp.matmul(
        mine.astype(normed.dtype),
        jnp.where(finite[:, None], normed, 0),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    broken = jnp.any(mine & ~finite, axis=-1)
    scores = jnp.take_along_axis(logits.astype(jnp.float32), scored, axis=-1)
    return Pooled(jnp.where(broken[:, None], jnp.nan, sums), scores)
