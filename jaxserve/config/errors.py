"""The error of a configuration."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot be served; the message says which field and what would work."""
