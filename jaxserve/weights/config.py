"""Reading a checkpoint's config.json and generation_config.json."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve import checkpoint_files
from jaxserve.checkpoint_files import check_folder, find_gguf
from jaxserve.config import DTYPES
from jaxserve.gguf.config import config_json, in_its_terms
from jaxserve.gguf.header import GGUFError, read_header
from jaxserve.models.base import Family, ModelConfig
from jaxserve.models.hf import refuse_quantized, shown, token_ids
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, tensor or field, in one line."""


log = logging.getLogger(__name__)


def load_config(path: str | Path) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Reads the config of a checkpoint directory (Hugging Face, or written by convert) or a GGUF
    file.

    End-of-sequence ids are those of config.json, then any more of generation_config.json.

    Returns:
        The family, its config, and config.json as a dict with the merged `eos_token_id`.

    Raises:
        CheckpointError: no such directory, no config.json, not JSON, or a field that is not
            supported (the message names it).
    """
    folder = Path(os.path.expanduser(path))
    try:
        check_folder(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    gguf = find_gguf(folder)
    if gguf is not None:
        return _load_gguf_config(gguf)
    hf = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    try:
        refuse_quantized(hf, folder)
        ids = token_ids(hf, "eos_token_id")
        if os.path.lexists(generation):
            ids += token_ids(read_json(generation), "eos_token_id")
        hf["eos_token_id"] = list(dict.fromkeys(ids))
        family = family_for(hf)
        config = family.config_from_hf(hf)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    ends = _usable_ends(folder, config)
    return family, dataclasses.replace(config, eos_token_ids=ends), hf


def _load_gguf_config(path: Path) -> tuple[Family, ModelConfig, dict[str, Any]]:
    try:
        header = read_header(path)
        hf = config_json(header)
        family = family_for(hf)
        config = family.config_from_hf(hf)
    except GGUFError as error:
        raise CheckpointError(str(error)) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {in_its_terms(header, str(error))}") from None
    return family, dataclasses.replace(config, eos_token_ids=_usable_ends(path, config)), hf


def _usable_ends(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """The end-of-sequence tokens within the vocabulary. Others would break token arrays and the
    grammar library. Logs if there are none, or others."""
    usable = tuple(one for one in config.eos_token_ids if 0 <= one < config.vocab_size)
    if not config.eos_token_ids:
        log.warning(
            "%s names no end-of-sequence token (eos_token_id in %s): answers end at max_tokens or "
            "a stop string only",
            folder,
            "config.json or generation_config.json" if folder.is_dir() else "its metadata",
        )
    elif usable != config.eos_token_ids:
        log.warning(
            "%s: eos_token_id %d is outside of the vocabulary, 0 to %d: it ends no answer",
            folder,
            next(one for one in config.eos_token_ids if one not in usable),
            config.vocab_size - 1,
        )
    return usable


def load_preset(name: str) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """As `load_config`, for a built-in shape, see `jaxserve.models.presets`. ValueError if it is
    not known."""
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
    name = stated.removeprefix("torch.") if isinstance(stated, str) else ""
    if name not in DTYPES:
        raise CheckpointError(
            f"config.json: dtype {shown(stated)} is not supported (known: {', '.join(DTYPES)})"
        )
    return jnp.dtype(name)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError when it is missing or not a JSON object."""
    try:
        content = checkpoint_files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
