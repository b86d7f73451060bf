"""The batch settings of a config."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from jaxserve.config import AUTO, ConfigError, SchedulerConfig, ServerConfig
from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.batches.directory import OTHER_DIRECTORIES, NotWritable
from jaxserve.server.batches.journal import Journal
from jaxserve.writable import missing_folders, remove_empty

log = logging.getLogger(__name__)

_DAY_S = 86_400.0


def batch_directory(server: ServerConfig) -> Path | None:
    """The journal's directory; None if there are no batches. "auto" means none for a server on any
    free port, since its next run would not find them. Raises ConfigError if "~" has no home
    directory."""
    directory, port = server.batch_dir, server.port
    if directory == AUTO:
        directory = f"~/.local/state/jaxserve/batches-{port}" if port else ""
    try:
        return Path(directory).expanduser() if directory else None
    except RuntimeError:
        if server.batch_dir == AUTO:
            log.warning("no batches are taken: there is no home directory; %s", OTHER_DIRECTORIES)
            return None
        problem = f"there is no home directory for {directory}; {OTHER_DIRECTORIES}"
        raise ConfigError(f"server.batch_dir: {problem}") from None


@contextlib.contextmanager
def open_batches(
    server: ServerConfig, scheduler: SchedulerConfig
) -> Iterator[BatchSettings | None]:
    """Opens the journal for the duration of the context; Yields None if there are no batches, and,
    with a warning, if the directory of "auto" cannot be written to. A directory that was made for
    it is removed if the context fails before a batch has come. Raises ConfigError if another server
    has the directory or it cannot be written to."""
    directory = batch_directory(server)
    if directory is None:
        yield None
        return
    half = max(scheduler.max_queue // 2, 1)
    made = missing_folders(directory)
    try:
        journal = Journal(directory, max_bytes=int(server.batch_gib * 2**30))
    except NotWritable as error:
        if server.batch_dir != AUTO:
            raise
        log.warning("no batches are taken: %s", error)
        yield None
        return
    try:
        yield BatchSettings(
            journal=journal,
            in_flight=server.batch_in_flight or min(2 * scheduler.max_rows, half),
            keep_s=server.batch_keep_days * _DAY_S,
            key_share=server.batch_key_share,
            key_files=server.batch_key_files,
        )
    except BaseException:
        if made:
            with contextlib.suppress(OSError, sqlite3.Error):  # report the original error
                journal.close_unused()
                remove_empty(made)
        raise
    finally:
        journal.close()
