"""Whether the output embedding of a checkpoint is its input embedding, by its tensors: config.json
may be wrong or outdated."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from jaxserve.models.base import Family, ModelConfig
from jaxserve.weights.orbax_io import is_orbax, stored_names
from jaxserve.weights.sentence_transformers import is_embedder
from jaxserve.weights.tensors import TensorFiles

log = logging.getLogger(__name__)

HEAD = "lm_head.weight"
_ROWS = 4096  # rows compared at once


def is_tied(folder: Path, family: Family, config: ModelConfig) -> bool:
    """Whether the model has one table for both, as in transformers. It has not if a stored head
    differs from the input table. If only one of the two is stored, it has if the config says that
    they are tied, or if the model is for vectors and needs no head.

    Args:
        folder: a directory, with weights or without.
        family: the model's.
        config: what its config.json says.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    if is_orbax(folder):
        own = any(name.partition(".")[0] == "lm_head" for name in stored_names(folder))
        return config.tied and not own
    if not any(folder.glob("*.safetensors")):
        return config.tied
    table = family.leaves(config).embed_tokens.source.name
    with TensorFiles(folder, family.prefix) as files:
        if not config.tied:
            return is_embedder(folder) and files.find(HEAD) is None and not _packed(files)
        if files.find(HEAD) is None:
            return not _packed(files)
        if files.find(table) is None or _same(files, table):
            return True
    log.warning(
        "%s: its config.json says that the output embedding is the input embedding "
        "(tie_word_embeddings), but it has another one, %s, which is used",
        folder,
        HEAD,
    )
    return False


def _packed(files: TensorFiles) -> bool:
    """Whether there is a quantised head."""
    module = HEAD.removesuffix("weight")
    return any(files.stored(f"{module}{part}") for part in ("qweight", "weight_packed"))


def _same(files: TensorFiles, table: str) -> bool:
    shape = files.shape(table)
    if files.shape(HEAD) != shape or files.dtype(HEAD) != files.dtype(table) or len(shape) != 2:
        return False
    for at in range(0, shape[0], _ROWS):
        part = slice(at, min(at + _ROWS, shape[0])), slice(None)
        if not np.array_equal(files.read(HEAD, part), files.read(table, part)):
            return False
    return True
