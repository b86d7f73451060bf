"""Configs of well-known models as config.json dicts, for `load_format=random`."""

from __future__ import annotations

import copy
from typing import Any

from jaxserve.sched.cost.model_shapes import MODELS, Model

_LLAMA_3: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_theta": 500000.0,
}
_LLAMA_3_1: dict[str, Any] = _LLAMA_3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}
_QWEN_3 = _QWEN | {"model_type": "qwen3", "max_position_embeddings": 40960, "head_dim": 128}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_YI: dict[str, Any] = {"rope_theta": 5000000.0}
_GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "max_position_embeddings": 131072,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_local_base_freq": 10000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(shape: Model) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "max_position_embeddings": 131072,
        "bos_token_id": 199998,
        "eos_token_id": [200002, 199999, 200012],
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }


def _routed(shape: Model) -> dict[str, Any]:
    """The experts of a DeepSeek or GLM-4.5, and its first layers without."""
    return {
        "intermediate_size": shape.dense_d_ff,
        "first_k_dense_replace": shape.dense_layers,
        "moe_intermediate_size": shape.d_ff,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.experts_per_token,
    }


def _deepseek(shape: Model) -> dict[str, Any]:
    return _routed(shape) | {
        "num_key_value_heads": shape.heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
    }


def _glm(shape: Model) -> dict[str, Any]:
    return _routed(shape) | {
        "model_type": "glm4_moe",
        "head_dim": shape.head_dim,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
    }


# Fields of rotary models' configs beside their shape that differ from most.
_ROTARY: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_3,
    "llama-3-70b": _LLAMA_3,
    "llama-3.1-8b": _LLAMA_3_1,
    "llama-3.1-70b": _LLAMA_3_1,
    "yi-6b": _YI,
    "yi-34b": _YI,
    "mistral-7b": {
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "qwen2-7b": _QWEN,
    "qwen2.5-0.5b": _QWEN | _TIED,
    "qwen2.5-7b": _QWEN,
    "qwen2.5-32b": _QWEN,
    "qwen3-0.6b": _QWEN_3 | _TIED,
    "qwen3-8b": _QWEN_3,
    "gemma-3-27b": _GEMMA_3 | {"query_pre_attn_scalar": 168},
    "qwen3-next-80b": {
        "model_type": "qwen3_next",
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 5120,  # of layers without experts; it has none
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": MODELS["qwen3-next-80b"].shared_d_ff,
        "num_experts": MODELS["qwen3-next-80b"].experts,
        "num_experts_per_tok": MODELS["qwen3-next-80b"].experts_per_token,
        "norm_topk_prob": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "bos_token_id": None,
        "eos_token_id": [151645, 151643],
    },
    "qwen3-30b-a3b": _QWEN_3
    | {
        "model_type": "qwen3_moe",
        "intermediate_size": 6144,  # of layers without experts; it has none
        "moe_intermediate_size": MODELS["qwen3-30b-a3b"].d_ff,
        "num_experts": MODELS["qwen3-30b-a3b"].experts,
        "num_experts_per_tok": MODELS["qwen3-30b-a3b"].experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    **{name: _gpt_oss(MODELS[name]) for name in ("gpt-oss-20b", "gpt-oss-120b")},
    "deepseek-v2-lite": _deepseek(MODELS["deepseek-v2-lite"])
    | {
        "model_type": "deepseek_v2",
        "n_shared_experts": 2,
        "q_lora_rank": None,
        "max_position_embeddings": 163840,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    "deepseek-v3": _deepseek(MODELS["deepseek-v3"])
    | {
        "model_type": "deepseek_v3",
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "rope_scaling": _YARN,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "kimi-k2": _deepseek(MODELS["kimi-k2"])
    | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "rope_scaling": _YARN | {"factor": 32, "beta_fast": 1.0, "beta_slow": 1.0},
        "bos_token_id": 163584,
        "eos_token_id": [163585, 163586],
    },
    "glm-4.5": _glm(MODELS["glm-4.5"]) | {"use_qk_norm": True, "routed_scaling_factor": 2.5},
    "glm-4.5-air": _glm(MODELS["glm-4.5-air"]),
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "num_local_experts": MODELS["mixtral-8x7b"].experts,
        "num_experts_per_tok": MODELS["mixtral-8x7b"].experts_per_token,
    },
}


def preset_names() -> list[str]:
    """The names that `preset` knows, in alphabetical order."""
    return sorted(MODELS)


def preset(name: str) -> dict[str, Any]:
    """The config.json of a known model's shape, as a new dict. Raises ValueError, which lists the
    names."""
    if name not in MODELS:
        raise ValueError(f"model.preset {name!r} is not known (known: {', '.join(preset_names())})")
    shape = MODELS[name]
    config = {
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.d_model,
        "num_attention_heads": shape.heads,
    }
    if not shape.rotary:
        small = name == "opt-350m"
        return config | {
            "model_type": "opt",
            "ffn_dim": shape.d_ff,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512 if small else shape.d_model,
            "do_layer_norm_before": not small,
            "activation_function": "relu",
            "bos_token_id": 2,
            "eos_token_id": 2,
        }
    common = {
        "model_type": "llama",
        "intermediate_size": shape.d_ff,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config | common | copy.deepcopy(_ROTARY.get(name, {}))
