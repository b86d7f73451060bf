"""The directories of compiled code: one for each state of the sources. The latest are kept."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import IO

from jaxserve.file_lock import lock

KEPT = 8  # directories, including the one in use
_USED, _MADE = "used.lock", "made.lock"  # held by users of a directory; by the compiling process
_held: list[IO[str]] = []


def use(folder: Path) -> bool:
    """Makes the directory if needed, and prevents its removal while this process lives. False if
    nothing can be kept there."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        if not os.access(folder, os.W_OK):
            return False
        try:
            held = lock(folder / _USED, shared=True, wait=True)
            os.utime(folder)
        except FileNotFoundError:
            continue  # it was just being removed
        except OSError:
            return False
        assert held is not None, "it waits"
        _held.append(held)
        return True


def is_empty(folder: Path) -> bool:
    """Whether nothing has been compiled into it yet."""
    return next(folder.rglob("*.nbc"), None) is None


def only_one(folder: Path) -> IO[str] | None:
    """Takes the lock for compiling into the directory; close the file to release it."""
    return lock(folder / _MADE, wait=True)


def remove_old(folder: Path) -> None:
    """Removes the least recently used directories beside it, except those in use."""
    others = [one for one in folder.parent.iterdir() if one != folder and _is_one(one)]
    others.sort(key=lambda one: one.stat().st_mtime, reverse=True)
    for old in others[KEPT - 1 :]:
        try:
            held = lock(old / _USED)
        except OSError:
            continue
        if held is not None:
            shutil.rmtree(old, ignore_errors=True)
            held.close()


def _is_one(folder: Path) -> bool:
    """Whether it is such a directory, by name and content. NUMBA_CACHE_DIR is shared with
    others."""
    if not re.fullmatch("[0-9a-f]{16}", folder.name) or not folder.is_dir():
        return False
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    return all(path.suffix in (".nbi", ".nbc") or path.name in (_USED, _MADE) for path in files)
