"""A directory that one process has to itself."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from jaxserve.config import ConfigError


class LockedDirectory:
    """Makes the directory, for its owner's eyes only, if it is not there, and locks it; the system
    lets go of it when the process ends, however that happens.

    Raises ConfigError where another has it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"server.batch_dir: {path}: {error.strerror}; {OTHER_DIRECTORIES}"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.write(self._file, str(os.getpid()).encode())
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            holder = os.read(self._file, 32).decode(errors="replace")
            os.close(self._file)
            why = f"in use by another server (process {holder})" if busy else error.strerror
            raise ConfigError(f"server.batch_dir: {path}: {why}; {OTHER_DIRECTORIES}") from None

    def release(self) -> None:
        """Unlocks it. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


OTHER_DIRECTORIES = (
    "--config.server.batch_dir=DIR names another, --config.server.batch_dir= takes no batches"
)
