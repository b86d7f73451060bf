"""Llama-style decoders: Llama 2 and 3, Yi, Mistral, Ministral, Qwen2, Qwen2.5, Qwen3, SmolLM3,
Granite 3, OLMo-2, Phi-3 and Phi-4-mini; Gemma 2 and 3 by `jaxserve.models.families.gemma`.

RMS norms around sub-layers, rotary positions, gated feed-forward, grouped-query attention (Touvron
et al. 2023, section 2.2). Members differ by biases, where norms are, q/k norms, multipliers, tied
embeddings, rope scaling, and by which layers have a window or no rotation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models import hf as fields
from jaxserve.models.attention import AttentionParams, FusedAttention, attention_leaves
from jaxserve.models.base import (
    Attention,
    Carry,
    Experts,
    Family,
    ModelConfig,
    Params,
    StepInputs,
    layer_kinds,
)
from jaxserve.models.experts import ExpertParams, expert_leaves, gate_function, mixture
from jaxserve.models.latent import LatentAttention
from jaxserve.models.layers import (
    Linear,
    Norm,
    embed_rows,
    linear,
    linear_leaves,
    norm_leaves,
    table_leaf,
)
from jaxserve.models.rope import check_width, longest_context, rope_from_hf
from jaxserve.models.sharding import constrain
from jaxserve.pallas_kernels import add_weighted, rms_norm

PREFIX = "model."
MODEL_TYPES = (
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "olmo2",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
# By `LlamaConfig.norms`: in checkpoints, the norms before and after attention, and before and after
# the feed-forward layer.
NORMS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
# By `LlamaConfig.expert_names`: in checkpoints, a layer's experts; the gate, up and down of one.
EXPERT_NAMES: dict[str, tuple[str, tuple[str, str, str]]] = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
# What a config without the field means.
DEFAULTS: dict[str, dict[str, Any]] = {
    "smollm3": {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    "olmo2": {"rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
}
MISTRAL_WINDOW = 4096  # what a Mistral config without the field means
QWEN_WINDOW_LAYERS = 28  # likewise Qwen's max_window_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The shape of a Llama-style model.

    Attributes:
        qkv_bias: q, k and v have biases.
        out_bias: the attention's output projection has one.
        mlp_bias: the feed-forward projections have biases.
        qk_norm: q and k have RMS norms.
        norms: where a layer has norms, of `NORMS`.
        activation: of the feed-forward layer, of `pallas_kernels.ACTIVATIONS`.
        embed_scale: factor on the embeddings, rounded to their dtype.
        residual_scale: factor on what a sub-layer adds.
        joined: checkpoints have q, k and v as one tensor, and so the feed-forward layer's first
            two.
        expert_names: what checkpoints call experts, of `EXPERT_NAMES`.
    """

    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norms: str = "before"
    activation: str = "silu"
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    joined: bool = False
    expert_names: str = "qwen"


