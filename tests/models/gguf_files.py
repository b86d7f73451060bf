"""Small GGUF files, written by the library as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quantize

from jaxserve.models.registry import family_for
from jaxserve.models.rope import inverse_frequencies, rope_from_hf
from tests.models.fixtures import hf_tensors

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""By model_type, where they differ."""
WRITTEN = (Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)
"""The types that the library writes."""
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [chr(ord("!") + i) for i in range(61)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
"""Of a vocabulary of 61, as the reference cases have."""


def gguf_name(name: str, parts: Mapping[str, str] = PARTS) -> str:
    """A tensor's name in GGUF, of that in Hugging Face's."""
    layer = ""
    if name.startswith("model.layers."):
        _, _, number, name = name.split(".", 3)
        layer = f"blk.{number}."
    module, _, kind = name.rpartition(".")
    return f"{layer}{parts[module]}.{kind}"


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
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "rope.freq_base": float(rope_from_hf(hf).theta),
    }
    head_dim = hf.get("head_dim", hf["hidden_size"] // heads)
    if arch == "llama":
        named["rope.dimension_count"] = head_dim
    else:
        named |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if hf["model_type"] in ARCHITECTURES:
        named["attention.sliding_window"] = hf["sliding_window"]
    rope = rope_from_hf(hf)
    if rope.kind in ("linear", "yarn"):
        named |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        named["rope.scaling.original_context_length"] = rope.original_max
        named["rope.scaling.yarn_beta_fast"] = rope.high
    return found | {f"{arch}.{name}": value for name, value in named.items()}


def tensors_of(hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The reference weights of a config.json by GGUF's names, in GGUF's order."""
    found = {}
    interleaved = hf["model_type"] in ("llama", "mistral")
    for name, tensor in hf_tensors(dict(hf)).items():
        for part, field in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if interleaved and part in name:
                halves = tensor.reshape(hf[field], 2, -1, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        gemma = hf["model_type"] == "gemma3_text"
        if gemma and name.endswith("norm.weight"):
            tensor = tensor + 1
        found[gguf_name(name, GEMMA_PARTS if gemma else PARTS)] = tensor
    rope = rope_from_hf(hf)
    if rope.kind == "llama3":
        head_dim = family_for(hf).config_from_hf(hf).head_dim
        plain = rope_from_hf({**hf, "rope_scaling": None})
        factors = inverse_frequencies(plain, head_dim) / inverse_frequencies(rope, head_dim)
        found["rope_freqs.weight"] = factors.astype(np.float32)
    return found


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
        elif tensor.ndim == 2 and own in WRITTEN:
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
