"""Gemma 2 and 3, text: Llama-style decoders (Gemma Team 2024, section 2; 2025, section 2).

Norms before and after each sub-layer scale by 1 + weight, embeddings are multiplied by the root of
their width, the feed-forward layer's gate is a GELU, and most layers have a window. Gemma 2 caps
scores and logits; Gemma 3 has q/k norms, and a rotation of its own in layers with a window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models import hf as fields
from jaxserve.models.base import layer_kinds
from jaxserve.models.families import llama
from jaxserve.models.families.llama_config import LlamaConfig, common_fields, with_defaults
from jaxserve.models.rope import longest_context, rope_from_hf

MODEL_TYPES = ("gemma2", "gemma3_text")
SLIDING, FULL = "sliding_attention", "full_attention"
_SHAPE: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Defaults for missing fields.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": _SHAPE | {"vocab_size": 256000, "max_position_embeddings": 8192},
    "gemma3_text": _SHAPE | {"vocab_size": 262208, "max_position_embeddings": 131072},
}
_THETA = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}  # Gemma 3's


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json. Raises ValueError, which names an unsupported
    field."""
    model_type = fields.one_of(hf, "model_type", MODEL_TYPES)
    second = model_type == "gemma2"
    activation = fields.one_of(hf, "hidden_activation", ("gelu_pytorch_tanh",))
    both_ways = fields.flag(hf, "use_bidirectional_attention", False)
    if both_ways and second:
        raise ValueError("config.json: use_bidirectional_attention is not supported with gemma2")
    soft_cap = _cap(hf, "attn_logit_softcapping", 50.0 if second else None)
    logit_cap = _cap(hf, "final_logit_softcapping", 30.0 if second else None)
    if not second and soft_cap is not None:
        raise ValueError("config.json: attn_logit_softcapping is not supported with gemma3_text")
    hf = with_defaults(hf, DEFAULTS[model_type])
    shape = common_fields(hf)
    every = 2 if second else fields.positive_int(hf, "sliding_window_pattern", 6)
    kinds = fields.layer_types(
        hf,
        shape["num_layers"],
        [SLIDING if (layer + 1) % every else FULL for layer in range(shape["num_layers"])],
    )
    ropes = {kind: rope_from_hf(hf if second else _of_kind(hf, kind)) for kind in (FULL, SLIDING)}
    window = fields.positive_int(hf, "sliding_window")
    if both_ways:  # the config's number counts both sides
        shape["causal"], window = False, window // 2 + 1
    elif not shape["causal"]:
        window += 1
    windows = {FULL: None, SLIDING: window}
    bias = fields.flag(hf, "attention_bias", False)
    return LlamaConfig(
        family="gemma",
        **shape,
        max_position=longest_context(ropes[FULL], hf),
        attn_scale=fields.number(hf, "query_pre_attn_scalar") ** -0.5,
        tied=fields.flag(hf, "tie_word_embeddings", True),
        rope=ropes[kinds[0]],
        sliding_window=windows[kinds[0]],
        kinds=layer_kinds([ropes[kind] for kind in kinds], [windows[kind] for kind in kinds]),
        soft_cap=soft_cap,
        logit_cap=logit_cap,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        qk_norm=not second,
        norms="around",
        activation=activation,
        embed_scale=shape["d_model"] ** 0.5,
    )


def _cap(hf: Mapping[str, Any], field: str, default: float | None) -> float | None:
    """A bound. null means none, unlike a missing field."""
    return None if hf.get(field, default) is None else fields.number(hf, field, default)


def _of_kind(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Gemma 3's config with the rotation of one kind of layers for all. `rope_scaling` is for
    layers without a window, whatever other fields say."""
    field, theta = _THETA[kind]
    parameters, scaling = fields.mapping(hf, "rope_parameters"), dict[str, Any]()
    if set(parameters) & {FULL, SLIDING}:
        scaling |= fields.mapping(parameters, kind)
    if kind == FULL:
        scaling |= {**parameters, **fields.mapping(hf, "rope_scaling")}
        scaling = {name: value for name, value in scaling.items() if name not in (FULL, SLIDING)}
    theta = fields.number({**hf, field: scaling.get("rope_theta", hf.get(field))}, field, theta)
    rotation = {"rope_theta": theta, "rope_scaling": None, "rope_parameters": scaling}
    # Removed, since each kind's own value is in the scaling.
    return {**hf, **rotation, "original_max_position_embeddings": None}


FAMILY = dataclasses.replace(
    llama.FAMILY, name="gemma", model_types=MODEL_TYPES, config_from_hf=config_from_hf
)
