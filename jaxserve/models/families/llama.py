"""Llama-style decoders: Llama 2 and 3, Yi, Mistral, Ministral, Qwen2, Qwen2.5, Qwen3, SmolLM3,
Granite 3, OLMo-2, Phi-3, Phi-4-mini and GLM-4.5; other modules of this package make configs of
Gemma, gpt-oss, DeepSeek and Qwen3-Next for the same layers.

RMS norms around sub-layers, rotary positions, gated feed-forward, grouped-query attention (Touvron
et al. 2023, section 2.2). The table of `jaxserve.models.families.llama_types` has the differences
between its members.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.attention import AttentionParams, FusedAttention, attention_leaves
from jaxserve.models.base import (
    Attention,
    Carry,
    Experts,
    Family,
    LayerKind,
    ModelConfig,
    Params,
    StepInputs,
)
from jaxserve.models.delta import DeltaParams, DeltaParts, delta_leaves
from jaxserve.models.experts import ExpertParams, expert_leaves, gate_function, mixture
from jaxserve.models.families.llama_config import EXPERT_NAMES, NORMS, LlamaConfig
from jaxserve.models.families.llama_types import MODEL_TYPES, config_from_hf
from jaxserve.models.latent import LatentAttention, latent_leaves
from jaxserve.models.layers import (
    Linear,
    Norm,
    embed_rows,
    linear,
    linear_leaves,
    norm_leaves,
    table_leaf,
)
from jaxserve.models.sharding import constrain
from jaxserve.pallas_kernels import add_weighted, rms_norm

PREFIX = "model."


@flax.struct.dataclass
class LlamaLayer:
    """One layer's parameters.

    Attributes:
        attn_norm, attn_out_norm: [d_model], before and after attention; None if there is none.
        attn: the attention's parameters.
        mlp_norm, mlp_out_norm: likewise for the feed-forward layer.
        gate, up: [d_model, d_ff], of the feed-forward layer or of the shared expert; None if there
            are only other experts.
        down: [d_ff, d_model], likewise.
        experts: the experts; None if there are none.
    """

    attn_norm: Norm | None
    attn_out_norm: Norm | None
    attn: AttentionParams | FusedAttention | LatentAttention | DeltaParts | DeltaParams
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    gate: Linear | None
    up: Linear | None
    down: Linear | None
    experts: ExpertParams | None = None


@flax.struct.dataclass
class LlamaParams:
    """All parameters.

    Attributes:
        embed_tokens: [V, d_model].
        layers: one entry per layer, in order.
        final_norm: [d_model].
        lm_head: [V, d_model]; None if tied to embed_tokens.
    """

    embed_tokens: Params
    layers: tuple[LlamaLayer, ...]
    final_norm: Norm
    lm_head: Params | None


def leaves(config: ModelConfig) -> LlamaParams:
    """The parameters' specs and places in a checkpoint, see `jaxserve.models.base.Family`."""
    assert isinstance(config, LlamaConfig)
    d, vocab, std = config.d_model, config.vocab_size, config.init_std
    return LlamaParams(
        embed_tokens=table_leaf(f"{PREFIX}embed_tokens", vocab, d, "vocab", std),
        layers=tuple(
            _layer_leaves(config, f"{PREFIX}layers.{i}", config.experts_of(i), kind)
            for i, kind in enumerate(config.layer_kinds)
        ),
        final_norm=norm_leaves(f"{PREFIX}norm", d, offset=config.norm_offset),
        lm_head=None if config.tied else table_leaf("lm_head", vocab, d, "vocab", std),
    )


def embed(
    params: LlamaParams,
    config: ModelConfig,
    inputs: StepInputs,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None,
) -> jax.Array:
    """Token embeddings, see `jaxserve.models.base.Embed`.

    Args:
        params: the model's parameters.
        config: its shape.
        inputs: the tokens.
        dtype: dtype of the result.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [T, d_model].
    """
    x = embed_rows(params.embed_tokens, inputs.tokens, dtype)
    if _llama(config).embed_scale != 1:
        x = x * jnp.asarray(_llama(config).embed_scale, x.dtype)
    return constrain(x, mesh, None, None)


