"""How well a model predicts a text: measures the loss by quantised weights."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.base import Family, ModelConfig, Params
from jaxserve.models.dense import sequence_logits

WINDOW = 512
MOST_WINDOWS = 64


def perplexity(
    family: Family,
    params: Params,
    config: ModelConfig,
    tokens: np.ndarray,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None,
) -> float:
    """exp of the mean negative log-probability of a text's tokens, computed window by window.

    Args:
        family: the model's.
        params: its parameters, as a checkpoint has them.
        config: its shape.
        tokens: int [n], at least 2. At most `MOST_WINDOWS` windows of `WINDOW` tokens are used.
        dtype: dtype of the activations.
        mesh: the devices that the parameters are on; None for one.
    """
    size = min(WINDOW, config.max_position, len(tokens))
    count = min(len(tokens) // size, MOST_WINDOWS)

    @jax.jit
    def loss(params: Params, window: jax.Array) -> jax.Array:
        """The summed loss of all tokens but the first."""
        logits = sequence_logits(family, params, config, window, dtype=dtype, mesh=mesh)
        log_probs = jax.nn.log_softmax(logits[:-1])
        return -jnp.take_along_axis(log_probs, window[1:, None], axis=1).sum()

    windows = np.asarray(tokens[: count * size], np.int32).reshape(count, size)
    total = functools.reduce(
        lambda sum_, next_window: sum_ + float(loss(params, next_window)), windows, 0.0
    )
    return math.exp(total / (count * (size - 1)))
