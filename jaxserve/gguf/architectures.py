"""What `general.architecture` of a GGUF file means: the model type of config.json, and the names of
tensors.

Names are llama.cpp's, as its converter writes them; docs/serving-models.md lists what is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for part in ("gate", "up", "down")
    },
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}
"""Names of a layer's tensors, by Hugging Face's names; all experts are one tensor."""

_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AROUND = _AFTER | {"pre_feedforward_layernorm": "ffn_norm"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        model_type: `model_type` of config.json.
        fields: further fields of config.json, by their names in GGUF.
        fixed: fields of config.json that are the same for all its models and not in the files.
        names: names of a layer's tensors that differ from `LAYER_NAMES`.
        interleaved: whether rows of q and k are in the order of llama.cpp's rotation, which pairs
            neighbours; here, as in transformers, elements of two halves are paired.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", interleaved=True),  # also Mistral and Mixtral
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", fixed={"norm_topk_prob": False}),
    "qwen3moe": Architecture("qwen3_moe", fixed={"norm_topk_prob": True}),
    "gemma2": Architecture("gemma2", _CAPS, names=_AROUND),
    "gemma3": Architecture(
        "gemma3_text",
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
            "sliding_window_pattern": "attention.sliding_window_pattern",
        },
        names=_AROUND,
    ),
    "phi3": Architecture("phi3"),
    "olmo2": Architecture("olmo2", names=_AFTER),
    "granite": Architecture(
        "granite",
        {
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        interleaved=True,
    ),
    "smollm3": Architecture("smollm3", interleaved=True),
    "gpt-oss": Architecture("gpt_oss", names=_AFTER),
    "deepseek2": Architecture(
        "deepseek_v2",
        {
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
    ),
}
"""The architectures that are served."""