@flax.struct.dataclass
class LlamaLayer:
    """One layer's parameters.

    Attributes:
        attn_norm, attn_out_norm: [d_model], before and after attention; None where there is none.
        attn: the attention's parameters.
        mlp_norm, mlp_out_norm: likewise of the feed-forward layer.
        gate, up: [d_model, d_ff], of the feed-forward layer or of the expert that all tokens go to;
            None where it has experts only.
        down: [d_ff, d_model], likewise.
        experts: None where it has none.
    """

    attn_norm: Norm | None
    attn_out_norm: Norm | None
    attn: AttentionParams | FusedAttention | LatentAttention
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


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json; ValueError names an unsupported field."""
    fields.one_of(hf, "hidden_act", ("silu",))
    model_type = fields.one_of(hf, "model_type", MODEL_TYPES)
    hf = with_defaults(hf, DEFAULTS.get(model_type, {}))
    shape = common_fields(hf)
    rope = rope_from_hf(hf, partial=model_type == "phi3")
    check_width(rope, shape["head_dim"])
    rotated = _rotated(hf) if model_type == "smollm3" else [True] * shape["num_layers"]
    ropes = [rope if one else None for one in rotated]
    windows = _windows(hf, model_type, rotated)
    if not shape["causal"]:  # as transformers has it: so many on either side, without itself
        windows = tuple(None if one is None else one + 1 for one in windows)
    biased = model_type not in ("qwen2", "qwen2_moe", "phi3", "mixtral")
    bias = biased and fields.flag(hf, "attention_bias", False)
    qkv_bias = model_type == "qwen2" or (
        model_type == "qwen2_moe" and fields.flag(hf, "qkv_bias", True)
    )
    more: dict[str, Any] = {"attn_scale": shape["head_dim"] ** -0.5}
    if model_type == "granite":
        more = {
            "attn_scale": fields.number(hf, "attention_multiplier", 1.0),
            "embed_scale": fields.number(hf, "embedding_multiplier", 1.0),
            "residual_scale": fields.number(hf, "residual_multiplier", 1.0),
            "logit_scale": 1 / fields.number(hf, "logits_scaling", 1.0),
        }
    elif model_type == "mixtral":
        more |= {"expert_names": "mixtral"}
    elif model_type == "olmo2":
        more |= {"norms": "after", "whole_norms": True}
    return LlamaConfig(
        family="llama",
        **shape,
        **more,
        max_position=longest_context(rope, hf),
        rope=next(filter(None, ropes), None),
        sliding_window=windows[0],
        kinds=layer_kinds(ropes, windows),
        tied=fields.flag(hf, "tie_word_embeddings", False),
        experts=experts_from_hf(hf),
        qkv_bias=bias or qkv_bias,
        out_bias=bias,
        mlp_bias=model_type in ("llama", "smollm3", "granite")
        and fields.flag(hf, "mlp_bias", False),
        qk_norm=model_type in ("qwen3", "qwen3_moe", "olmo2"),
        joined=model_type == "phi3",
    )


def experts_from_hf(hf: Mapping[str, Any]) -> Experts | None:
    """The mixture of a Mixtral's or Qwen's config.json, None of other models and where no layer has
    one; ValueError names an unsupported field. Noise of routers and what balances them are for
    training only."""
    model_type = hf.get("model_type")
    if model_type == "mixtral":
        count, width, shared, normalised = "num_local_experts", "intermediate_size", 0, True
    elif model_type in ("qwen2_moe", "qwen3_moe"):
        count, width = "num_experts", "moe_intermediate_size"
        if hf.get(count) is None and hf.get("num_local_experts") is not None:
            count = "num_local_experts"  # as transformers may save it
        second = model_type == "qwen2_moe"
        shared = fields.positive_int(hf, "shared_expert_intermediate_size") if second else 0
        normalised = fields.flag(hf, "norm_topk_prob", False)
    else:
        return None
    num_experts = fields.positive_int(hf, count)
    each = fields.positive_int(hf, "num_experts_per_tok")
    if each > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most {count} ({num_experts}), got {each}"
        )
    num_layers = fields.positive_int(hf, "num_hidden_layers")
    dense = () if model_type == "mixtral" else _dense_layers(hf, num_layers)
    if len(dense) == num_layers:
        return None
    return Experts(
        num_experts=num_experts,
        experts_per_token=each,
        d_ff=fields.positive_int(hf, width),
        shared_d_ff=shared,
        normalised=normalised,
        dense_layers=dense,
    )


def _dense_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """A Qwen's layers without experts."""
    step = fields.positive_int(hf, "decoder_sparse_step", 1)
    named = hf.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in named
    ):
        what = f"must be a list of layers, 0 to {num_layers - 1}, got {fields.shown(named)}"
        raise ValueError(f"config.json: mlp_only_layers {what}")
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


