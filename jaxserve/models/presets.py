"""Shapes of well-known models as config.json dicts, for `load_format=random`."""

from __future__ import annotations

import copy
from typing import Any

_OPT = {
    # layers, d_model, heads
    "opt-125m": (12, 768, 12),
    "opt-350m": (24, 1024, 16),
    "opt-1.3b": (24, 2048, 32),
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
    "opt-30b": (48, 7168, 56),
    "opt-66b": (64, 9216, 72),
    "opt-175b": (96, 12288, 96),
}

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def preset_names() -> list[str]:
    """The names that `preset` knows, in alphabetical order."""
    return sorted([*_OPT, *_ROTARY])


def preset(name: str) -> dict[str, Any]:
    """The config.json of a known model's shape, as a new dict; ValueError lists the names."""
    if name in _OPT:
        return _opt(name)
    if name in _ROTARY:
        return copy.deepcopy(_ROTARY[name])
    raise ValueError(f"model.preset {name!r} is not known (known: {', '.join(preset_names())})")


def _opt(name: str) -> dict[str, Any]:
    layers, d_model, heads = _OPT[name]
    small = name == "opt-350m"
    return {
        "model_type": "opt",
        "vocab_size": 50272,
        "num_hidden_layers": layers,
        "hidden_size": d_model,
        "ffn_dim": 4 * d_model,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512 if small else d_model,
        "do_layer_norm_before": not small,
        "activation_function": "relu",
        "bos_token_id": 2,
        "eos_token_id": 2,
    }


def _rotary(
    model_type: str,
    vocab_size: int,
    layers: int,
    d_model: int,
    d_ff: int,
    heads: tuple[int, int],
    max_position: int,
    eos: int | list[int],
    bos: int | None,
    **other: Any,
) -> dict[str, Any]:
    """One rotary model; heads = (attention heads, KV heads)."""
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": d_model,
        "intermediate_size": d_ff,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": max_position,
        "eos_token_id": eos,
        "bos_token_id": bos,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **other,
    }


def _llama3(
    layers: int, d_model: int, d_ff: int, heads: tuple[int, int], **other: Any
) -> dict[str, Any]:
    return _rotary(
        "llama",
        128256,
        layers,
        d_model,
        d_ff,
        heads,
        8192,
        128001,
        128000,
        **{"rope_theta": 500000.0, **other},
    )


def _qwen(
    version: str,
    vocab_size: int,
    layers: int,
    d_model: int,
    d_ff: int,
    heads: tuple[int, int],
    max_position: int,
    **other: Any,
) -> dict[str, Any]:
    common = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
    return _rotary(
        version,
        vocab_size,
        layers,
        d_model,
        d_ff,
        heads,
        max_position,
        151645,
        151643,
        **{**common, **other},
    )


_LONG: dict[str, Any] = {"max_position_embeddings": 131072, "rope_scaling": _LLAMA3_SCALING}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_HEAD128: dict[str, Any] = {"head_dim": 128}

_ROTARY: dict[str, dict[str, Any]] = {
    "llama-2-7b": _rotary("llama", 32000, 32, 4096, 11008, (32, 32), 4096, 2, 1),
    "llama-2-13b": _rotary("llama", 32000, 40, 5120, 13824, (40, 40), 4096, 2, 1),
    "llama-2-70b": _rotary("llama", 32000, 80, 8192, 28672, (64, 8), 4096, 2, 1),
    "llama-3-8b": _llama3(32, 4096, 14336, (32, 8)),
    "llama-3-70b": _llama3(80, 8192, 28672, (64, 8)),
    "llama-3.1-8b": _llama3(32, 4096, 14336, (32, 8), **_LONG),
    "llama-3.1-70b": _llama3(80, 8192, 28672, (64, 8), **_LONG),
    "yi-6b": _rotary("llama", 64000, 32, 4096, 11008, (32, 4), 4096, 2, 1, rope_theta=5000000.0),
    "yi-34b": _rotary("llama", 64000, 60, 7168, 20480, (56, 8), 4096, 2, 1, rope_theta=5000000.0),
    "mistral-7b": _rotary(
        "mistral", 32000, 32, 4096, 14336, (32, 8), 32768, 2, 1, sliding_window=4096
    ),
    "qwen2-7b": _qwen("qwen2", 152064, 28, 3584, 18944, (28, 4), 32768),
    "qwen2.5-0.5b": _qwen("qwen2", 151936, 24, 896, 4864, (14, 2), 32768, **_TIED),
    "qwen2.5-7b": _qwen("qwen2", 152064, 28, 3584, 18944, (28, 4), 32768),
    "qwen2.5-32b": _qwen("qwen2", 152064, 64, 5120, 27648, (40, 8), 32768),
    "qwen3-0.6b": _qwen("qwen3", 151936, 28, 1024, 3072, (16, 8), 40960, **_TIED, **_HEAD128),
    "qwen3-8b": _qwen("qwen3", 151936, 36, 4096, 12288, (32, 8), 40960, **_HEAD128),
}
