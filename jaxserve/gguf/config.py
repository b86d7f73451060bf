"""The metadata of a GGUF file in the form of Hugging Face's config.json."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from typing import Any

import numpy as np

from jaxserve.gguf.architectures import ARCHITECTURES
from jaxserve.gguf.header import Header
from jaxserve.gguf.tokenizer import end_ids, special_ids
from jaxserve.gguf.wheels import card_sampling
from jaxserve.models import hf as fields

log = logging.getLogger(__name__)

EMBEDDING, OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "head_dim": "attention.key_length",
}
_OPTIONAL = {
    *("num_key_value_heads", "rope_theta", "sliding_window", "head_dim", "intermediate_size"),
}
_YARN = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_EXPERTS = {  # by model_type: number of experts, experts per token, their width
    "mixtral": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "deepseek_v2": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_gate_exps\.weight|blk\.\d+\.ffn_gate\.0\.weight")
_ALL_SHARED = re.compile(r"blk\.\d+\.ffn_gate_shexp\.weight")
_SOFTMAX = 1  # GGUF's number for a softmax of the router's outputs
_ONLY = {
    "expert_count": 0,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "expert_gating_func": _SOFTMAX,
}
# Fields that are redundant or do not affect the computation.
_UNREAD = {"vocab_size", "rope.dimension_count", "attention.value_length", "expert_used_count",
           "expert_feed_forward_length", "expert_shared_feed_forward_length",
           "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
           "rope.scaling.yarn_log_multiplier", "attention.causal",
           "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
           "rope.scaling.original_context_length", "rope.scaling.finetuned",
           "tensor_data_layout"}  # fmt: skip
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FIELD = re.compile(r"^config\.json: (\w+)")


def config_json(header: Header) -> dict[str, Any]:
    """The config.json of the same model.

    Raises:
        GGUFError: If the architecture, or a field's value, is not supported.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise header.error(
            f"general.architecture is {architecture!r:.80}, which is not supported (known: {known})"
        )
    if metadata.get("split.count", 1) != 1:
        raise header.error(
            "it is a part of a model that was split; merge its parts first: "
            "llama-gguf-split --merge FIRST MERGED"
        )
    known_as = ARCHITECTURES[architecture]
    hf: dict[str, Any] = {"model_type": known_as.model_type, **known_as.fixed}
    for field, name in (_FIELDS | dict(known_as.fields)).items():
        value = _scalar(header, f"{architecture}.{name}")
        if value is None and field in _FIELDS and field not in _OPTIONAL:
            raise header.error(f"it has no {architecture}.{name}")
        if value is not None:
            hf[field] = value
    if EMBEDDING not in header.tensors:
        raise header.error(f"it has no tensor {EMBEDDING!r}")
    hf |= {
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": OUTPUT not in header.tensors,
        "attention_bias": _has_all(header, "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": _has_all(header, "ffn_gate", "ffn_up", "ffn_down"),
        "dtype": _dtype(header),
        **{name: token for name, token in special_ids(header).items() if name != "eos_token_id"},
        "eos_token_id": list(end_ids(header)),
    }
    if header.metadata.get(f"{architecture}.attention.causal") is False:
        hf["is_causal"] = False
    if architecture in _27B_LAYERS:
        hf["query_pre_attn_scalar"] = _gemma_scalar(hf, _27B_LAYERS[architecture])
    elif not hf.get("sliding_window"):
        hf["sliding_window"] = None
    elif architecture == "llama":
        hf["model_type"] = "mistral"
    elif architecture in ("qwen2", "qwen3", "qwen2moe", "qwen3moe"):
        hf |= {"use_sliding_window": True, "max_window_layers": 0}
    elif architecture not in ("phi3", "gpt-oss"):
        raise header.error(f"{architecture}.attention.sliding_window is not supported")
    hf |= _experts(header, architecture, hf)
    if "intermediate_size" not in hf:
        raise header.error(f"it has no {architecture}.feed_forward_length")
    if architecture == "deepseek2":
        hf |= _deepseek(header, hf)
    _rotation(header, architecture, hf)
    _check_rest(header, architecture, hf)
    return hf


def generation_config_json(header: Header) -> dict[str, Any]:
    """The sampling fields of the same model's generation_config.json. If the file has none, those
    of the model's card, for models in wheels."""
    values = {name: header.metadata.get(key) for name, key in _SAMPLING.items()}
    sampling = {name: value for name, value in values.items() if value is not None}
    return sampling or dict(card_sampling(header.path))


def in_its_terms(header: Header, problem: str) -> str:
    """The problem with a field of `config_json`, with the field's name in the file."""

    def key(match: re.Match[str]) -> str:
        architecture = str(header.metadata["general.architecture"])
        name = (_FIELDS | dict(ARCHITECTURES[architecture].fields)).get(match[1])
        return match[1] if name is None else f"{architecture}.{name}"

    return _FIELD.sub(key, problem)


def _gemma_scalar(hf: dict[str, Any], layers_of_27b: int) -> int:
    """The scalar of attention's scores. It is not in the files; like llama.cpp, this goes by the
    number of layers."""
    if hf["num_hidden_layers"] != layers_of_27b:
        return fields.positive_int(hf, "head_dim", 256)
    heads = fields.positive_int(hf, "num_attention_heads")
    return fields.positive_int(hf, "hidden_size") // heads


def _experts(header: Header, architecture: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Adds config.json's fields about experts, with widths from the tensors' shapes."""
    count = _scalar(header, f"{architecture}.expert_count") or 0
    model_type = "mixtral" if architecture == "llama" and count else hf["model_type"]
    if model_type not in _EXPERTS or not count:
        return {}
    all_of, per_token, width = _EXPERTS[model_type]
    used = _scalar(header, f"{architecture}.expert_used_count")
    fields = {"model_type": model_type, all_of: count, per_token: used}
    for name, tensor in header.tensors.items():
        if _ONE_EXPERT.fullmatch(name):
            fields[width] = tensor.shape[-2]
        elif _ALL_SHARED.fullmatch(name):
            fields["shared_expert_intermediate_size"] = tensor.shape[-2]
    return {"intermediate_size": hf.get("intermediate_size", fields.get(width, 1)), **fields}


def _deepseek(header: Header, hf: dict[str, Any]) -> dict[str, Any]:
    """Adds config.json's fields about latent attention. Widths of heads are in other fields if K
    and V are meant to be cached in compressed form."""

    def get(*names: str) -> Any:
        values = (_scalar(header, f"deepseek2.{name}") for name in names)
        return next((value for value in values if value is not None), None)

    key, value = (
        get(f"attention.{k}_length_mla", f"attention.{k}_length") for k in ("key", "value")
    )
    rotated = hf.get("qk_rope_head_dim")
    if not all(isinstance(size, int) for size in (key, value, rotated)):
        raise header.error(
            "it needs deepseek2.attention.key_length, attention.value_length and "
            "rope.dimension_count"
        )
    grouped = (hf.get("n_group") or 1) > 1
    return {
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "q_lora_rank": get("attention.q_lora_rank"),
        "num_key_value_heads": hf["num_attention_heads"],
        "head_dim": None,
        "attention_bias": _has_all(header, "attn_kv_a_mqa", "attn_output"),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def _scalar(header: Header, key: str, default: Any = None) -> Any:
    """A field's value, which may be given for each layer. Raises GGUFError if the layers differ."""
    value = header.metadata.get(key, default)
    if not isinstance(value, np.ndarray | list):
        return value
    values = np.asarray(value)
    if values.size == 0 or (values != values[0]).any():
        raise header.error(f"{key} differs between layers, which is not supported")
    return values[0].item()


def _has_all(header: Header, *parts: str) -> bool:
    """Whether the first layer has all of these biases. If it has only some, loading the weights
    fails later."""
    return all(f"blk.0.{part}.bias" in header.tensors for part in parts)


def _dtype(header: Header) -> str | None:
    """The dtype of most elements; None if they are quantized."""
    elements: Counter[str] = Counter()
    for tensor in header.tensors.values():
        elements[tensor.type.name] += math.prod(tensor.shape)
    ((name, _),) = elements.most_common(1)
    return _DTYPES.get(name)


def _rotation(header: Header, architecture: str, hf: dict[str, Any]) -> None:
    """Adds the scaling of positions, and checks that all elements of a head are rotated."""

    def get(name: str, default: Any = None) -> Any:
        return _scalar(header, f"{architecture}.{name}", default)

    if architecture != "deepseek2":
        _check_heads(header, architecture, hf)
    kind, scale = get("rope.scaling.type"), get("rope.scaling.factor", get("rope.scale_linear"))
    factors = header.tensors.get(ROPE_FACTORS)
    original = get("rope.scaling.original_context_length")
    if architecture == "phi3" and LONG_FACTORS in header.tensors:
        hf["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": _floats(header, LONG_FACTORS).tolist(),
            "short_factor": _floats(header, SHORT_FACTORS).tolist(),
            "original_max_position_embeddings": original,
            "attention_factor": get("rope.scaling.attn_factor"),
        }
    elif factors is not None:
        hf["rope_scaling"] = _llama3(header, hf)
    elif kind in ("linear", "yarn") or (kind is None and scale is not None):
        hf["rope_scaling"] = {"rope_type": kind or "linear", "factor": scale}
    elif kind not in (None, "none"):
        raise header.error(
            f"{architecture}.rope.scaling.type is {kind!r:.80}, which is not supported "
            "(known: none, linear, yarn)"
        )
    if kind == "yarn":
        hf["rope_scaling"] |= {
            "original_max_position_embeddings": original,
            **{field: get(name) for field, name in _YARN.items() if get(name) is not None},
        }
    if kind == "yarn" and architecture == "gpt-oss":
        hf["rope_scaling"]["truncate"] = False
    logarithm = get("rope.scaling.yarn_log_multiplier")
    if kind == "yarn" and architecture == "deepseek2" and logarithm:
        of_all = round(10 * logarithm, 6)  # as in llama.cpp, for both
        hf["rope_scaling"] |= {"mscale": of_all, "mscale_all_dim": of_all}


def _check_heads(header: Header, architecture: str, hf: dict[str, Any]) -> None:
    """Adds the width of heads if only the rotation tells it, and checks that both agree."""

    def get(name: str, default: Any = None) -> Any:
        return _scalar(header, f"{architecture}.{name}", default)

    head_dim = hf.get("head_dim")
    rotated = get("rope.dimension_count", head_dim)
    if head_dim is None and rotated is not None:
        hf["head_dim"] = head_dim = rotated
    names = ["rope.dimension_count", "attention.value_length"]
    if architecture == "phi3":  # phi3 may rotate a part of each head
        size = fields.positive_int(hf, "hidden_size")
        size //= fields.positive_int(hf, "num_attention_heads")
        hf |= {"head_dim": None, "partial_rotary_factor": (rotated or size) / max(size, 1)}
        names, head_dim = names[1:], size
    for name in names:
        if head_dim is not None and get(name, head_dim) != head_dim:
            raise header.error(
                f"{architecture}.{name} is {get(name)!r:.80}, and heads have {head_dim!r:.80} "
                "elements; another number is not supported"
            )


def _llama3(header: Header, hf: dict[str, Any]) -> dict[str, Any]:
    """Adds the Llama 3.1 scaling that gives these factors of the frequencies."""
    tensor = header.tensors[ROPE_FACTORS]
    theta, head_dim = fields.number(hf, "rope_theta", 10000.0), 2 * tensor.shape[-1]
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or head_dim != hf.get("head_dim"):
        raise header.error(f"tensor {ROPE_FACTORS!r} is not one F32 value for each pair of a head")
    factors = _floats(header, ROPE_FACTORS)
    if not (np.isfinite(factors).all() and (factors > 0).all() and factors.max() > 1):
        raise header.error(f"tensor {ROPE_FACTORS!r} does not scale as Llama 3.1 does")
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor, low, high = round(float(factors.max()), 4), 1.0, 4.0
    with np.errstate(all="ignore"):
        keep = (1 / factors - 1 / factor) / (1 - 1 / factor)
        partly = (keep > 0.01) & (keep < 0.99)  # these show where the blend lies
        edge = wavelengths * (low + (high - low) * keep)
        if partly.any():
            original = int(np.rint(np.median(edge[partly])))
        else:  # anywhere in between
            original = int(np.ceil(edge[keep >= 0.99].max(initial=1.0)))
        keep = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        fits = np.allclose(factors, 1 / (keep + (1 - keep) / factor), rtol=1e-3)
    if not fits:
        raise header.error(f"tensor {ROPE_FACTORS!r} does not scale as Llama 3.1 does")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _floats(header: Header, name: str) -> np.ndarray:
    """The values of a tensor that is part of the config."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise header.error(f"it has no tensor {name!r} of F32 values")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return np.frombuffer(file.read(4 * tensor.shape[0]), np.float32).astype(np.float64)


def _check_rest(header: Header, architecture: str, hf: dict[str, Any]) -> None:
    """Logs the fields of the model that are not used."""
    prefix, of_arch = f"{architecture}.", ARCHITECTURES[architecture].fields.values()
    known = {*_FIELDS.values(), *_YARN.values(), *_ONLY, *_UNREAD, *of_arch}
    rest = sorted(
        key for key in header.metadata if key.startswith(prefix) and key[len(prefix) :] not in known
    )
    for name, only in _ONLY.items():
        if (name == "expert_count" and hf["model_type"] in _EXPERTS) or (
            name == "rope.scaling.attn_factor" and LONG_FACTORS in header.tensors
        ):
            continue
        value = _scalar(header, prefix + name, only)
        if value != only:
            raise header.error(f"{prefix}{name} is {value!r:.80}; only {only} is supported")
    if rest:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        log.warning("%s: nothing uses the field %s%s", header.path, rest[0][:80], more)
