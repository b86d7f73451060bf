"""What an engine has measured or chosen, kept beside the compiled steps for the next start."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from jaxserve import __version__
from jaxserve.engine.startup.choices.engine_choices import Choices
from jaxserve.engine.startup.compilation_cache import read_kept, write_kept
from jaxserve.sched.cost.cost_model import Coefficients

log = logging.getLogger(__name__)

TIMING, POOLS = "timing.json", "pools.json"
_MUCH = 4  # times as many blocks as there were: reason enough to compile again


def key_of(chosen: Choices) -> dict[str, Any]:
    """Everything that step times depend on, and that steps are compiled for, except the pool's
    size."""
    kernels, model, buckets = chosen.kernels, chosen.kernels.model, chosen.memory.buckets
    device = jax.devices()[0]
    return {
        "model": dataclasses.asdict(model.config),
        "device": device.device_kind,
        "processors": os.cpu_count() if device.platform == "cpu" else None,
        "tensor": model.shards,
        "backend": model.backend,
        "hidden_read": model.hidden_read,
        "moves_cache": chosen.moves_cache,
        "dtype": kernels.dtype.name,
        "cache_dtype": kernels.cache_dtype.name,
        "block_size": chosen.scheduling.block_size,
        "max_model_len": model.max_len,
        "rows": buckets.rows,
        "tokens": buckets.tokens,
        "deterministic": buckets.deterministic,
        "limits": dataclasses.astuple(chosen.scheduling.limits),
        "versions": [__version__, jax.__version__],
    }


def find(directory: str, key: dict[str, Any]) -> Coefficients | None:
    """The coefficients kept under this key, or None. directory: "" for none."""
    try:
        return Coefficients(**_read(directory, TIMING)[_name(key)])
    except (KeyError, TypeError):
        return None


def keep(directory: str, key: dict[str, Any], found: Coefficients) -> None:
    """Keeps the coefficients under this key. directory: "" for none. Logs if it cannot be
    written."""
    _write(directory, TIMING, _name(key), found.as_dict())


def with_pool_as_before(directory: str, chosen: Choices) -> Choices:
    """The choices with the pool size of the last such start, whose steps are compiled. Only if the
    size is not configured, and the last one is no larger and not much smaller. Keeps the size for
    the next start. directory: "" for none."""
    memory = chosen.memory
    if not memory.modest:
        return chosen
    name = _name(key_of(chosen))
    match _read(directory, POOLS).get(name):
        case [int(blocks), int(allocated)] if (
            2 <= blocks <= allocated <= memory.allocated_blocks < _MUCH * blocks
        ):
            memory = dataclasses.replace(memory, num_blocks=blocks, allocated_blocks=allocated)
    _write(directory, POOLS, name, [memory.num_blocks, memory.allocated_blocks])
    return dataclasses.replace(chosen, memory=memory)


def _name(key: dict[str, Any]) -> str:
    """The key as text. It includes the coefficients' names, since those of another version are
    useless."""
    named = {**key, "coefficients": [field.name for field in fields(Coefficients)]}
    return json.dumps(named, sort_keys=True)


def _path(directory: str, file: str) -> Path:
    return Path(os.path.expanduser(directory)) / file


def _read(directory: str, file: str) -> dict[str, Any]:
    return read_kept(_path(directory, file)) if directory else {}


def _write(directory: str, file: str, name: str, value: Any) -> None:
    if not directory:
        return
    path, known = _path(directory, file), _read(directory, file)
    if known.get(name) == value:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_kept(path, {**known, name: value})
    except OSError as error:
        log.warning("nothing can be kept in %s for the next start: %s", file, error)
