"""The small models of the reference tests, as the config.json of a checkpoint would have them."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 61
NUM_SEQUENCES = 2
SEQUENCE_LENGTH = 44

_OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

_ROTARY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

_LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_LLAMA = _ROTARY | {"model_type": "llama"}
_QWEN2 = _ROTARY | {"model_type": "qwen2"}
_YARN: dict[str, Any] = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}

# Both spellings of the rope fields appear: rope_theta with rope_scaling, and rope_parameters.
CASES: dict[str, dict[str, Any]] = {
    "opt": _OPT,
    "opt_post_norm": dict(_OPT, do_layer_norm_before=False, word_embed_proj_dim=20),
    "opt_plain": dict(
        _OPT, enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"
    ),
    "llama2": dict(_LLAMA, num_key_value_heads=4, rope_theta=10000.0),
    "llama_bias": dict(
        _LLAMA,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "llama3": dict(_LLAMA, rope_theta=1000.0, rope_scaling=_LLAMA3_SCALING),
    "llama_linear": dict(
        _LLAMA, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "yi": dict(_LLAMA, num_attention_heads=8, num_key_value_heads=1, rope_theta=5000000.0),
    "mistral": dict(
        _ROTARY, model_type="mistral", sliding_window=7, head_dim=16, rope_theta=10000.0
    ),
    "qwen2": dict(
        _QWEN2,
        use_sliding_window=False,
        sliding_window=8,
        tie_word_embeddings=True,
        rope_theta=1000000.0,
    ),
    "qwen2_window": dict(_QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=0),
    "qwen2_yarn": dict(
        _QWEN2, rope_theta=1000.0, max_position_embeddings=16, rope_scaling={"type": "yarn"} | _YARN
    ),
    "llama_yarn": dict(
        _LLAMA,
        head_dim=16,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0}
        | _YARN
        | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
    ),
    "qwen3": dict(
        _ROTARY,
        model_type="qwen3",
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
}
