"""The configuration: one tree of frozen dataclasses, made from ConfigDict where jaxserve is
entered, and checked when it is made."""

from jaxserve.config.errors import ConfigError
from jaxserve.config.sections import (
    AUTO,
    DTYPES,
    JSON,
    LOAD_FORMATS,
    TEXT,
    CacheConfig,
    EngineConfig,
    MeshConfig,
    SchedulerConfig,
    ServedModelConfig,
    ServerConfig,
    TelemetryConfig,
)
from jaxserve.config.tree import Config

__all__ = [
    "AUTO",
    "DTYPES",
    "JSON",
    "LOAD_FORMATS",
    "TEXT",
    "CacheConfig",
    "Config",
    "ConfigError",
    "EngineConfig",
    "MeshConfig",
    "SchedulerConfig",
    "ServedModelConfig",
    "ServerConfig",
    "TelemetryConfig",
]
