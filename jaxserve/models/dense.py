"""Attention over whole sequences, without a cache: for training, for tests, and for models whose
tokens also see later ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models import base
from jaxserve.models.forward import forward, logits
from jaxserve.pallas_kernels import DeltaInput, recur_text
from jaxserve.pallas_kernels.pool import join_halves

_MASKED = -1e30  # finite, so that a fully masked row gives no NaN
_TILE = 64  # queries whose scores are in memory at once


def causal_attend(config: base.ModelConfig) -> base.Attend:
    """An `Attend` for tokens 0..T-1 of one sequence, in order; the carry passes through.

    Scores and softmax are in float32. Keys further back than the layer's window are masked. If the
    model is not causal, as `attend_both_ways`.
    """
    if not config.causal:
        return attend_both_ways(config)

    def attend(
        carry: base.Carry, layer: base.LayerIndex, inputs: base.AttentionInput | DeltaInput
    ) -> tuple[base.Carry, jax.Array]:
        if isinstance(inputs, DeltaInput):
            return carry, recur_text(inputs)
        num_tokens, num_heads, head_dim = inputs.q.shape
        num_kv_heads = inputs.k.shape[1]
        q = inputs.q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        k, v = _keys_and_values(config, inputs)
        scores = jnp.einsum("tkgd,skd->kgts", q, k, preferred_element_type=jnp.float32)
        scores = scores * config.attn_scale
        if config.soft_cap is not None:
            scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
        window = inputs.kind.sliding_window
        scores = jnp.where(_mask(window, num_tokens), scores, _MASKED)
        if inputs.sinks is not None:
            sinks = inputs.sinks.astype(jnp.float32).reshape(*scores.shape[:2], 1, 1)
            shape = (*scores.shape[:3], 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, shape)], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
        mixed = jnp.einsum("kgts,skd->tkgd", weights, v)
        return carry, mixed.reshape(num_tokens, num_heads, -1)

    return attend


def attend_both_ways(
    config: base.ModelConfig,
    rows: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> base.Attend:
    """An `Attend` for whole sequences, whose tokens see all of their sequence; the carry passes
    through.

    Args:
        config: the model's.
        rows: int32 [T], the sequence of each token; None for one sequence.
        positions: int32 [T], its place in the sequence; None for the order of tokens.
    """

    def attend(
        carry: base.Carry, layer: base.LayerIndex, inputs: base.AttentionInput | DeltaInput
    ) -> tuple[base.Carry, jax.Array]:
        assert not isinstance(inputs, DeltaInput)
        num_tokens, num_heads, head_dim = inputs.q.shape
        window, (k, v) = inputs.kind.sliding_window, _keys_and_values(config, inputs)
        row = jnp.zeros(num_tokens, jnp.int32) if rows is None else rows
        at = jnp.arange(num_tokens, dtype=jnp.int32) if positions is None else positions
        # Values of another sequence may be NaN, and 0 times NaN is NaN.
        broken = ~jnp.isfinite(v).all(axis=(1, 2))
        v = jnp.where(broken[:, None, None], 0, v)

        def one(query: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, mine, place = query
            seen = row == mine
            if window is not None:
                seen &= jnp.abs(at - place) < window
            scores = jnp.einsum("kgd,skd->kgs", q, k, preferred_element_type=jnp.float32)
            scores = scores * config.attn_scale
            if config.soft_cap is not None:
                scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
            scores = jnp.where(seen, scores, _MASKED)
            if inputs.sinks is not None:
                sinks = inputs.sinks.astype(jnp.float32).reshape(*scores.shape[:2], 1)
                scores = jnp.concatenate([scores, sinks], axis=-1)
            weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
            mixed = jnp.einsum("kgs,skd->kgd", weights, v)
            return jnp.where((seen & broken).any(), jnp.nan, mixed)

        q = inputs.q.reshape(num_tokens, k.shape[1], num_heads // k.shape[1], head_dim)
        mixed = jax.lax.map(one, (q, row, at), batch_size=min(_TILE, num_tokens))
        return carry, mixed.reshape(num_tokens, num_heads, -1)

    return attend


def sequence_logits(
    family: base.Family,
    params: base.Params,
    config: base.ModelConfig,
    tokens: jax.Array,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Logits of every position of one sequence, without a cache.

    Args:
        family: the model's.
        params: its parameters.
        config: its shape.
        tokens: int32 [T].
        dtype: dtype of the activations, see `jaxserve.models.forward.forward`.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        float32 [T, vocab_size].
    """
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    inputs = base.StepInputs(tokens, positions, jnp.zeros_like(positions))
    attend = causal_attend(config)
    _, x = forward(family, params, config, inputs, attend, (), dtype=dtype, mesh=mesh)
    return logits(family, params, config, x, mesh=mesh)


def _keys_and_values(
    config: base.ModelConfig, inputs: base.AttentionInput
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all tokens, [T, kv_heads, any]."""
    if not config.halves:
        return inputs.k, inputs.v
    halves = (inputs.k, None), (inputs.v, None)
    keys = join_halves(*halves, inputs.k.dtype, config.halves)
    return keys, keys[..., : 2 * config.halves]


def _mask(window: int | None, num_tokens: int) -> jax.Array:
    """bool [T, T]: query t may see key s."""
    behind = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None, :]
    visible = behind >= 0
    if window is not None:
        visible &= behind < window
    return visible
