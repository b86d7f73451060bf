"""What the config says of batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.engine.errors import ConfigError
from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.batches.directory import OTHER_DIRECTORIES
from jaxserve.server.batches.journal import Journal

AUTO = "auto"
_DAY_S = 86_400.0


def check_batches(config: Any) -> None:
    """Raises ConfigError for a field of `config.server` that is out of range."""
    server, queue = config.server, config.scheduler.max_queue
    if not 0 <= server.batch_in_flight <= max(queue, 0):
        limits = f"must be 0 to scheduler.max_queue ({queue}), got {server.batch_in_flight}"
        raise ConfigError(f"server.batch_in_flight: {limits}")
    for name in ("batch_keep_days", "batch_gib"):
        if not (math.isfinite(server[name]) and server[name] > 0):
            raise ConfigError(f"server.{name}: must be more than 0, got {server[name]}")
    if not 0 < server.batch_key_share <= 1:
        problem = f"must be more than 0 and at most 1, got {server.batch_key_share}"
        raise ConfigError(f"server.batch_key_share: {problem}")
    if server.batch_key_files < 1:
        problem = f"must be at least 1, got {server.batch_key_files}"
        raise ConfigError(f"server.batch_key_files: {problem}")


def batch_directory(config: Any) -> Path | None:
    """Where batches are kept; None: there are none. A server on any free port has no folder that
    its next run would find. Raises ConfigError where nobody is at home."""
    given, port = config.server.batch_dir, config.server.port
    if given == AUTO:
        given = f"~/.local/state/jaxserve/batches-{port}" if port else ""
    try:
        return Path(given).expanduser() if given else None
    except RuntimeError:
        problem = f"there is no home directory for {given}; {OTHER_DIRECTORIES}"
        raise ConfigError(f"server.batch_dir: {problem}") from None


@contextlib.contextmanager
def open_batches(config: Any) -> Iterator[BatchSettings | None]:
    """Has the journal open meanwhile; None where there is none. Raises ConfigError where another
    server has it, or it cannot be written."""
    directory = batch_directory(config)
    if directory is None:
        yield None
        return
    server, scheduler = config.server, config.scheduler
    half = max(scheduler.max_queue // 2, 1)
    journal = Journal(directory, max_bytes=int(server.batch_gib * 2**30))
    try:
        yield BatchSettings(
            journal=journal,
            in_flight=server.batch_in_flight or min(2 * scheduler.max_rows, half),
            keep_s=server.batch_keep_days * _DAY_S,
            key_share=server.batch_key_share,
            key_files=server.batch_key_files,
        )
    finally:
        journal.close()
