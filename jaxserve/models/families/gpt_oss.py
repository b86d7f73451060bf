"""gpt-oss: Llama-style decoders of experts (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card",
section 2).

Every second layer has a window, all heads have sinks, all projections and experts biases. An
expert's feed-forward is clamped. Checkpoints have all experts of a layer in one tensor, with
alternating columns of the gate and of the other half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models import hf as fields
from jaxserve.models.base import Experts, HFTensor, Leaf, ModelConfig, ParamSpec, layer_kinds
from jaxserve.models.experts import DOWN_AXES, GATE_AXES, ExpertParams
from jaxserve.models.families import llama
from jaxserve.models.families.llama import LlamaParams
from jaxserve.models.families.llama_config import LlamaConfig, common_fields, with_defaults
from jaxserve.models.layers import Linear, linear_leaves
from jaxserve.models.rope import longest_context, rope_from_hf

MODEL_TYPE = "gpt_oss"
# Defaults for missing fields.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}
_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face config.json. Raises ValueError, which names an unsupported
    field."""
    fields.one_of(hf, "model_type", (MODEL_TYPE,))
    fields.one_of(hf, "hidden_act", ("silu",))
    # Other names that transformers may save.
    hf = with_defaults(hf, {"num_local_experts": hf.get("num_experts")})
    hf = with_defaults(hf, DEFAULTS)
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = {**hf, "rope_scaling": _SCALING}
    shape = common_fields(hf)
    num_layers = shape["num_layers"]
    alternating = list(fields.LAYER_TYPES[::-1]) * num_layers
    kinds = fields.layer_types(hf, num_layers, alternating[:num_layers])
    window = None
    if "sliding_attention" in kinds:
        window = fields.positive_int(hf, "sliding_window", 128)
    if window is not None and not shape["causal"]:
        window += 1
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    rope, bias = rope_from_hf(hf), fields.flag(hf, "attention_bias", True)
    return LlamaConfig(
        family="gpt_oss",
        **shape,
        max_position=longest_context(rope, hf),
        attn_scale=shape["head_dim"] ** -0.5,
        tied=fields.flag(hf, "tie_word_embeddings", False),
        rope=rope,
        sliding_window=windows[0],
        kinds=layer_kinds([rope] * num_layers, windows),
        experts=_experts(hf),
        sinks=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        qk_norm=False,
    )


def _experts(hf: Mapping[str, Any]) -> Experts:
    count, each = (fields.positive_int(hf, f) for f in ("num_local_experts", "num_experts_per_tok"))
    if each > count:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most num_local_experts ({count}), got "
            f"{each}"
        )
    return Experts(
        num_experts=count,
        experts_per_token=each,
        d_ff=fields.positive_int(hf, "intermediate_size"),
        limit=fields.number(hf, "swiglu_limit", 7.0),
        alpha=fields.number(hf, "swiglu_alpha", 1.702),
    )


def leaves(config: ModelConfig) -> LlamaParams:
    """The parameters' specs and places in a checkpoint, see `jaxserve.models.base.Family`."""
    tree = llama.leaves(config)
    layers = tuple(
        dataclasses.replace(layer, experts=_expert_leaves(config, f"{llama.PREFIX}layers.{i}.mlp"))
        for i, layer in enumerate(tree.layers)
    )
    return dataclasses.replace(tree, layers=layers)


def _expert_leaves(config: ModelConfig, name: str) -> ExpertParams:
    experts, d_model = config.experts, config.d_model
    assert experts is not None
    count = experts.num_experts

    def stacked(
        part: str,
        shape: tuple[int, int],
        axes: tuple[str, str, str],
        columns: tuple[int, int] | None = None,
    ) -> Linear:
        full = f"{name}.experts.{part}"
        spec = ParamSpec((count, *shape), axes, std=config.init_std)
        of_bias = (axes[0], axes[2]) if axes == GATE_AXES else (None, axes[2])
        bias = ParamSpec((count, shape[1]), of_bias, "zeros")
        return Linear(
            kernel=Leaf(spec, HFTensor(full, columns=columns)),
            bias=Leaf(bias, HFTensor(f"{full}_bias", columns=columns)),
        )

    router = linear_leaves(
        f"{name}.router", (d_model, count), ("embed", "norm"), bias=True, std=config.init_std
    )
    return ExpertParams(
        router=dataclasses.replace(router, kernel=dataclasses.replace(router.kernel, wide=True)),
        gate=stacked("gate_up_proj", (d_model, experts.d_ff), GATE_AXES, (0, 2)),
        up=stacked("gate_up_proj", (d_model, experts.d_ff), GATE_AXES, (1, 2)),
        down=stacked("down_proj", (experts.d_ff, d_model), DOWN_AXES),
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="gpt_oss",
    model_types=(MODEL_TYPE,),
    config_from_hf=config_from_hf,
    leaves=leaves,
)
