"""vLLM in this process, with schedulers that are exchanged while nothing is served."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # jaxserve need not be installed
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)  # vLLM reads them when it is imported


@contextmanager
def engine(folder: str, config: dict[str, Any], **options: Any) -> Iterator[tuple[Any, Any]]:
    """A vLLM engine with random weights in float32: the `LLM`, and its core, which has the
    scheduler.

    Args:
        folder: Where the model's config.json is written.
        config: Its content.
        options: Further options of `vllm.LLM`, which has no tokenizer otherwise.
    """
    import vllm

    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    usual = {"load_format": "dummy", "dtype": "float32", "disable_log_stats": True}
    made = vllm.LLM(model=folder, **{"skip_tokenizer_init": True, **usual, **options})
    yield made, made.llm_engine.engine_core.engine_core


def scheduler(core: Any, name: str | None, /, **changes: Any) -> Any:
    """A new scheduler for an engine: ours with the policy of that name, or vLLM's own.

    Args:
        core: The engine's core.
        name: The policy's; None for vLLM's own scheduler.
        changes: Fields of vLLM's scheduler config that differ.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    import jaxserve.vllm

    config, old = copy.copy(core.vllm_config), core.scheduler
    length = config.model_config.max_model_len
    config.scheduler_config = dataclasses.replace(
        config.scheduler_config, max_model_len=length, is_encoder_decoder=False, **changes
    )
    config.additional_config = {"jaxserve": {"policy": name}} if name else {}
    return (jaxserve.vllm.Scheduler if name else Scheduler)(
        vllm_config=config,
        kv_cache_config=old.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
        log_stats=True,
    )


def exchange(core: Any, new: Any) -> None:
    """Lets the engine go on with this scheduler. Its own must have no requests."""
    assert not core.scheduler.requests
    new.finished_req_ids |= core.scheduler.finished_req_ids  # the worker has not heard of them yet
    core.scheduler = new
