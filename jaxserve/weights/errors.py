"""The one error of the loaders."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, tensor or field, in one line."""
