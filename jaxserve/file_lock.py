"""Whether a file, or what it stands for, is in use by another process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def private(path: Path, mode: str) -> IO[str]:
    """Opens a file of text, which is its owner's alone if it is made."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    return open(path, mode, encoding="utf-8", opener=opener)


def lock(
    path: Path,
    *,
    shared: bool = False,
    wait: bool = False,
    opened: Callable[[], IO[Any]] | None = None,
) -> IO[Any] | None:
    """Holds the file until what is returned is closed or the process ends. Who holds it alone may
    remove it.

    Args:
        path: the file.
        shared: whether to hold it together with others who share it.
        wait: whether to wait for others.
        opened: opens the file, and makes it if there is none; None for one of text, which is its
            owner's alone.

    Returns:
        None where others hold it.

    Raises:
        OSError: it cannot be made.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        file = private(path, "a") if opened is None else opened()
        try:
            fcntl.flock(file, how)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass  # who held it has removed it: this one means nothing
        except OSError:
            file.close()
            raise
        file.close()
