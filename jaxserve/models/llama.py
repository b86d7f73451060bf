"""Llama-style decoders: Llama 2 and 3, Yi, Mistral, Qwen2, Qwen2.5 and Qwen3.

RMSNorm before each sub-layer, rotary positions, gated SiLU feed-forward, grouped-query attention
(Touvron et al. 2023, section 2.2). Members differ by biases, per-head q/k norms (Qwen3), tied
embeddings, rope scaling and sliding windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models import hf as fields
from jaxserve.models.attention import AttentionParams, FusedAttention, attention_leaves
from jaxserve.models.base import (
    Attention,
    Carry,
    Family,
    ModelConfig,
    Params,
    StepInputs,
    layer_kinds,
)
from jaxserve.models.layers import (
    Linear,
    Norm,
    embed_rows,
    linear,
    linear_leaves,
    norm_leaves,
    rms_norm,
    table_leaf,
)
from jaxserve.models.rope import rope_from_hf, stretched_max_position
from jaxserve.models.sharding import constrain

PREFIX = "model."
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MISTRAL_WINDOW = 4096  # what a Mistral config without the field means
QWEN_WINDOW_LAYERS = 28  # likewise Qwen's max_window_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The shape of a Llama-style model.

    Attributes:
        qkv_bias: q, k and v have biases.
        out_bias: the attention's output projection has one.
        mlp_bias: the feed-forward projections have biases.
        qk_norm: q and k have RMS norms over each head.
    """

    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool


@flax.struct.dataclass
class LlamaLayer:
    """One layer's parameters.

    Attributes:
        attn_norm: [d_model], before attention.
        attn: the attention's parameters.
        mlp_norm: [d_model], before the feed-forward layer.
        gate, up: [d_model, d_ff].
        down: [d_ff, d_model].
    """

    attn_norm: Norm
    attn: AttentionParams | FusedAttention
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


