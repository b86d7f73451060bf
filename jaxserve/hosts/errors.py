"""The one error of a group of hosts."""

from __future__ import annotations


class GroupError(ValueError):
    """The hosts do not make a group; the message names the field, in one line."""
