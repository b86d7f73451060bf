"""Continue a prompt with a model in training: plain and slow, for samples only."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bpe import EOS_ID
from tokenizers import Tokenizer

from jaxserve.models.dense import sequence_logits
from jaxserve.models.families import opt

PROMPTS = (
    "Once upon a time",
    "One day, a little fox",
    "Mia was sad because",
    "Tell me a story about a dragon.",
)


_BUCKET = 64  # lengths are rounded up to a multiple of this


@partial(jax.jit, static_argnums=1)
def _next_logits(
    params: opt.OPTParams, config: opt.OPTConfig, tokens: jax.Array, length: jax.Array
) -> jax.Array:
    """float32 [V]: what follows the first `length` of `tokens` [T]; T is compiled for."""
    return sequence_logits(opt.FAMILY, params, config, tokens)[length - 1]


def generate(
    params: opt.OPTParams,
    config: opt.OPTConfig,
    tokenizer: Tokenizer,
    prompt: str,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The prompt and its continuation, up to </s> or the end of the context.

    Args:
        params, config: The model.
        tokenizer: Of the model.
        prompt: What to continue.
        temperature: 0 is greedy.
        seed: Of the sampling.
    """
    rng = np.random.default_rng(seed)
    ids = tokenizer.encode(prompt).ids
    while len(ids) < config.max_position:
        bucket = min(-(-len(ids) // _BUCKET) * _BUCKET, config.max_position)
        padded = np.zeros(bucket, np.int32)
        padded[: len(ids)] = ids
        logits = np.asarray(_next_logits(params, config, jnp.asarray(padded), len(ids)))
        if temperature:  # the Gumbel trick: the largest of noisy logits is a sample
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        token = int(logits.argmax())
        if token == EOS_ID:
            break
        ids.append(token)
    return tokenizer.decode(ids)
