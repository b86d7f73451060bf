"""Reading a checkpoint's config.json and generation_config.json."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.checkpoint_files import check_folder, find_gguf
from jaxserve.checkpoints.tokenizer_files import read_config, special_tokens, token_id
from jaxserve.config import DTYPES
from jaxserve.gguf.config import config_json, generation_config_json, in_its_terms
from jaxserve.gguf.header import GGUFError, read_header
from jaxserve.models.base import Family, ModelConfig
from jaxserve.models.hf import shown, token_ids
from jaxserve.models.presets import preset
from jaxserve.models.quantized import Quantization
from jaxserve.models.registry import MODEL_TYPES, family_for
from jaxserve.sched.request import InvalidRequest, SamplingParams
from jaxserve.weights.errors import CheckpointError, read_json
from jaxserve.weights.gguf.blocks import find_blocks
from jaxserve.weights.quantized_config import find_quantization, stored_format
from jaxserve.weights.tied import is_tied

_OF_BOTH = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("quantization_config", "tie_word_embeddings"),
)
# For configs whose text part does not say.
_TEXTS = {"gemma3": "gemma3_text", "mistral3": "mistral", "kimi_k25": "deepseek_v3"}

log = logging.getLogger(__name__)

_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_ENDLESS = "answers end at max_tokens or a stop string only"


def load_config(path: str | Path) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """Reads the config of a checkpoint directory (Hugging Face, or written by convert) or a GGUF
    file.

    End-of-sequence ids come from config.json, then generation_config.json, then
    tokenizer_config.json. Whether and how weights are quantised follows from config.json and the
    tensors' shapes, or in a GGUF file from the tensors' types.

    Returns:
        The family, its config, and config.json as a dict with the merged `eos_token_id`.

    Raises:
        CheckpointError: If the directory or config.json is missing, the file is not JSON, or a
            field is not supported (the message names it).
    """
    folder = Path(os.path.expanduser(path))
    try:
        check_folder(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    gguf = find_gguf(folder)
    if gguf is not None:
        return _load_gguf_config(gguf)
    hf = _of_language(read_json(folder / "config.json"), folder)
    generation = folder / "generation_config.json"
    try:
        stored = stored_format(hf, folder)
        ids = token_ids(hf, "eos_token_id")
        if os.path.lexists(generation):
            ids += token_ids(read_json(generation), "eos_token_id")
        ids += _named_end(folder)
        hf["eos_token_id"] = list(dict.fromkeys(ids))
        family = family_for(hf)
        config = family.config_from_hf(hf)
        tied = is_tied(folder, family, config)
        hf["tie_word_embeddings"], config = tied, dataclasses.replace(config, tied=tied)
        if stored is not None and not isinstance(stored, Quantization):
            stored = find_quantization(folder, stored, family, config)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    ends = _usable_ends(folder, config)
    return family, dataclasses.replace(config, eos_token_ids=ends, quantization=stored), hf


def _of_language(hf: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config of the text part, if the model is also for images; other configs as they are."""
    text, kind = hf.get("text_config"), str(hf.get("model_type"))
    known = kind in MODEL_TYPES
    if hf.get("vision_config") is not None if known else isinstance(text, dict):
        log.warning("%s: of this %s only texts are served; images are refused", folder, shown(kind))
    if known or not isinstance(text, dict):
        return hf
    outer = {name: hf[name] for name in _OF_BOTH if name in hf}
    # A stored head that is another table takes precedence, see `is_tied`.
    tied = outer.get("tie_word_embeddings", True) or text.get("tie_word_embeddings", False)
    model_type = {"model_type": text.get("model_type", _TEXTS.get(kind))}
    return {**outer, **text, **model_type, "tie_word_embeddings": tied}


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
    ends, stored = _usable_ends(path, config), find_blocks(path, family, config)
    return family, dataclasses.replace(config, eos_token_ids=ends, quantization=stored), hf


def load_sampling_defaults(path: str | Path) -> dict[str, Any]:
    """The checkpoint's defaults for SamplingParams: from generation_config.json, or a GGUF file. As
    in vLLM, `do_sample` and `max_new_tokens` are not read.

    Raises:
        CheckpointError: If a value is invalid; the message names it.
    """
    folder = Path(os.path.expanduser(path))
    file = folder / "generation_config.json"
    values: dict[str, Any] = {}
    if (gguf := find_gguf(folder)) is not None:
        file, values = gguf, generation_config_json(read_header(gguf))
    elif os.path.lexists(file):
        values = read_json(file)
    defaults: dict[str, Any] = {}
    for name in _SAMPLING_DEFAULTS:
        value = values.get(name)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0
        kind = int if name == "top_k" else int | float
        try:
            if isinstance(value, bool) or not isinstance(value, kind):
                raise InvalidRequest(name, f"must be a number, got {shown(value)}")
            field: dict[str, Any] = {name: value}
            SamplingParams(**field)
        except InvalidRequest as error:
            way_out = "model.generation_config=none leaves it out"
            raise CheckpointError(f"{file}: {error}; {way_out}") from None
        defaults[name] = value
    return defaults


def _named_end(folder: Path) -> tuple[int, ...]:
    """The `eos_token` of the tokenizer, if it has one. Raises ValueError."""
    config = read_config(folder)
    text = special_tokens(config).get("eos_token")
    end = None if text is None else token_id(folder, config, text)
    return () if end is None else (end,)


def _usable_ends(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """The end-of-sequence tokens within the vocabulary. Ids outside would break token arrays and
    the grammar library. Logs if there are none, or some are outside."""
    usable = tuple(token for token in config.eos_token_ids if 0 <= token < config.vocab_size)
    if not config.eos_token_ids:
        log.warning(
            "%s names no end-of-sequence token (eos_token_id in %s): %s",
            folder,
            "config.json or generation_config.json" if folder.is_dir() else "its metadata",
            _ENDLESS,
        )
    elif usable != config.eos_token_ids:
        log.warning(
            "%s: eos_token_id %d is outside of the vocabulary, 0 to %d: it ends no answer%s",
            folder,
            next(token for token in config.eos_token_ids if token not in usable),
            config.vocab_size - 1,
            "" if usable else f", and there is no other: {_ENDLESS}",
        )
    return usable


def load_preset(name: str) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """As `load_config`, for a built-in shape, see `jaxserve.models.presets`. Raises ValueError if
    it is not known."""
    hf = preset(name)
    family = family_for(hf)
    return family, family.config_from_hf(hf), hf


def checkpoint_dtype(hf: dict[str, Any]) -> jnp.dtype | None:
    """The dtype that config.json states (`dtype`, before transformers 5 `torch_dtype`), or None.

    Raises:
        CheckpointError: If the dtype is not float32, bfloat16 or float16.
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
