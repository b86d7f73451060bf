"""Qwen3-Next, and the texts of Qwen 3.5: three of four layers have a gated delta net in place of
attention, see `jaxserve.models.delta`, the fourth has attention whose result is gated (Qwen Team
2025, "Qwen3-Next", and the released code).

Norms, feed-forward and experts are those of Llama-style models. Norms have an offset of 1, but for
the one behind a delta net.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.models import hf as fields
from jaxserve.models.base import Experts, LayerKind
from jaxserve.models.families import llama
from jaxserve.models.families.llama_config import LlamaConfig, common_fields, with_defaults
from jaxserve.models.families.llama_types import shared_qwen_experts
from jaxserve.models.rope import check_width, longest_context, rope_from_hf
from jaxserve.pallas_kernels.delta_net import DeltaNet

FULL, LINEAR = "full_attention", "linear_attention"
# Positions of images; those of texts are the same in all sections.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


@dataclasses.dataclass(frozen=True)
class ModelType:
    """The differences of a model type.

    Attributes:
        experts: the experts, None if no layer has any.
        defaults: defaults for missing fields.
        apart: see `LlamaConfig.delta_apart`.
    """

    experts: Callable[[Mapping[str, Any]], Experts | None]
    defaults: Mapping[str, Any]
    apart: bool


_COMMON: dict[str, Any] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = _COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 5632,  # of no layer in Qwen 3.5
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
MODEL_TYPES = {
    "qwen3_next": ModelType(
        shared_qwen_experts,
        _EXPERTS
        | {
            "vocab_size": 151936,
            "num_hidden_layers": 48,
            "num_experts_per_tok": 10,
        },
        apart=False,
    ),
    "qwen3_5_text": ModelType(
        lambda hf: None,
        _COMMON
        | {
            "vocab_size": 248320,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
        },
        apart=True,
    ),
    "qwen3_5_moe_text": ModelType(
        shared_qwen_experts,
        _EXPERTS
        | {
            "vocab_size": 248320,
            "num_hidden_layers": 40,
            "num_experts_per_tok": 8,
        },
        apart=True,
    ),
}


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json. Raises ValueError, which names an unsupported
    field."""
    own = MODEL_TYPES[fields.one_of(hf, "model_type", tuple(MODEL_TYPES))]
    fields.one_of(hf, "hidden_act", ("silu",))
    hf = with_defaults(hf, {**own.defaults, **_share_of(hf)})
    shape, net = common_fields(hf), _delta_net(hf)
    if not shape["causal"]:
        raise ValueError("config.json: is_causal false is not supported with states")
    if net.key_heads % shape["num_kv_heads"]:
        raise ValueError(
            f"config.json: linear_num_key_heads {net.key_heads} is not a multiple of "
            f"num_key_value_heads {shape['num_kv_heads']}"
        )
    rope = rope_from_hf(_without_images(hf), partial=True)
    check_width(rope, shape["head_dim"])
    every = fields.positive_int(hf, "full_attention_interval")
    numbers = range(1, shape["num_layers"] + 1)
    default = [LINEAR if number % every else FULL for number in numbers]
    types = fields.layer_types(hf, shape["num_layers"], default, (FULL, LINEAR))
    if FULL not in types:
        raise ValueError(f"config.json: layer_types has no {FULL}")
    some = LINEAR in types
    bias = fields.flag(hf, "attention_bias", False)
    return LlamaConfig(
        family="qwen3_next",
        **shape,
        max_position=longest_context(rope, hf),
        attn_scale=shape["head_dim"] ** -0.5,
        rope=rope,
        kinds=tuple(map({FULL: LayerKind(rope), LINEAR: LayerKind(state=True)}.__getitem__, types))
        if some
        else (),
        tied=fields.flag(hf, "tie_word_embeddings", False),
        experts=own.experts(hf),
        delta=net if some else None,
        gated=True,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        qk_norm=True,
        delta_apart=own.apart,
    )


def _delta_net(hf: Mapping[str, Any]) -> DeltaNet:
    net = DeltaNet(
        key_heads=fields.positive_int(hf, "linear_num_key_heads"),
        value_heads=fields.positive_int(hf, "linear_num_value_heads"),
        key_dim=fields.positive_int(hf, "linear_key_head_dim"),
        value_dim=fields.positive_int(hf, "linear_value_head_dim"),
        taps=fields.positive_int(hf, "linear_conv_kernel_dim"),
    )
    if net.value_heads % net.key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads {net.value_heads} is not a multiple of "
            f"linear_num_key_heads {net.key_heads}"
        )
    return net


def _share_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rotated share of a head, where it is stated with the rotation."""
    share = fields.mapping(hf, "rope_parameters").get("partial_rotary_factor")
    return {} if share is None else {"partial_rotary_factor": share}


def _without_images(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the sections of images' positions."""
    changed: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if hf.get(name):
            scaling = fields.mapping(hf, name)
            changed[name] = {key: scaling[key] for key in scaling if key not in _OF_IMAGES}
    return {**hf, **changed}


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen3_next",
    model_types=tuple(MODEL_TYPES),
    config_from_hf=config_from_hf,
)
