"""Small files of a checkpoint, read as somebody else's: they may be no files, or endless."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_JSON = 64 << 20
"""Bytes of a JSON file: configs have kilobytes, an index of all tensors at most a few MiB."""


def regular_file(path: Path) -> int:
    """The size of a file, in bytes, that can be read without waiting for anybody.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be looked at.
        ValueError: it is a folder, a FIFO, a socket or a device.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    return found.st_size


def read_text(path: Path, most: int = MAX_JSON) -> str:
    """The UTF-8 text of a regular file of at most `most` bytes. Raises as `regular_file`, and
    ValueError for more bytes, or others than UTF-8."""
    size = regular_file(path)
    if size > most:
        raise ValueError(f"it has {size:,} bytes, and {most:,} are allowed")
    with path.open("rb") as file:
        content = file.read(most + 1)  # it may grow meanwhile
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode()


def read_json(path: Path, most: int = MAX_JSON) -> Any:
    """What a JSON file holds. Raises as `read_text`, and ValueError where it is not valid JSON or
    nested too deeply."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
