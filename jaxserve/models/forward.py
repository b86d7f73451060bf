"""Runs a model of any family: the embedding, the layers one after another, the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models import base
from jaxserve.models.attention import attention_input
from jaxserve.models.layers import linear, vocab_logits
from jaxserve.models.rope import angles

State = TypeVar("State")


def forward(
    family: base.Family,
    params: base.Params,
    config: base.ModelConfig,
    inputs: base.StepInputs,
    attend: base.Attend,
    carry: base.Carry,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> tuple[base.Carry, jax.Array]:
    """Runs the embedding and all layers.

    Args:
        family: the model's.
        params: its parameters.
        config: its shape.
        inputs: the tokens.
        attend: called by each layer in order, with the carry that the previous layer returned.
        carry: the first layer's carry.
        dtype: dtype of the activations: that of the parameters or wider, see `layers.matmul`. None
            for that of the parameters.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        The carry, and the last layer's output [T, d_model] in the dtype of the activations.
    """
    kinds = config.layer_kinds
    rotations = {
        rope: None if rope is None else angles(rope, config.rotated_dim, inputs.positions)
        for rope in dict.fromkeys(kind.rope for kind in kinds)
    }

    def one_layer(
        state: tuple[base.Carry, jax.Array],
        weights: base.Params,
        index: base.LayerIndex,
        kind: base.LayerKind,
    ) -> tuple[base.Carry, jax.Array]:
        carry, x = state

        def attention(h: jax.Array) -> tuple[base.Carry, jax.Array]:
            rotation = rotations[kind.rope]
            inputs = attention_input(weights.attn, config, h, kind, rotation, mesh)
            after, mixed = attend(carry, index, inputs)
            mixed = mixed[..., : config.value_dim].astype(h.dtype).reshape(len(mixed), -1)
            return after, linear(mixed, weights.attn.o, mesh)

        return family.layer(weights, config, x, attention, real=inputs.real, mesh=mesh)

    dtype = dtype or params.embed_tokens.dtype
    x = family.embed(params, config, inputs, dtype=dtype, mesh=mesh)
    return over_layers(one_layer, (carry, x), params.layers, kinds)


def logits(
    family: base.Family,
    params: base.Params,
    config: base.ModelConfig,
    x: jax.Array,
    *,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Logits of the last layer's output.

    Args:
        family: the model's.
        params: its parameters.
        config: its shape.
        x: [R, d_model].
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        float32 [R, vocab_size], replicated.
    """
    table = params.embed_tokens if params.lm_head is None else params.lm_head
    hidden = family.finish(params, config, x, mesh=mesh)
    scores = vocab_logits(hidden, table, config.vocab_size, mesh)
    if config.logit_scale != 1:
        scores = scores * config.logit_scale
    if config.logit_cap is None:
        return scores
    return config.logit_cap * jnp.tanh(scores / config.logit_cap)


def over_layers(
    step: Callable[..., State],
    state: State,
    layers: tuple[Any, ...],
    kinds: tuple[base.LayerKind, ...] | None = None,
) -> State:
    """The state after step(state, layer's tree, layer's index) for each layer in turn.

    Args:
        state: a tree of arrays whose shapes the step keeps.
        layers: a tree of arrays for each layer; layers of a kind mostly have the same structure and
            shapes.
        kinds: the kind of each layer, which the step takes as a fourth argument; None if it does
            not. The program has every layer in it, and so reads each layer's arrays where they are.
            A scan over layers would need stacked weights, and would copy every weight in each step:
            a decode step of OPT-125M on two CPU cores took 85 ms instead of 8, and OPT-13B no
            longer fitted on eight TPU v5e. Weights that are stored stacked do not help: XLA slices
            each layer's out of the stack into temporaries. The price is compile time on TPUs: 13 s
            instead of 10 for OPT-13B's decode step on v5e.
    """
    # Traced only for the first layer of each kind; XLA inlines the calls.
    once = jax.jit(step, static_argnums=() if kinds is None else 3)
    for index, layer in enumerate(layers):
        kind = () if kinds is None else (kinds[index],)
        state = once(state, layer, np.int32(index), *kind)
    return state
