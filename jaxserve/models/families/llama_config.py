"""The shape of a Llama-style model, and the fields of config.json that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.models import hf as fields
from jaxserve.models.base import ModelConfig

# By `LlamaConfig.norms`: the names in checkpoints of the norms before and after attention, and
# before and after the feed-forward layer.
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


class ExpertNames(NamedTuple):
    """The names of a layer's experts in checkpoints.

    Attributes:
        block: the module that contains them.
        parts: gate, up and down of one expert.
        shared: the module of the shared expert; None if the layer has none.
        shared_gate: a token's weight of it, likewise; None if its weight is 1.
    """

    block: str
    parts: tuple[str, str, str]
    shared: str | None = None
    shared_gate: str | None = None


_PARTS = ("gate_proj", "up_proj", "down_proj")
# By `LlamaConfig.expert_names`.
EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen": ExpertNames("mlp", _PARTS, "mlp.shared_expert", "mlp.shared_expert_gate"),
    "deepseek": ExpertNames("mlp", _PARTS, "mlp.shared_experts"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The shape of a Llama-style model.

    Attributes:
        qkv_bias: q, k and v have biases.
        out_bias: the attention's output projection has one.
        mlp_bias: the feed-forward projections have biases.
        qk_norm: q and k have RMS norms.
        norms: where a layer has norms, a key of `NORMS`.
        activation: the feed-forward layer's activation, one of `pallas_kernels.ACTIVATIONS`.
        embed_scale: factor on the embeddings, rounded to their dtype.
        residual_scale: factor on the output of a sub-layer.
        joined: checkpoints have q, k and v as one tensor, and likewise the feed-forward layer's
            first two.
        expert_names: the experts' names in checkpoints, a key of `EXPERT_NAMES`.
        delta_apart: checkpoints have a gated delta net's projections one by one, see
            `delta.delta_leaves`.
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
    delta_apart: bool = False


def with_defaults(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The config with defaults for fields that are missing or null."""
    return {**hf, **{field: value for field, value in defaults.items() if hf.get(field) is None}}


def common_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` that all members read in the same way. Raises ValueError, which
    names an unsupported field."""
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