def layer(
    weights: LlamaLayer,
    config: ModelConfig,
    x: jax.Array,
    attention: Attention,
    *,
    real: jax.Array | None,
    mesh: Mesh | None,
) -> tuple[Carry, jax.Array]:
    """One layer, see `jaxserve.models.base.Layer`.

    Args:
        weights: the layer's parameters.
        config: the model's shape.
        x: [T, d_model].
        attention: called once, with the input, normalised if the model has norms before it.
        real: bool [T], False for padding tokens, which go to no expert; None if there are none.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        The carry, and the output [T, d_model].
    """
    config = _llama(config)

    def norm(y: jax.Array, norm_weights: Norm | None) -> jax.Array:
        if norm_weights is None:
            return y
        return rms_norm(y, norm_weights.scale, config.norm_eps, config.norm_offset)

    def added(x: jax.Array, y: jax.Array) -> jax.Array:
        if config.residual_scale == 1:
            return constrain(x + y, mesh, None, None)
        scale = jnp.full((len(y), 1), config.residual_scale, jnp.float32)
        return constrain(add_weighted(x, y, scale), mesh, None, None)

    carry, mixed = attention(norm(x, weights.attn_norm))
    x = added(x, norm(mixed, weights.attn_out_norm))
    h = norm(x, weights.mlp_norm)
    gated = gate_function(config.activation, config.experts)
    y = None
    if weights.gate is not None and weights.up is not None and weights.down is not None:
        gate = constrain(linear(h, weights.gate, mesh), mesh, None, "mlp")
        up = constrain(linear(h, weights.up, mesh), mesh, None, "mlp")
        y = linear(gated(gate, up), weights.down, mesh)
    if weights.experts is not None:
        assert config.experts is not None
        y = mixture(h, weights.experts, config.experts, gated, y, real=real, mesh=mesh)
    assert y is not None
    return carry, added(x, norm(y, weights.mlp_out_norm))


def finish(
    params: LlamaParams, config: ModelConfig, x: jax.Array, *, mesh: Mesh | None
) -> jax.Array:
    """The final norm, see `jaxserve.models.base.Finish`.

    Args:
        params: the model's parameters.
        config: its shape.
        x: [R, d_model].
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [R, d_model].
    """
    return rms_norm(x, params.final_norm.scale, config.norm_eps, config.norm_offset)


def _llama(config: ModelConfig) -> LlamaConfig:
    assert isinstance(config, LlamaConfig)
    return config


def _layer_leaves(
    config: LlamaConfig, name: str, experts: Experts | None, kind: LayerKind
) -> LlamaLayer:
    def projection(
        part: str,
        shape: tuple[int, int],
        axes: tuple[str, str],
        rows: tuple[int, int] | None = None,
    ) -> Linear:
        full = f"{name}.{part}"
        return linear_leaves(
            full, shape, axes, bias=config.mlp_bias, std=config.init_std, rows=rows
        )

    d, d_ff, mlp = config.d_model, config.d_ff, "mlp"
    if experts is not None:
        d_ff, mlp = experts.shared_d_ff, EXPERT_NAMES[config.expert_names].shared or mlp
    attn_norm, attn_out_norm, mlp_norm, mlp_out_norm = (
        None if part is None else norm_leaves(f"{name}.{part}", d, offset=config.norm_offset)
        for part in NORMS[config.norms]
    )
    gate, up, gate_rows, up_rows = f"{mlp}.gate_proj", f"{mlp}.up_proj", None, None
    if config.joined:
        gate = up = "mlp.gate_up_proj"
        gate_rows, up_rows = (0, 2 * d_ff), (d_ff, 2 * d_ff)
    attn: AttentionParams | LatentAttention | DeltaParts
    if kind.state:
        attn = delta_leaves(config, f"{name}.linear_attn", apart=config.delta_apart)
    elif config.latent is not None:
        attn = latent_leaves(config, f"{name}.self_attn", bias=config.qkv_bias)
    else:
        attn = attention_leaves(
            config,
            f"{name}.self_attn",
            out="o_proj",
            bias=config.qkv_bias,
            out_bias=config.out_bias,
            head_norms=config.qk_norm,
            joined="qkv_proj" if config.joined else None,
        )
    return LlamaLayer(
        attn_norm=attn_norm,
        attn_out_norm=attn_out_norm,
        attn=attn,
        mlp_norm=mlp_norm,
        mlp_out_norm=mlp_out_norm,
        gate=projection(gate, (d, d_ff), ("embed", "mlp"), gate_rows) if d_ff else None,
        up=projection(up, (d, d_ff), ("embed", "mlp"), up_rows) if d_ff else None,
        down=projection(f"{mlp}.down_proj", (d_ff, d), ("mlp", "embed")) if d_ff else None,
        experts=None if experts is None else _expert_leaves(config, name, experts),
    )


def _expert_leaves(config: LlamaConfig, name: str, experts: Experts) -> ExpertParams:
    block, parts, _, of_shared = EXPERT_NAMES[config.expert_names]
    gate, up, down = (f"{name}.{block}.experts.*.{part}" for part in parts)
    return expert_leaves(
        experts,
        config.d_model,
        router=f"{name}.{block}.gate",
        names=(gate, up, down),
        shared_gate=f"{name}.{of_shared}" if experts.shared_d_ff and of_shared else None,
        std=config.init_std,
    )


FAMILY = Family(
    name="llama",
    model_types=tuple(MODEL_TYPES),
    prefix=PREFIX,
    config_from_hf=config_from_hf,
    leaves=leaves,
    embed=embed,
    layer=layer,
    finish=finish,
)
