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
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models import hf as fields
from jaxserve.models.base import (
    Attend,
    AttentionInput,
    Carry,
    Family,
    KVProjection,
    KVWeights,
    ModelConfig,
    Params,
    count_params,
    leaf_sources,
    leaf_specs,
)
from jaxserve.models.layers import (
    Linear,
    Norm,
    embed,
    linear,
    linear_leaves,
    norm_leaves,
    rms_norm,
    table_leaf,
    vocab_logits,
)
from jaxserve.models.rope import (
    Rope,
    angle_table,
    angles,
    rope_from_hf,
    rotate,
    stretched_max_position,
)
from jaxserve.models.sharding import constrain

PREFIX = "model."
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MISTRAL_WINDOW = 4096  # what a Mistral config without the field means
QWEN_WINDOW_LAYERS = 28  # likewise Qwen's max_window_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A Llama-style shape; the flags say which biases and norms its checkpoints have."""

    rope: Rope
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    init_std: float

    def num_params(self) -> int:
        return count_params(param_specs(self))


@flax.struct.dataclass
class LlamaLayers:
    """The layers' parameters, each leaf stacked [layers, ...]; q_norm and k_norm Qwen3 only."""

    attn_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


@flax.struct.dataclass
class LlamaParams:
    """All parameters; lm_head [V, d_model] is None where it is tied to embed_tokens."""

    embed_tokens: Params
    layers: LlamaLayers
    final_norm: Norm
    lm_head: Params | None


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json; ValueError names an unsupported field."""
    fields.refuse_quantized(hf)
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
        sliding_window=_sliding_window(hf, model_type),
        eos_token_ids=fields.token_ids(hf, "eos_token_id"),
        bos_token_id=fields.bos_token_id(hf),
        rope=rope,
        norm_eps=fields.number(hf, "rms_norm_eps", 1e-6),
        qkv_bias=bias or model_type == "qwen2",
        out_bias=bias,
        mlp_bias=model_type == "llama" and fields.flag(hf, "mlp_bias", False),
        qk_norm=model_type == "qwen3",
        tied=fields.flag(hf, "tie_word_embeddings", False),
        init_std=fields.number(hf, "initializer_range", 0.02),
    )


def param_specs(config: LlamaConfig) -> LlamaParams:
    """The tree of `ParamSpec`."""
    return leaf_specs(_leaves(config))


def hf_layout(config: LlamaConfig) -> LlamaParams:
    """The tree of `HFTensor`."""
    return leaf_sources(_leaves(config))


def forward(
    params: LlamaParams,
    config: LlamaConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    carry: Carry,
    *,
    mesh: Mesh | None = None,
) -> tuple[Carry, jax.Array]:
    """Runs the layers; see `jaxserve.models.base.Forward`."""
    x = constrain(embed(params.embed_tokens, tokens), mesh, None, None)
    rotation = angles(config.rope, config.head_dim, positions)

    def step(
        state: tuple[jax.Array, Carry], scanned: tuple[LlamaLayers, jax.Array]
    ) -> tuple[tuple[jax.Array, Carry], None]:
        x, carry = state
        layer, index = scanned
        inputs = _attention_input(layer, config, x, rotation, mesh)
        carry, mixed = attend(carry, index, inputs)
        return (_finish_layer(layer, config, x, mixed, mesh), carry), None

    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, carry), _ = jax.lax.scan(step, (x, carry), (params.layers, indices))
    return carry, rms_norm(x, params.final_norm.scale, config.norm_eps)


def logits(
    params: LlamaParams, config: LlamaConfig, hidden: jax.Array, *, mesh: Mesh | None = None
) -> jax.Array:
    """float32 [R, vocab_size] of hidden [R, d_model]."""
    table = params.embed_tokens if params.lm_head is None else params.lm_head
    return vocab_logits(hidden, table, config.vocab_size, mesh)


def kv_projection(params: LlamaParams, config: LlamaConfig, max_len: int) -> KVProjection:
    """See `jaxserve.models.base.KVProjection`."""
    rotation = jnp.asarray(angle_table(config.rope, config.head_dim, max_len))
    return KVProjection(_kv_weights(params.layers), config.norm_eps, rotation)


def _kv_weights(layers: LlamaLayers) -> KVWeights:
    norm = None if layers.k_norm is None else layers.k_norm.scale
    return KVWeights(layers.k.kernel, layers.v.kernel, layers.k.bias, layers.v.bias, norm)


def _attention_input(
    layer: LlamaLayers,
    config: LlamaConfig,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    mesh: Mesh | None,
) -> AttentionInput:
    h = rms_norm(x, layer.attn_norm.scale, config.norm_eps)

    def heads(weights: Linear, count: int, axis: str) -> jax.Array:
        y = linear(h, weights).reshape(x.shape[0], count, config.head_dim)
        return constrain(y, mesh, None, axis, None)

    q = heads(layer.q, config.num_heads, "heads")
    k = heads(layer.k, config.num_kv_heads, "kv_heads")
    v = heads(layer.v, config.num_kv_heads, "kv_heads")
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm.scale, config.norm_eps)
        k = rms_norm(k, layer.k_norm.scale, config.norm_eps)
    return AttentionInput(rotate(q, *rotation), rotate(k, *rotation), v, h, _kv_weights(layer))


def _finish_layer(
    layer: LlamaLayers, config: LlamaConfig, x: jax.Array, mixed: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """Adds the projected attention output [T, heads, head_dim], then the feed-forward, to x."""
    mixed = mixed.astype(x.dtype).reshape(x.shape[0], config.num_heads * config.head_dim)
    x = constrain(x + linear(mixed, layer.o), mesh, None, None)
    h = rms_norm(x, layer.mlp_norm.scale, config.norm_eps)
    gate = jax.nn.silu(constrain(linear(h, layer.gate), mesh, None, "mlp"))
    h = gate * constrain(linear(h, layer.up), mesh, None, "mlp")
    return constrain(x + linear(h, layer.down), mesh, None, None)


def _sliding_window(hf: Mapping[str, Any], model_type: str) -> int | None:
    """The window of all layers in tokens, or None; ValueError when layers differ."""
    if model_type == "llama":
        return None
    if model_type == "mistral":
        window = hf.get("sliding_window", MISTRAL_WINDOW)
        windowed = [window is not None]
    elif not fields.flag(hf, "use_sliding_window", False):
        return None
    else:
        num_layers = fields.positive_int(hf, "num_hidden_layers")
        full = hf.get("max_window_layers", QWEN_WINDOW_LAYERS)
        kinds = hf.get("layer_types")
        windowed = (
            [kind == "sliding_attention" for kind in kinds]
            if kinds is not None
            else [layer >= full for layer in range(num_layers)]
        )
    if not any(windowed):
        return None
    if not all(windowed):
        field = "layer_types" if hf.get("layer_types") is not None else "max_window_layers"
        raise ValueError(
            f"config.json: {field} gives some layers a sliding window and others none; "
            "only the same for all layers is supported"
        )
    return fields.positive_int(hf, "sliding_window", MISTRAL_WINDOW)


def _leaves(config: LlamaConfig) -> LlamaParams:
    d, vocab, std = config.d_model, config.vocab_size, config.init_std
    return LlamaParams(
        embed_tokens=table_leaf(f"{PREFIX}embed_tokens", vocab, d, "vocab", std),
        layers=_layer_leaves(config, f"{PREFIX}layers.{{}}"),
        final_norm=norm_leaves(f"{PREFIX}norm", d),
        lm_head=None if config.tied else table_leaf("lm_head", vocab, d, "vocab", std),
    )


def _layer_leaves(config: LlamaConfig, name: str) -> LlamaLayers:
    d, n, head_dim = config.d_model, config.num_layers, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def projection(
        part: str, shape: tuple[int, int], axes: tuple[str, str], bias: bool, granule: int = 1
    ) -> Linear:
        return linear_leaves(
            f"{name}.{part}",
            shape,
            axes,
            bias=bias,
            std=config.init_std,
            num_layers=n,
            granule=granule,
        )

    def norm(part: str, width: int = d) -> Norm:
        return norm_leaves(f"{name}.{part}", width, num_layers=n)

    qkv, mlp = config.qkv_bias, config.mlp_bias
    into, kv_into, ff = ("embed", "heads"), ("embed", "kv_heads"), config.d_ff
    return LlamaLayers(
        attn_norm=norm("input_layernorm"),
        q=projection("self_attn.q_proj", (d, q_width), into, qkv, head_dim),
        k=projection("self_attn.k_proj", (d, kv_width), kv_into, qkv, head_dim),
        v=projection("self_attn.v_proj", (d, kv_width), kv_into, qkv, head_dim),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        o=projection("self_attn.o_proj", (q_width, d), into[::-1], config.out_bias, head_dim),
        mlp_norm=norm("post_attention_layernorm"),
        gate=projection("mlp.gate_proj", (d, ff), ("embed", "mlp"), mlp),
        up=projection("mlp.up_proj", (d, ff), ("embed", "mlp"), mlp),
        down=projection("mlp.down_proj", (ff, d), ("mlp", "embed"), mlp),
    )


FAMILY = Family(
    name="llama",
    model_types=MODEL_TYPES,
    prefix=PREFIX,
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    hf_layout=hf_layout,
    forward=forward,
    logits=logits,
    kv_projection=kv_projection,
)
