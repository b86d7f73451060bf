"""What an engine has measured or chosen, kept beside the compiled steps for the next start."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxserve import __version__
from jaxserve.engine.startup.choices.engine_choices import Choices
from jaxserve.engine.startup.choices.memory_choice import Memory
from jaxserve.engine.startup.json_file import JsonFile
from jaxserve.sched.cost.cost_model import Coefficients

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
        **({} if model.groups is None else {"groups": dataclasses.astuple(model.groups)}),
    }


class StartCache:
    """What starts with the same key have kept.

    Args:
        directory: where they keep it; "" for nowhere.
        key: as `key_of` has it.
    """

    def __init__(self, directory: str, key: dict[str, Any]) -> None:
        self._timing = self._pools = None
        if directory:
            folder = Path(os.path.expanduser(directory))
            self._timing, self._pools = JsonFile(folder / TIMING), JsonFile(folder / POOLS)
        # With the coefficients' names, since those of another version are useless.
        names = [field.name for field in dataclasses.fields(Coefficients)]
        self._key = json.dumps({**key, "coefficients": names}, sort_keys=True)

    def coefficients(self, measure: Callable[[], Coefficients]) -> tuple[Coefficients, bool]:
        """Those of the cost model. measure: makes them where none are kept; they are kept then.
        Returns them, and whether they had been kept."""
        if self._timing is None:
            return measure(), False
        try:
            return Coefficients(**self._timing.read()[self._key]), True
        except (KeyError, TypeError):
            measured = measure()
            self._timing.put(self._key, measured.as_dict())
            return measured, False

    def with_pool_as_before(self, memory: Memory) -> Memory:
        """The memory with the pool size of the last such start, whose steps are compiled. Only if
        the size is not configured, and the last one is no larger and not much smaller. Keeps the
        size for the next start."""
        if self._pools is None or not memory.modest:
            return memory
        match self._pools.read().get(self._key):
            case [int(blocks), int(allocated)] if (
                2 <= blocks <= allocated <= memory.allocated_blocks < _MUCH * blocks
            ):
                memory = dataclasses.replace(memory, num_blocks=blocks, allocated_blocks=allocated)
        self._pools.put(self._key, [memory.num_blocks, memory.allocated_blocks])
        return memory


NOWHERE = StartCache("", {})
