"""Converts ml_collections' ConfigDict, made by config files and `--config` flags, to the tree of
dataclasses and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxserve.config.errors import ConfigError
from jaxserve.config.tree import Config, config_from_dict


def default_config_dict() -> ConfigDict:
    """All fields with their defaults."""
    return ConfigDict(Config().as_dict())


def config_from_config_dict(given: object, fields: Mapping[str, Any] | None = None) -> Config:
    """The configuration tree of a ConfigDict.

    Args:
        given: Result of a `get_config()`, changed by flags.
        fields: Other values of some fields, by name as `section__field`.

    Raises:
        ConfigError: It is not a ConfigDict, its fields or types are not those of base.py, or a
            value is out of range.
    """
    if not isinstance(given, ConfigDict):
        raise ConfigError(f"config: get_config() returned {type(given).__name__}, not ConfigDict")
    return config_from_dict(given.copy_and_resolve_references().to_dict(), fields)
