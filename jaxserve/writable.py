"""Whether what a flag names can be written: asked before the work whose result goes there."""

from __future__ import annotations

import os
from pathlib import Path


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
