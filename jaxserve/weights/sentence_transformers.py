"""A checkpoint's pooling of hidden states into vectors, from the files that sentence-transformers
writes: modules.json and its pooling module's config.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxserve.checkpoint_files import read_json as read_any_json
from jaxserve.models.hf import shown
from jaxserve.sched.request import USUAL_POOLING, PoolingParams, PoolingType
from jaxserve.weights.errors import CheckpointError, read_json

MODULES = "modules.json"
_TYPES = {"lasttoken": PoolingType.LAST, "mean": PoolingType.MEAN, "cls": PoolingType.CLS}
# Flags in configs without `pooling_mode`.
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def load_pooling(path: str | Path) -> PoolingParams:
    """How a checkpoint's vectors are made; by default from the last token, normalised.

    Raises:
        CheckpointError: If a file is malformed, or asks for something that is not supported.
    """
    folder = Path(os.path.expanduser(path))
    if not path or not is_embedder(folder):
        return USUAL_POOLING
    pooling, normalize = PoolingType.LAST, False
    for kind, where in _modules(folder):
        if kind == "Pooling":
            pooling = _pooling(folder / where / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"{folder / MODULES}: module {shown(kind)} is not supported (known: Transformer, "
                "Pooling, Normalize)"
            )
    return PoolingParams(pooling, normalize)


def is_embedder(folder: Path) -> bool:
    """Whether a checkpoint is for vectors, by its files."""
    return os.path.lexists(folder / MODULES)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The last part of each module's type, and its folder."""
    file = folder / MODULES
    try:
        listed: Any = read_any_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    modules = []
    for module in listed if isinstance(listed, list) else [None]:
        kind, where = (
            (module.get("type"), module.get("path")) if isinstance(module, dict) else (0, 0)
        )
        # Only below the checkpoint, nowhere else on this machine.
        if not isinstance(kind, str) or not isinstance(where, str) or where != Path(where).name:
            raise CheckpointError(f"{file}: must be a list of modules, each with a type and a path")
        modules.append((kind.rpartition(".")[2], where))
    return modules


def _pooling(file: Path) -> PoolingType:
    config = read_json(file)
    modes = [name for flag, name in _FLAGS.items() if config.get(flag)]
    if "pooling_mode" in config:
        modes = [config["pooling_mode"]]
    mode = modes[0] if len(modes) == 1 and isinstance(modes[0], str) else None
    if mode not in _TYPES:
        known = ", ".join(_TYPES)
        raise CheckpointError(f"{file}: pooling {shown(modes)} is not supported (known: {known})")
    if mode == "mean" and config.get("include_prompt") is False:
        raise CheckpointError(f"{file}: include_prompt false is not supported with pooling mean")
    return _TYPES[mode]
