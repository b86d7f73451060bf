"""Log-probabilities of prompt tokens, computed on the device after the model's step.

The model's step computes logits of one token per row, the last. Those of a prompt's other tokens
are computed from the step's last layer by a separate program, which runs only after batches in
which a request asks for them: the others pay nothing, and no model is compiled twice. It handles a
slice of the tokens at a time, as many as the step has rows, at most MAX_SLICE. So it needs no more
memory than sampling, [slice, vocabulary] in float32 a few times over, however many tokens there
are. Its output has 168 bytes per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.engine.device.batch_layout import NO_TARGET
from jaxserve.engine.device.sampling import SampleResult, with_logprobs, without_logprobs
from jaxserve.engine.device.step_model import StepModel, compiler_options
from jaxserve.models.base import Params
from jaxserve.models.forward import logits

MAX_SLICE = 64

# (params, hidden [T, d_model], targets int32 [T], *, rows) -> results for each target, [T]
PromptStep = Callable[..., SampleResult]


@lru_cache(maxsize=8)
def make_prompt_step(model: StepModel, deterministic: Any = None) -> PromptStep:
    """The program of the model, jitted over the rows of its steps. Engines of the same model in one
    process share it. deterministic: the pool's format, after deterministic steps."""
    whole = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())
    options = compiler_options(deterministic, deterministic=True) if deterministic else None
    return jax.jit(
        partial(_prompt_step, model),
        static_argnames=("rows",),
        out_shardings=whole,
        compiler_options=options,
    )


def _prompt_step(
    model: StepModel, params: Params, hidden: jax.Array, targets: jax.Array, *, rows: int
) -> SampleResult:
    """Scores a step's targets. hidden: [T, d_model], the last layer's output. targets: [T], the
    token that follows each, or NO_TARGET. A slice with only NO_TARGET costs nothing."""
    tokens = targets.shape[0]
    size = min(MAX_SLICE, rows, tokens)
    padding = -tokens % size
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1])
    sliced = jnp.pad(targets, (0, padding), constant_values=NO_TARGET).reshape(-1, size)

    def known(hidden: jax.Array, targets: jax.Array) -> SampleResult:
        raw = logits(model.family, params, model.config, hidden, mesh=model.mesh)
        return with_logprobs(raw, targets)

    def unknown(hidden: jax.Array, targets: jax.Array) -> SampleResult:
        return without_logprobs(targets, model.config.vocab_size)

    def one(piece: tuple[jax.Array, jax.Array]) -> SampleResult:
        hidden, targets = piece
        wanted = jnp.any(targets != NO_TARGET)
        return lax.cond(wanted, known, unknown, hidden, jnp.maximum(targets, 0))

    found = lax.map(one, (hidden, sliced))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:tokens], found)
