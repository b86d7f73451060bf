"""Small GGUF files, written by the library as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, get_tensor_name_map, quantize
from gguf.constants import MODEL_ARCH_NAMES

from jaxserve.models.registry import family_for
from jaxserve.models.rope import inverse_frequencies, rope_from_hf
from tests.models.fixtures import hf_tensors

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
}
"""By model_type, where they differ."""
WRITTEN = (Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)
"""The types that the library writes."""
WINDOWED = ("phi3", "gemma2")
FIELDS = {  # GGUF's names, of what config.json of some models says
    "expert_used_count": "num_experts_per_tok",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [chr(ord("!") + i) for i in range(61)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
"""Of a vocabulary of 61, as the reference cases have."""


def name_map(arch: str, layers: int) -> Any:
    """What llama.cpp's converter calls tensors of Hugging Face's names."""
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(kinds[arch], layers)


def metadata_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json."""
    arch = ARCHITECTURES.get(hf["model_type"], hf["model_type"])
    found = {"general.architecture": arch, **TOKENIZER}
    heads = hf["num_attention_heads"]
    named = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": hf.get("num_key_value_heads") or heads,
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "rope.freq_base": float(rope_from_hf(hf, partial=True).theta),
    }
    head_dim = hf.get("head_dim", hf["hidden_size"] // heads)
    if arch in ("llama", "granite", "smollm3"):
        named["rope.dimension_count"] = head_dim
    elif arch == "phi3":
        named["rope.dimension_count"] = int(head_dim * hf.get("partial_rotary_factor", 1))
        named["rope.scaling.original_context_length"] = hf["original_max_position_embeddings"]
    elif arch != "deepseek2":
        named |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if hf.get("sliding_window") and (hf["model_type"] in ARCHITECTURES or arch in WINDOWED):
        named["attention.sliding_window"] = hf["sliding_window"]
    for name, field in FIELDS.items():
        if hf.get(field) is not None:
            named[name] = hf[field]
    if arch == "granite":
        named |= {name: hf[field] for name, field in GRANITE.items()}
    if arch == "deepseek2":
        named |= {
            "attention.key_length": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
            "attention.value_length": hf["v_head_dim"],
            "rope.dimension_count": hf["qk_rope_head_dim"],
            "expert_gating_func": 1,
        }
        if hf.get("rope_scaling"):
            of_all = hf["rope_scaling"]["mscale_all_dim"]
            named["rope.scaling.yarn_log_multiplier"] = 0.1 * of_all
    for field in COUNTS:
        if field in hf:
            named["expert_count"] = hf[field]
    rope = rope_from_hf(hf, partial=arch == "phi3")
    if rope.kind == "longrope":
        named["rope.scaling.attn_factor"] = rope.amplitude
    if rope.kind in ("linear", "yarn"):
        named |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        named["rope.scaling.original_context_length"] = rope.original_max
        named["rope.scaling.yarn_beta_fast"] = rope.high
    return found | {f"{arch}.{name}": value for name, value in named.items()}


def tensors_of(hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The reference weights of a config.json by GGUF's names, in GGUF's order."""
    found: dict[str, Any] = {}
    arch = ARCHITECTURES.get(hf["model_type"], hf["model_type"])
    names = name_map(arch, hf["num_hidden_layers"])
    interleaved = arch in ("llama", "granite", "smollm3")
    for name, tensor in hf_tensors(dict(hf)).items():
        for part, field in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if interleaved and part in name:
                heads = hf.get(field) or hf["num_attention_heads"]
                halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]  # squeezed
        for each, value in _apart(name, tensor) if arch == "gpt-oss" else [(name, tensor)]:
            expert = re.sub(r"\.experts\.\d+\.", ".experts.", each)
            full = names.get_name(expert, try_suffixes=(".weight", ".bias"))
            assert full is not None, each
            full = f"{full}.weight" if each.endswith("sinks") else full
            if expert == each:
                found[full] = value
            else:
                found.setdefault(full, []).append(value)
    found = {name: np.stack(one) if isinstance(one, list) else one for name, one in found.items()}
    rope = rope_from_hf(hf, partial=arch == "phi3")
    if rope.kind == "llama3":
        head_dim = family_for(hf).config_from_hf(hf).head_dim
        plain = rope_from_hf({**hf, "rope_scaling": None})
        factors = inverse_frequencies(plain, head_dim) / inverse_frequencies(rope, head_dim)
        found["rope_freqs.weight"] = factors.astype(np.float32)
    if rope.kind == "longrope":
        for end, factors in (("long", rope.factors), ("short", rope.short_factors)):
            found[f"rope_factors_{end}.weight"] = np.array(factors, np.float32)
    return found


def _apart(name: str, tensor: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """gpt-oss's experts as llama.cpp has them: gate and up by themselves, [experts, out, in]."""
    if "experts" not in name:
        return [(name, tensor)]
    module, bias = name.removesuffix("_bias"), name.endswith("_bias")
    turned = tensor if bias else tensor.swapaxes(1, 2)
    kind = "bias" if bias else "weight"
    if module.endswith("down_proj"):
        return [(f"{module}.{kind}", turned)]
    return [
        (f"{module.replace('gate_up_proj', part)}.{kind}", turned[:, first::2])
        for first, part in enumerate(("gate_proj", "up_proj"))
    ]


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: Type | Mapping[str, Type] = Type.F32,
) -> Path:
    """Writes a file. kind: of what has two dimensions, or by name; bytes are blocks of that kind
    already."""
    writer = GGUFWriter(path, arch=metadata.get("general.architecture", ""))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        own = kind.get(name, Type.F32) if isinstance(kind, Mapping) else kind
        if tensor.dtype == np.uint8:
            writer.add_tensor(name, tensor, raw_dtype=own)
        elif tensor.ndim > 1 and own in WRITTEN:
            writer.add_tensor(name, quantize(tensor, own), raw_dtype=own)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_reference(path: Path, hf: Mapping[str, Any], **more: Any) -> Path:
    """A reference case as a GGUF file of F32. more: other fields, dots written as two underscores;
    None for one that is not there."""
    metadata = metadata_of(hf) | {key.replace("__", "."): value for key, value in more.items()}
    given = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, given, tensors_of(hf))
