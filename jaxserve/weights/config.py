"""Reading a checkpoint's config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.models.base import Family, ModelConfig
from jaxserve.models.hf import token_ids
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for
from jaxserve.weights.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")


def load_config(path: str | Path) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Reads the config of a checkpoint directory (Hugging Face, or written by convert).

    End-of-sequence ids are those of config.json, then any more of generation_config.json.

    Returns:
        The family, its config, and config.json as a dict with the merged `eos_token_id`.

    Raises:
        CheckpointError: no such directory, no config.json, not JSON, or a field that is not
            supported (the message names it).
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"no such checkpoint directory: {folder}")
    hf = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    try:
        ids = token_ids(hf, "eos_token_id")
        if generation.is_file():
            ids += token_ids(read_json(generation), "eos_token_id")
        hf["eos_token_id"] = list(dict.fromkeys(ids))
        family = family_for(hf)
        return family, family.config_from_hf(hf), hf
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_preset(name: str) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """The same for a built-in shape, see `jaxserve.models.presets`; ValueError if not known."""
    hf = preset(name)
    family = family_for(hf)
    return family, family.config_from_hf(hf), hf


def checkpoint_dtype(hf: dict[str, Any]) -> jnp.dtype | None:
    """The dtype that config.json states (`dtype`, before transformers 5 `torch_dtype`), or None.

    Raises:
        CheckpointError: it is none of float32, bfloat16 and float16.
    """
    stated = hf.get("dtype") or hf.get("torch_dtype")
    if stated is None:
        return None
    name = str(stated).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(
            f"config.json: dtype {stated!r} is not supported (known: {', '.join(DTYPES)})"
        )
    return jnp.dtype(name)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError when it is missing or not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
