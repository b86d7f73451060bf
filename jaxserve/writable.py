"""Whether what a flag names can be written, asked before the work whose result goes there; and
files that are written whole or not at all, and folders that are made and may have to go."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

PARTIAL = ".partial"
"""How the name of a file ends that `replace_file` has not finished."""


def check_file(flag: str, path: Path) -> None:
    """ValueError names the flag, without its dashes, and says why the file cannot be written."""
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"--{flag}: {path} is a folder")
    if not folder.is_dir():
        raise ValueError(f"--{flag}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--{flag}: {path} cannot be written")


def check_folder(flag: str, path: Path) -> None:
    """The same for a folder to write into, which is made, with those above it, if there is none."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"--{flag}: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"--{flag}: {there} cannot be written to")


def missing_folders(path: Path) -> list[Path]:
    """A folder and those above it that are not there, the deepest first: what making it makes."""
    return [each for each in (path, *path.absolute().parents) if not each.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, the deepest first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes a file anew: all of it or nothing, whatever happens meanwhile. It is on the disk when
    this returns. One that was there keeps its mode; a new one is its owner's alone."""
    path = path.resolve()  # a link stays one
    handle, scratch = tempfile.mkstemp(PARTIAL, f".{path.name}.", path.parent)
    try:
        with open(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(scratch, path.stat().st_mode & 0o777)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
