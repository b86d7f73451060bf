"""Small models of every kind, in every dtype: what an engine of each is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from tests.engine.harness import SHAPES
from tests.models.fixtures import hf_config
from tests.models.quantized.test_gguf_blocks import TIED, written

# Heads and widths of whole vectors, where those of the others begin and end within one.
WHOLE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# Layers with a window and layers without one.
WINDOWED = ("gemma2", "gemma3", "gpt_oss", "qwen2_moe")
# Layers that keep a state, and layers that do not.
STATEFUL = ("qwen3_5", "qwen3_next")
# What others of the reference cases have besides are constants, as of their rotations.
NAMES = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "gemma2", "gemma3", "glm4_moe",
         "gpt_oss", "granite", "llama3", "mistral", "mixtral", "olmo2", "opt", "opt_post_norm",
         "phi4_mini", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_next",
         "smollm3")  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    **{name: hf_config(name) for name in NAMES},
    "whole": {**SHAPES["llama"], **WHOLE},
    "whole moe": {**SHAPES["moe"], **WHOLE, "moe_intermediate_size": 64},
}
BFLOAT16 = {"model__dtype": "bfloat16"}
INT4 = {"model__quantization": "int4:group=32", **BFLOAT16}
GGUF = {"ffn_up": Type.Q8_0, "ffn_down": Type.Q4_0, "blk": Type.Q4_1, "token_embd": Type.Q8_0}
# Name -> the model, and fields of the engine.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MODELS},
    **{
        f"{name}, bfloat16": (name, BFLOAT16)
        for name in (
            *("deepseek_v2", "deepseek_v3", "gemma3", "glm4_moe", "gpt_oss", "opt", "qwen3"),
            *("qwen3_next", "whole", "whole moe"),
        )
    },
    "opt, int8": ("opt", {"model__quantization": "int8"}),
    "whole, int8": ("whole", {"model__quantization": "int8", **BFLOAT16}),
    "whole, int4": ("whole", INT4),
    "whole, int4 with zeros": ("whole", {"model__quantization": "int4:group=32,zero"}),
    "whole moe, int4": ("whole moe", INT4),
    "whole, fp8": ("whole", {"model__quantization": "fp8", **BFLOAT16}),
    "whole, cache of bfloat16": ("whole", {"cache__dtype": "bfloat16"}),
    "whole, cache of int8": ("whole", {"cache__dtype": "int8", **BFLOAT16}),
    "llama3, cache of int8": ("llama3", {"cache__dtype": "int8"}),
    "llama3, cache of fp8": ("llama3", {"cache__dtype": "fp8"}),
    "deepseek_v2, cache of int8": ("deepseek_v2", {"cache__dtype": "int8", **BFLOAT16}),
    "deepseek_v3, cache of fp8": ("deepseek_v3", {"cache__dtype": "fp8"}),
    "gguf": ("gguf", {"model__load_format": "auto", **BFLOAT16}),
}


def write(folder: Path, model: str) -> Path:
    """The model's files, with random weights but in a GGUF file."""
    if model == "gguf":
        return written(folder / "model.gguf", GGUF, TIED)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return folder