@flax.struct.dataclass
class LlamaParams:
    """All parameters.

    Attributes:
        embed_tokens: [V, d_model].
        layers: one entry a layer, in order.
        final_norm: [d_model].
        lm_head: [V, d_model]; None if tied to embed_tokens.
    """

    embed_tokens: Params
    layers: tuple[LlamaLayer, ...]
    final_norm: Norm
    lm_head: Params | None


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json; ValueError names an unsupported field."""
    fields.one_of(hf, "hidden_act", ("silu",))
    model_type = fields.one_of(hf, "model_type", MODEL_TYPES)
    d_model = fields.positive_int(hf, "hidden_size")
    num_heads = fields.positive_int(hf, "num_attention_heads")
    num_kv_heads = fields.positive_int(hf, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    head_dim = fields.positive_int(hf, "head_dim", max(d_model // num_heads, 1))
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim {head_dim} must be even for rotary positions")
    rope = rope_from_hf(hf)
    windows = _windows(hf, model_type)
    max_position = fields.positive_int(hf, "max_position_embeddings")
    bias = model_type != "qwen2" and fields.flag(hf, "attention_bias", False)
    return LlamaConfig(
        family="llama",
        vocab_size=fields.positive_int(hf, "vocab_size"),
        num_layers=fields.positive_int(hf, "num_hidden_layers"),
        d_model=d_model,
        d_ff=fields.positive_int(hf, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=stretched_max_position(rope, max_position),
        attn_scale=head_dim**-0.5,
        sliding_window=windows[0],
        kinds=layer_kinds([rope] * len(windows), windows),
        eos_token_ids=fields.token_ids(hf, "eos_token_id"),
        bos_token_id=fields.bos_token_id(hf),
        norm_eps=fields.number(hf, "rms_norm_eps", 1e-6),
        tied=fields.flag(hf, "tie_word_embeddings", False),
        init_std=fields.number(hf, "initializer_range", 0.02),
        rope=rope,
        qkv_bias=bias or model_type == "qwen2",
        out_bias=bias,
        mlp_bias=model_type == "llama" and fields.flag(hf, "mlp_bias", False),
        qk_norm=model_type == "qwen3",
    )


def leaves(config: ModelConfig) -> LlamaParams:
    """The parameters' specs and places in a checkpoint, see `jaxserve.models.base.Family`."""
    assert isinstance(config, LlamaConfig)
    d, vocab, std = config.d_model, config.vocab_size, config.init_std
    return LlamaParams(
        embed_tokens=table_leaf(f"{PREFIX}embed_tokens", vocab, d, "vocab", std),
        layers=tuple(
            _layer_leaves(config, f"{PREFIX}layers.{i}") for i in range(config.num_layers)
        ),
        final_norm=norm_leaves(f"{PREFIX}norm", d),
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
        dtype: of the result.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [T, d_model].
    """
    x = embed_rows(params.embed_tokens, inputs.tokens, dtype)
    return constrain(x, mesh, None, None)


def layer(
    weights: LlamaLayer,
    config: ModelConfig,
    x: jax.Array,
    attention: Attention,
    *,
    mesh: Mesh | None,
) -> tuple[Carry, jax.Array]:
    """One layer, see `jaxserve.models.base.Layer`.

    Args:
        weights: the layer's parameters.
        config: the model's shape.
        x: [T, d_model].
        attention: called once, with the normalised input.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        The carry, and the output [T, d_model].
    """
    carry, mixed = attention(rms_norm(x, weights.attn_norm.scale, config.norm_eps))
    x = constrain(x + mixed, mesh, None, None)
    h = rms_norm(x, weights.mlp_norm.scale, config.norm_eps)
    gate = jax.nn.silu(constrain(linear(h, weights.gate, mesh), mesh, None, "mlp"))
    h = gate * constrain(linear(h, weights.up, mesh), mesh, None, "mlp")
    return carry, constrain(x + linear(h, weights.down, mesh), mesh, None, None)


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
    return rms_norm(x, params.final_norm.scale, config.norm_eps)


def _windows(hf: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    """The window of each layer in tokens; None where it has none."""
    num_layers = fields.positive_int(hf, "num_hidden_layers")
    if model_type == "llama":
        return (None,) * num_layers
    if model_type == "mistral":
        given = hf.get("sliding_window", MISTRAL_WINDOW) is not None
        default = ["sliding_attention" if given else "full_attention"] * num_layers
    elif not fields.flag(hf, "use_sliding_window", False):
        return (None,) * num_layers
    else:
        full = hf.get("max_window_layers", QWEN_WINDOW_LAYERS)
        if full is not None and not isinstance(full, int):
            what = f"must be int, got {fields.shown(full)}"
            raise ValueError(f"config.json: max_window_layers {what}")
        full = QWEN_WINDOW_LAYERS if full is None else full
        default = [
            "sliding_attention" if layer >= full else "full_attention"
            for layer in range(num_layers)
        ]
    kinds = fields.layer_types(hf, num_layers, default)
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = fields.positive_int(hf, "sliding_window", MISTRAL_WINDOW)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_leaves(config: LlamaConfig, name: str) -> LlamaLayer:
    def projection(part: str, shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
        full = f"{name}.{part}"
        return linear_leaves(full, shape, axes, bias=config.mlp_bias, std=config.init_std)

    d, d_ff = config.d_model, config.d_ff
    return LlamaLayer(
        attn_norm=norm_leaves(f"{name}.input_layernorm", d),
        attn=attention_leaves(
            config,
            f"{name}.self_attn",
            out="o_proj",
            bias=config.qkv_bias,
            out_bias=config.out_bias,
            head_norms=config.qk_norm,
        ),
        mlp_norm=norm_leaves(f"{name}.post_attention_layernorm", d),
        gate=projection("mlp.gate_proj", (d, d_ff), ("embed", "mlp")),
        up=projection("mlp.up_proj", (d, d_ff), ("embed", "mlp")),
        down=projection("mlp.down_proj", (d_ff, d), ("mlp", "embed")),
    )


FAMILY = Family(
    name="llama",
    model_types=MODEL_TYPES,
    prefix=PREFIX,
    config_from_hf=config_from_hf,
    leaves=leaves,
    embed=embed,
    layer=layer,
    finish=finish,
)