def with_defaults(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The config with defaults for what is missing or null."""
    return {**hf, **{field: value for field, value in defaults.items() if hf.get(field) is None}}


def common_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `ModelConfig` that all members have alike; ValueError names an unsupported one."""
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
    return {
        "vocab_size": fields.positive_int(hf, "vocab_size"),
        "num_layers": fields.positive_int(hf, "num_hidden_layers"),
        "d_model": d_model,
        "d_ff": fields.positive_int(hf, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "eos_token_ids": fields.token_ids(hf, "eos_token_id"),
        "bos_token_id": fields.bos_token_id(hf),
        "norm_eps": fields.number(hf, "rms_norm_eps", 1e-6),
        "init_std": fields.number(hf, "initializer_range", 0.02),
        "causal": fields.flag(hf, "is_causal", True),
    }


def leaves(config: ModelConfig) -> LlamaParams:
    """The parameters' specs and places in a checkpoint, see `jaxserve.models.base.Family`."""
    assert isinstance(config, LlamaConfig)
    d, vocab, std = config.d_model, config.vocab_size, config.init_std
    return LlamaParams(
        embed_tokens=table_leaf(f"{PREFIX}embed_tokens", vocab, d, "vocab", std),
        layers=tuple(
            _layer_leaves(config, f"{PREFIX}layers.{i}", config.experts_of(i))
            for i in range(config.num_layers)
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
        dtype: of the result.
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
        attention: called once, with the normalised input where the model has norms before it.
        real: bool [T], False for padding tokens, which go to no expert; None where there are none.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        The carry, and the output [T, d_model].
    """
    config = _llama(config)

    def norm(y: jax.Array, one: Norm | None) -> jax.Array:
        if one is None:
            return y
        return rms_norm(y, one.scale, config.norm_eps, config.norm_offset)

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


def _rotated(hf: Mapping[str, Any]) -> list[bool]:
    """Of each layer of SmolLM3, whether it rotates."""
    num_layers = fields.positive_int(hf, "num_hidden_layers")
    given = hf.get("no_rope_layers")  # the ones in it are those that do
    if given is None:
        interval = fields.positive_int(hf, "no_rope_layer_interval")
        return [bool((layer + 1) % interval) for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not set(given) <= {0, 1}:
        what = f"must be a list of {num_layers} zeros and ones, got {fields.shown(given)}"
        raise ValueError(f"config.json: no_rope_layers {what}")
    return [bool(one) for one in given]


def _windows(
    hf: Mapping[str, Any], model_type: str, rotated: Sequence[bool]
) -> tuple[int | None, ...]:
    """The window of each layer in tokens; None where it has none."""
    num_layers = fields.positive_int(hf, "num_hidden_layers")
    if model_type in ("mistral", "ministral", "phi3", "mixtral"):
        missing = None if model_type in ("phi3", "mixtral") else MISTRAL_WINDOW
        given = hf.get("sliding_window", missing) is not None
        default = ["sliding_attention" if given else "full_attention"] * num_layers
    elif model_type not in ("qwen2", "qwen3", "smollm3", "qwen2_moe", "qwen3_moe"):
        default = ["full_attention"] * num_layers
    elif not fields.flag(hf, "use_sliding_window", False):
        return (None,) * num_layers
    elif model_type == "smollm3":
        given = hf.get("sliding_window") is not None
        default = [
            "sliding_attention" if given and not one else "full_attention" for one in rotated
        ]
    elif model_type == "qwen3_moe":
        default = ["sliding_attention"] * num_layers
    else:
        full = hf.get("max_window_layers", QWEN_WINDOW_LAYERS)
        if full is not None and not isinstance(full, int):
            what = f"must be int, got {fields.shown(full)}"
            raise ValueError(f"config.json: max_window_layers {what}")
        full = QWEN_WINDOW_LAYERS if full is None else full
        has_window = [
            layer < full and layer % 2 == 0 if model_type == "qwen2_moe" else layer >= full
            for layer in range(num_layers)
        ]
        default = ["sliding_attention" if one else "full_attention" for one in has_window]
    kinds = fields.layer_types(hf, num_layers, default)
    own_kinds = ("qwen2", "qwen3", "smollm3", "ministral", "qwen2_moe")
    if kinds != default and model_type not in own_kinds:
        raise ValueError(
            f"config.json: layer_types is not supported with model_type {model_type!r}, whose "
            "layers are alike"
        )
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = fields.positive_int(hf, "sliding_window", MISTRAL_WINDOW)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_leaves(config: LlamaConfig, name: str, experts: Experts | None) -> LlamaLayer:
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
        d_ff, mlp = experts.shared_d_ff, "mlp.shared_expert"
    attn_norm, attn_out_norm, mlp_norm, mlp_out_norm = (
        None if part is None else norm_leaves(f"{name}.{part}", d, offset=config.norm_offset)
        for part in NORMS[config.norms]
    )
    gate, up, gate_rows, up_rows = f"{mlp}.gate_proj", f"{mlp}.up_proj", None, None
    if config.joined:
        gate = up = "mlp.gate_up_proj"
        gate_rows, up_rows = (0, 2 * d_ff), (d_ff, 2 * d_ff)
    return LlamaLayer(
        attn_norm=attn_norm,
        attn_out_norm=attn_out_norm,
        attn=attention_leaves(
            config,
            f"{name}.self_attn",
            out="o_proj",
            bias=config.qkv_bias,
            out_bias=config.out_bias,
            head_norms=config.qk_norm,
            joined="qkv_proj" if config.joined else None,
        ),
        mlp_norm=mlp_norm,
        mlp_out_norm=mlp_out_norm,
        gate=projection(gate, (d, d_ff), ("embed", "mlp"), gate_rows) if d_ff else None,
        up=projection(up, (d, d_ff), ("embed", "mlp"), up_rows) if d_ff else None,
        down=projection(f"{mlp}.down_proj", (d_ff, d), ("mlp", "embed")) if d_ff else None,
        experts=None if experts is None else _expert_leaves(config, name, experts),
    )


def _expert_leaves(config: LlamaConfig, name: str, experts: Experts) -> ExpertParams:
    block, parts = EXPERT_NAMES[config.expert_names]
    gate, up, down = (f"{name}.{block}.experts.*.{part}" for part in parts)
    return expert_leaves(
        experts,
        config.d_model,
        router=f"{name}.{block}.gate",
        names=(gate, up, down),
        shared_gate=f"{name}.{block}.shared_expert_gate" if experts.shared_d_ff else None,
        std=config.init_std,
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
