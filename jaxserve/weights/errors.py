"""Errors of checkpoints, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve import checkpoint_files


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, tensor or field, in one line."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if the file is missing or not a JSON
    object."""
    try:
        content = checkpoint_files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
