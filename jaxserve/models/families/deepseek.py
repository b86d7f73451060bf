"""DeepSeek-V2 and V2-Lite: decoders with latent attention, and mixtures of experts in all layers
but the first ones (DeepSeek-AI 2024, section 2).

Norms, feed-forward and experts are those of Llama-style models, plus a shared expert that all
tokens go to with weight 1. A router's weights are scaled instead of normalised, and may be limited
to a few groups of experts. The cache has K and V of each head, see `jaxserve.models.latent`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models import hf as fields
from jaxserve.models.base import Experts, Latent, ModelConfig
from jaxserve.models.experts import ExpertParams, expert_leaves
from jaxserve.models.families import llama
from jaxserve.models.families.llama import PREFIX, LlamaLayer, LlamaParams
from jaxserve.models.families.llama_config import LlamaConfig, common_fields
from jaxserve.models.latent import latent_leaves
from jaxserve.models.layers import Linear, linear_leaves, norm_leaves, table_leaf
from jaxserve.models.rope import check_width, longest_context, rope_from_hf, score_factor

MODEL_TYPES = ("deepseek_v2",)
# Defaults for missing fields. A null field is something else.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
}
GREEDY, BY_GROUP = "greedy", "group_limited_greedy"


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json. Raises ValueError, which names an unsupported
    field."""
    fields.one_of(hf, "model_type", MODEL_TYPES)
    fields.one_of(hf, "hidden_act", ("silu",))
    hf = {**DEFAULTS, **hf}
    latent = Latent(
        rank=fields.positive_int(hf, "kv_lora_rank"),
        q_rank=None if hf["q_lora_rank"] is None else fields.positive_int(hf, "q_lora_rank"),
        plain=fields.positive_int(hf, "qk_nope_head_dim"),
        rotated=fields.positive_int(hf, "qk_rope_head_dim"),
        values=fields.positive_int(hf, "v_head_dim"),
    )
    if latent.rotated % 2:
        raise ValueError(f"config.json: qk_rope_head_dim {latent.rotated} must be even")
    width = latent.plain + latent.rotated
    # head_dim in the config is the size of the rotated part.
    shape = common_fields({**hf, "head_dim": max(width, latent.values)})
    if shape["num_kv_heads"] != shape["num_heads"]:
        raise ValueError(
            f"config.json: num_key_value_heads {shape['num_kv_heads']} other than "
            f"num_attention_heads ({shape['num_heads']}) is not supported"
        )
    rope = rope_from_hf(hf)
    check_width(rope, latent.rotated)
    bias = fields.flag(hf, "attention_bias", False)
    return LlamaConfig(
        family="deepseek",
        **shape,
        max_position=longest_context(rope, hf),
        attn_scale=width**-0.5 * score_factor(hf, rope),
        rope=rope,
        tied=fields.flag(hf, "tie_word_embeddings", False),
        experts=_experts(hf, shape["num_layers"]),
        latent=latent,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag(hf, "mlp_bias", False),
        qk_norm=False,
    )


def _experts(hf: Mapping[str, Any], num_layers: int) -> Experts | None:
    """The experts; None if no layer has any."""
    fields.one_of(hf, "scoring_func", ("softmax",))
    if fields.flag(hf, "norm_topk_prob", False):  # transformers ignores it, other code does not
        raise ValueError("config.json: norm_topk_prob is not supported with deepseek_v2")
    if hf["moe_layer_freq"] != 1:
        what = f"must be 1, got {fields.shown(hf['moe_layer_freq'])}"
        raise ValueError(f"config.json: moe_layer_freq {what}")
    dense = hf["first_k_dense_replace"]
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        what = f"must be a number of layers, got {fields.shown(dense)}"
        raise ValueError(f"config.json: first_k_dense_replace {what}")
    num_experts = fields.positive_int(hf, "n_routed_experts")
    experts_per_token = fields.positive_int(hf, "num_experts_per_tok")
    groups = per_token = 1
    if fields.one_of(hf, "topk_method", (GREEDY, BY_GROUP)) == BY_GROUP:
        groups = fields.positive_int(hf, "n_group")
        per_token = fields.positive_int(hf, "topk_group")
        if num_experts % groups or per_token > groups:
            raise ValueError(
                f"config.json: n_group {groups} must divide n_routed_experts ({num_experts}), and "
                f"be at least topk_group ({per_token})"
            )
    choice = num_experts // groups * per_token
    if experts_per_token > choice:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most {choice}, the experts that there "
            f"are to choose from, got {experts_per_token}"
        )
    if dense >= num_layers:
        return None
    d_ff = fields.positive_int(hf, "moe_intermediate_size")
    return Experts(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        d_ff=d_ff,
        shared_d_ff=d_ff * fields.positive_int(hf, "n_shared_experts"),
        normalised=False,
        scale=fields.number(hf, "routed_scaling_factor"),
        groups=groups,
        groups_per_token=per_token,
        dense_layers=tuple(range(dense)),
    )


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
        final_norm=norm_leaves(f"{PREFIX}norm", d),
        lm_head=None if config.tied else table_leaf("lm_head", vocab, d, "vocab", std),
    )


def _layer_leaves(config: LlamaConfig, name: str, experts: Experts | None) -> LlamaLayer:
    d, std = config.d_model, config.init_std
    d_ff, mlp = config.d_ff, "mlp"
    if experts is not None:
        d_ff, mlp = experts.shared_d_ff, "mlp.shared_experts"

    def projection(part: str, shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
        return linear_leaves(f"{name}.{mlp}.{part}", shape, axes, bias=config.mlp_bias, std=std)

    return LlamaLayer(
        attn_norm=norm_leaves(f"{name}.input_layernorm", d),
        attn_out_norm=None,
        attn=latent_leaves(config, f"{name}.self_attn", bias=config.qkv_bias),
        mlp_norm=norm_leaves(f"{name}.post_attention_layernorm", d),
        mlp_out_norm=None,
        gate=projection("gate_proj", (d, d_ff), ("embed", "mlp")),
        up=projection("up_proj", (d, d_ff), ("embed", "mlp")),
        down=projection("down_proj", (d_ff, d), ("mlp", "embed")),
        experts=None if experts is None else _expert_leaves(config, f"{name}.mlp", experts),
    )


def _expert_leaves(config: LlamaConfig, name: str, experts: Experts) -> ExpertParams:
    gate, up, down = (f"{name}.experts.*.{part}_proj" for part in ("gate", "up", "down"))
    return expert_leaves(
        experts,
        config.d_model,
        router=f"{name}.gate",
        names=(gate, up, down),
        shared_gate=None,
        std=config.init_std,
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="deepseek",
    model_types=MODEL_TYPES,
    config_from_hf=config_from_hf,
    leaves=leaves,
)
