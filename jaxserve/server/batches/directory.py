"""A directory that one process has to itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from jaxserve.config import ConfigError
from jaxserve.file_lock import lock

LOCK = "lock"  # the file that is locked


class NotWritable(ConfigError):
    """The directory cannot be made or written to."""


def lock_directory(path: Path) -> IO[str]:
    """Makes the directory if it is missing, readable by its owner only, and locks it until the
    returned file is closed or the process ends. Raises ConfigError if another process has locked
    it, and NotWritable if it cannot be written to."""
    file = path / LOCK
    held: IO[str] | None = None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = lock(file)
        if held is None:
            holder = file.read_text(errors="replace")[:32]
            raise BlockingIOError(0, f"in use by another server (process {holder})")
        held.truncate(0)
        os.write(held.fileno(), str(os.getpid()).encode())
    except OSError as error:
        if held is not None:
            held.close()
        problem = f"{path}: {error.strerror}; {OTHER_DIRECTORIES}"
        kind = ConfigError if isinstance(error, BlockingIOError) else NotWritable
        raise kind(f"server.batch_dir: {problem}") from None
    return held


OTHER_DIRECTORIES = (
    "--config.server.batch_dir=DIR names another, --config.server.batch_dir= takes no batches"
)
