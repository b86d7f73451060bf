"""From ml_collections' ConfigDict, which config files and `--config` flags are made of, to the tree
and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxserve.config.errors import ConfigError
from jaxserve.config.tree import Config, config_from_dict


def default_config_dict() -> ConfigDict:
    """Every field with its default."""
    return ConfigDict(Config().as_dict())


def config_from_config_dict(given: object, fields: Mapping[str, Any] | None = None) -> Config:
    """The tree that all else is made of.

    Args:
        given: What a `get_config()` has returned, and flags have changed.
        fields: Other values of some fields, by name as `section__field`.

    Raises:
        ConfigError: It is no ConfigDict, or not one with base.py's fields and their types, or a
            value is out of its range.
    """
    if not isinstance(given, ConfigDict):
        raise ConfigError(f"config: get_config() returned {type(given).__name__}, not ConfigDict")
    return config_from_dict(given.copy_and_resolve_references().to_dict(), fields)
