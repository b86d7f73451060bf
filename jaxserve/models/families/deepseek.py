"""DeepSeek V2, V3 and R1, and Kimi K2: decoders with latent attention, and mixtures of experts in
all layers but the first ones (DeepSeek-AI 2024, "DeepSeek-V2", section 2, and "DeepSeek-V3
Technical Report", section 2.1; Kimi Team 2025, section 2.3).

Norms, feed-forward and experts are those of Llama-style models, see also `deepseek_experts`. The
cache has latent vectors, see `jaxserve.models.latent`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.models import hf as fields
from jaxserve.models.base import Experts, Latent
from jaxserve.models.families import llama
from jaxserve.models.families.deepseek_experts import by_sigmoid, by_softmax
from jaxserve.models.families.llama_config import LlamaConfig, common_fields
from jaxserve.models.rope import check_width, longest_context, rope_from_hf, score_factor


@dataclasses.dataclass(frozen=True)
class ModelType:
    """The differences of a model type.

    Attributes:
        experts: the experts, None if no layer has any.
        defaults: defaults for missing fields. A null field is something else.
        mlp_bias: whether the field `mlp_bias` gives biases to feed-forwards.
    """

    experts: Callable[[Mapping[str, Any]], Experts | None]
    defaults: Mapping[str, Any]
    mlp_bias: bool = False


_COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3 = ModelType(
    by_sigmoid,
    _COMMON
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
)
MODEL_TYPES = {
    "deepseek_v2": ModelType(
        by_softmax,
        _COMMON
        | {
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
        },
        mlp_bias=True,
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
}


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json. Raises ValueError, which names an unsupported
    field."""
    own = MODEL_TYPES[fields.one_of(hf, "model_type", tuple(MODEL_TYPES))]
    fields.one_of(hf, "hidden_act", ("silu",))
    hf = {**own.defaults, **hf}
    latent = Latent(
        rank=fields.positive_int(hf, "kv_lora_rank"),
        q_rank=None if hf["q_lora_rank"] is None else fields.positive_int(hf, "q_lora_rank"),
        plain=fields.positive_int(hf, "qk_nope_head_dim"),
        rotated=fields.positive_int(hf, "qk_rope_head_dim"),
        values=fields.positive_int(hf, "v_head_dim"),
    )
    if latent.rotated % 2:
        raise ValueError(f"config.json: qk_rope_head_dim {latent.rotated} must be even")
    if not fields.flag(hf, "rope_interleave", True):
        raise ValueError("config.json: rope_interleave false is not supported")
    # head_dim in the config is the size of the rotated part.
    shape = common_fields({**hf, "head_dim": latent.rotated})
    if shape["num_kv_heads"] != shape["num_heads"]:
        raise ValueError(
            f"config.json: num_key_value_heads {shape['num_kv_heads']} other than "
            f"num_attention_heads ({shape['num_heads']}) is not supported"
        )
    shape |= {"num_kv_heads": 1, "head_dim": latent.half + latent.rotated // 2}
    rope = rope_from_hf(hf)
    check_width(rope, latent.rotated)
    bias = fields.flag(hf, "attention_bias", False)
    return LlamaConfig(
        family="deepseek",
        **shape,
        max_position=longest_context(rope, hf),
        attn_scale=(latent.plain + latent.rotated) ** -0.5 * score_factor(hf, rope),
        rope=rope,
        tied=fields.flag(hf, "tie_word_embeddings", False),
        experts=own.experts(hf),
        latent=latent,
        mtp_layers=fields.layer_count(hf, "num_nextn_predict_layers"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=own.mlp_bias and fields.flag(hf, "mlp_bias", False),
        qk_norm=False,
        expert_names="deepseek",
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="deepseek",
    model_types=tuple(MODEL_TYPES),
    config_from_hf=config_from_hf,
)
