"""Writing a trained model the way Hugging Face lays an OPT checkpoint out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bpe import EOS_ID, PAD_ID
from safetensors.numpy import save
from tokenizers import Tokenizer

from jaxserve.models.families import opt


def hf_config(
    vocab_size: int, d_model: int, num_layers: int, num_heads: int, max_position: int
) -> dict[str, Any]:
    """The config.json of an OPT model.

    Args:
        vocab_size: Tokens of the vocabulary.
        d_model: Width; the feed-forward layers are four times as wide.
        num_layers: Number of layers.
        num_heads: Attention heads.
        max_position: Longest context in tokens.
    """
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "word_embed_proj_dim": d_model,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "ffn_dim": 4 * d_model,
        "max_position_embeddings": max_position,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "tie_word_embeddings": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "init_std": 0.02,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "use_cache": True,
        "torch_dtype": "float16",
    }


def hf_tensors(params: opt.OPTParams, config: opt.OPTConfig) -> dict[str, np.ndarray]:
    """Tensor name -> float16 array; the tied output embedding is stored once."""
    tensors = {}
    leaves = zip(
        jax.tree.leaves(params), jax.tree.leaves(opt.FAMILY.hf_layout(config)), strict=True
    )
    for leaf, source in leaves:
        values = np.asarray(leaf, np.float16)
        tensors[source.name] = np.ascontiguousarray(values.T if source.transpose else values)
    return tensors


def export(folder: Path, params: opt.OPTParams, hf: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Writes a checkpoint: config.json, generation_config.json, model.safetensors and tokenizer
    files.

    Args:
        folder: Made if missing.
        params: The weights; stored in float16.
        hf: As `hf_config` makes it.
        tokenizer: Of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generation = {key: hf[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation["_from_model_config"] = True
    _write_json(folder / "config.json", hf)
    _write_json(folder / "generation_config.json", generation)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "</s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": hf["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tensors = hf_tensors(params, opt.config_from_hf(hf))
    # transformers asks for the "format" entry. save_file would leave the file private (0600).
    weights = save(tensors, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
