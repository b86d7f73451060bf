"""Runs a model of any family: the embedding, the layers one after another, the logits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models import base
from jaxserve.models.attention import attention_input, attention_output
from jaxserve.models.delta import DeltaParams, delta_input, delta_output
from jaxserve.models.layer_groups import LayerGroups
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
    groups: LayerGroups | None = None,
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
        groups: which layers share block lists; None if all do.

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
        of: tuple[base.LayerKind, int],
    ) -> tuple[base.Carry, jax.Array]:
        (carry, x), (kind, group) = state, of

        def attention(h: jax.Array) -> tuple[base.Carry, jax.Array]:
            if isinstance(weights.attn, DeltaParams):
                states, gate = delta_input(weights.attn, config, h, group, mesh)
                after, mixed = attend(carry, index, states)
                mixed = delta_output(weights.attn, config, mixed, gate)
                return after, linear(mixed, weights.attn.o, mesh)
            rotation = rotations[kind.rope]
            inputs = attention_input(weights.attn, config, h, kind, rotation, mesh)
            after, mixed = attend(carry, index, inputs._replace(group=group))
            mixed = attention_output(weights.attn, config, mixed, inputs.gate, mesh)
            mixed = mixed.astype(h.dtype).reshape(len(mixed), -1)
            return after, linear(mixed, weights.attn.o, mesh)

        return family.layer(weights, config, x, attention, real=inputs.real, mesh=mesh)

    dtype = dtype or params.embed_tokens.dtype
    x = family.embed(params, config, inputs, dtype=dtype, mesh=mesh)
    places = [(0, i) for i in range(len(kinds))] if groups is None else groups.places
    return over_layers(
        one_layer,
        (carry, x),
        params.layers,
        [(kind, group) for kind, (group, _) in zip(kinds, places, strict=True)],
        [slot for _, slot in places],
    )


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
    kinds: Sequence[Hashable] | None = None,
    numbers: Sequence[int] | None = None,
) -> State:
    """The state after step(state, layer's tree, layer's number) for each layer in turn.

    Args:
        state: a tree of arrays whose shapes the step keeps.
        layers: a tree of arrays for each layer; layers of a kind mostly have the same structure and
            shapes.
        kinds: what differs between layers, which the step takes as a fourth argument; None if it
            takes none.
        numbers: the number of each layer; None for its index.

    The program has every layer in it, and so reads each layer's arrays where they are. A scan over
    layers would need stacked weights, and would copy every weight in each step: a decode step of
    OPT-125M on two CPU cores took 85 ms instead of 8, and OPT-13B no longer fitted on eight TPU
    v5e. Weights that are stored stacked do not help: XLA slices each layer's out of the stack into
    temporaries. The price is compile time on TPUs: 13 s instead of 10 for OPT-13B's decode step on
    v5e.
    """
    # Traced only for the first layer of each kind; XLA inlines the calls.
    once = jax.jit(step, static_argnums=() if kinds is None else 3)
    for index, layer in enumerate(layers):
        kind = () if kinds is None else (kinds[index],)
        state = once(state, layer, np.int32(index if numbers is None else numbers[index]), *kind)
    return state
