"""The model types of the Llama family: a row for each, with its differences from Llama 2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.models import hf as fields
from jaxserve.models.base import Experts, layer_kinds
from jaxserve.models.families.deepseek_experts import by_sigmoid
from jaxserve.models.families.llama_config import LlamaConfig, common_fields, with_defaults
from jaxserve.models.rope import check_width, longest_context, rope_from_hf

Hf = Mapping[str, Any]  # a config.json
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 4096  # tokens, if a config has a window without its length
QWEN_WINDOW_LAYERS = 28  # default of max_window_layers in Qwen configs

# (config.json, which layers rotate) -> what each layer attends to unless `layer_types` says so;
# None if no layer can have a window.
LayerTypes = Callable[[Hf, Sequence[bool]], list[str] | None]


def _all_full(hf: Hf, rotates: Sequence[bool]) -> list[str]:
    return [FULL] * len(rotates)


def _all_alike(missing: int | None) -> LayerTypes:
    """All layers have the window of `sliding_window`, by default `missing`."""

    def types(hf: Hf, rotates: Sequence[bool]) -> list[str]:
        return [FULL if hf.get("sliding_window", missing) is None else SLIDING] * len(rotates)

    return types


def _if_used(has_window: Callable[[Hf, Sequence[bool]], list[bool]]) -> LayerTypes:
    """Some layers have a window if `use_sliding_window` says so."""

    def types(hf: Hf, rotates: Sequence[bool]) -> list[str] | None:
        if not fields.flag(hf, "use_sliding_window", False):
            return None
        return [SLIDING if windowed else FULL for windowed in has_window(hf, rotates)]

    return types


def _unrotated(hf: Hf, rotates: Sequence[bool]) -> list[bool]:
    has_window = hf.get("sliding_window") is not None
    return [has_window and not rotated for rotated in rotates]


def _later(hf: Hf, rotates: Sequence[bool]) -> list[bool]:
    full = _window_layers(hf)
    return [layer >= full for layer in range(len(rotates))]


def _every_other(hf: Hf, rotates: Sequence[bool]) -> list[bool]:
    most = _window_layers(hf)
    return [layer < most and layer % 2 == 0 for layer in range(len(rotates))]


def _every(hf: Hf, rotates: Sequence[bool]) -> list[bool]:
    return [True] * len(rotates)


def _window_layers(hf: Hf) -> int:
    count = hf.get("max_window_layers")
    if count is None:
        return QWEN_WINDOW_LAYERS
    if not isinstance(count, int):
        what = f"must be int, got {fields.shown(count)}"
        raise ValueError(f"config.json: max_window_layers {what}")
    return count


def _some_rotate(hf: Hf) -> list[bool]:
    """Whether each layer of a SmolLM3 has rotary positions."""
    num_layers = fields.positive_int(hf, "num_hidden_layers")
    flags = hf.get("no_rope_layers")  # 1 for layers that do rotate
    if flags is None:
        interval = fields.positive_int(hf, "no_rope_layer_interval")
        return [bool((layer + 1) % interval) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or not set(flags) <= {0, 1}:
        what = f"must be a list of {num_layers} zeros and ones, got {fields.shown(flags)}"
        raise ValueError(f"config.json: no_rope_layers {what}")
    return [bool(flag) for flag in flags]


def _mixtral_experts(hf: Hf) -> Experts:
    return _experts(hf, "num_local_experts", "intermediate_size", normalised=True)


def _qwen_experts(hf: Hf) -> Experts | None:
    """The experts; None if no layer has any."""
    num_layers = fields.positive_int(hf, "num_hidden_layers")
    dense = _dense_layers(hf, num_layers)
    if len(dense) == num_layers:
        return None
    count = "num_experts"
    if hf.get(count) is None and hf.get("num_local_experts") is not None:
        count = "num_local_experts"  # as transformers may save it
    normalised = fields.flag(hf, "norm_topk_prob", False)
    experts = _experts(hf, count, "moe_intermediate_size", normalised=normalised)
    return dataclasses.replace(experts, dense_layers=dense)


def shared_qwen_experts(hf: Hf) -> Experts | None:
    """The experts, and a shared one with a width of its own."""
    shared = fields.positive_int(hf, "shared_expert_intermediate_size")
    experts = _qwen_experts(hf)
    return None if experts is None else dataclasses.replace(experts, shared_d_ff=shared)


def _experts(hf: Hf, count: str, width: str, *, normalised: bool) -> Experts:
    """The experts. Noise and balancing of routers are for training only.

    Args:
        hf: config.json.
        count, width: names of the fields with the number of experts in a layer, and their d_ff.
        normalised: whether the weights of a token's experts add up to 1.
    """
    num_experts = fields.positive_int(hf, count)
    per_token = fields.positive_int(hf, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most {count} ({num_experts}), "
            f"got {per_token}"
        )
    return Experts(
        num_experts=num_experts,
        experts_per_token=per_token,
        d_ff=fields.positive_int(hf, width),
        shared_d_ff=0,
        normalised=normalised,
        dense_layers=(),
    )


def _dense_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """A Qwen's layers without experts."""
    step = fields.positive_int(hf, "decoder_sparse_step", 1)
    named = hf.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in named
    ):
        what = f"must be a list of layers, 0 to {num_layers - 1}, got {fields.shown(named)}"
        raise ValueError(f"config.json: mlp_only_layers {what}")
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
    """The differences of a model type.

    Attributes:
        defaults: defaults for missing fields.
        attention_bias: whether the field `attention_bias` is read, which gives biases to q, k, v
            and the output.
        qkv_bias: (config.json) -> whether q, k and v have biases whatever that field says.
        mlp_bias: whether the field `mlp_bias` gives biases to the feed-forward layer.
        qk_norm: (config.json) -> whether q and k have norms.
        whole_norms, norms, joined, expert_names: see `LlamaConfig`.
        partial_rotary: whether a part of each head may be without positions.
        rotates: which layers have rotary positions; None for all.
        layer_types: which layers have a window, see `LayerTypes`.
        own_layer_types: whether the field `layer_types` may override that.
        experts: the experts, None if no layer has any.
        multipliers: further factors: the field of `LlamaConfig`, the field of config.json, whether
            it divides.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attention_bias: bool = True
    qkv_bias: Callable[[Hf], bool] = lambda hf: False
    mlp_bias: bool = False
    qk_norm: Callable[[Hf], bool] = lambda hf: False
    whole_norms: bool = False
    norms: str = "before"
    joined: bool = False
    partial_rotary: bool = False
    rotates: Callable[[Hf], list[bool]] | None = None
    layer_types: LayerTypes = _all_full
    own_layer_types: bool = False
    experts: Callable[[Hf], Experts | None] = lambda hf: None
    expert_names: str = "qwen"
    multipliers: tuple[tuple[str, str, bool], ...] = ()


MODEL_TYPES: dict[str, ModelType] = {
    "llama": ModelType(mlp_bias=True),
    "mistral": ModelType(layer_types=_all_alike(WINDOW)),
    "ministral": ModelType(layer_types=_all_alike(WINDOW), own_layer_types=True),
    "qwen2": ModelType(
        attention_bias=False,
        qkv_bias=lambda hf: True,
        layer_types=_if_used(_later),
        own_layer_types=True,
    ),
    "qwen3": ModelType(qk_norm=lambda hf: True, layer_types=_if_used(_later), own_layer_types=True),
    "smollm3": ModelType(
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        mlp_bias=True,
        rotates=_some_rotate,
        layer_types=_if_used(_unrotated),
        own_layer_types=True,
    ),
    "granite": ModelType(
        mlp_bias=True,
        multipliers=(
            ("attn_scale", "attention_multiplier", False),
            ("embed_scale", "embedding_multiplier", False),
            ("residual_scale", "residual_multiplier", False),
            ("logit_scale", "logits_scaling", True),
        ),
    ),
    "olmo2": ModelType(
        defaults={"rms_norm_eps": 1e-5},
        qk_norm=lambda hf: True,
        whole_norms=True,
        norms="after",
    ),
    "phi3": ModelType(
        defaults={"rms_norm_eps": 1e-5},
        attention_bias=False,
        joined=True,
        partial_rotary=True,
        layer_types=_all_alike(None),
    ),
    "mixtral": ModelType(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        attention_bias=False,
        layer_types=_all_alike(None),
        experts=_mixtral_experts,
        expert_names="mixtral",
    ),
    "qwen2_moe": ModelType(
        attention_bias=False,
        qkv_bias=lambda hf: fields.flag(hf, "qkv_bias", True),
        layer_types=_if_used(_every_other),
        own_layer_types=True,
        experts=shared_qwen_experts,
    ),
    "qwen3_moe": ModelType(
        qk_norm=lambda hf: True, layer_types=_if_used(_every), experts=_qwen_experts
    ),
    "glm4_moe": ModelType(
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        attention_bias=False,  # it gives none to the output
        qkv_bias=lambda hf: fields.flag(hf, "attention_bias", False),
        qk_norm=lambda hf: fields.flag(hf, "use_qk_norm", False),
        partial_rotary=True,
        experts=by_sigmoid,
        expert_names="deepseek",
    ),
}


def config_from_hf(hf: Hf) -> LlamaConfig:
    """The config of a Hugging Face config.json. Raises ValueError, which names an unsupported
    field."""
    fields.one_of(hf, "hidden_act", ("silu",))
    own = MODEL_TYPES[fields.one_of(hf, "model_type", tuple(MODEL_TYPES))]
    hf = with_defaults(hf, own.defaults)
    shape = common_fields(hf)
    rope = rope_from_hf(hf, partial=own.partial_rotary)
    check_width(rope, shape["head_dim"])
    rotates = [True] * shape["num_layers"] if own.rotates is None else own.rotates(hf)
    ropes = [rope if rotated else None for rotated in rotates]
    windows = _windows(hf, own, rotates)
    if not shape["causal"]:  # in transformers, on either side, without the token itself
        windows = tuple(None if window is None else window + 1 for window in windows)
    bias = own.attention_bias and fields.flag(hf, "attention_bias", False)
    qkv_bias = own.qkv_bias(hf)
    factors = {"attn_scale": shape["head_dim"] ** -0.5}
    for field, name, divides in own.multipliers:
        factor = fields.number(hf, name, 1.0)
        factors[field] = 1 / factor if divides else factor
    return LlamaConfig(
        family="llama",
        **shape,
        **factors,
        max_position=longest_context(rope, hf),
        rope=next(filter(None, ropes), None),
        sliding_window=windows[0],
        kinds=layer_kinds(ropes, windows),
        tied=fields.flag(hf, "tie_word_embeddings", False),
        experts=own.experts(hf),
        mtp_layers=fields.layer_count(hf, "num_nextn_predict_layers"),
        qkv_bias=bias or qkv_bias,
        out_bias=bias,
        mlp_bias=own.mlp_bias and fields.flag(hf, "mlp_bias", False),
        qk_norm=own.qk_norm(hf),
        whole_norms=own.whole_norms,
        norms=own.norms,
        joined=own.joined,
        expert_names=own.expert_names,
    )


def _windows(hf: Hf, own: ModelType, rotates: Sequence[bool]) -> tuple[int | None, ...]:
    """The window of each layer in tokens; None if it has none."""
    default = own.layer_types(hf, rotates)
    if default is None:
        return (None,) * len(rotates)
    types = fields.layer_types(hf, len(rotates), default)
    if types != default and not own.own_layer_types:
        raise ValueError(
            f"config.json: layer_types is not supported with model_type {hf['model_type']!r}, "
            "whose layers are alike"
        )
    if SLIDING not in types:
        return (None,) * len(rotates)
    window = fields.positive_int(hf, "sliding_window", WINDOW)
    return tuple(window if kind == SLIDING else None for kind in types)
