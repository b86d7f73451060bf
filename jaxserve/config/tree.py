"""All sections as one tree. Trees are made from named values, and checked, only here."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config.errors import ConfigError
from jaxserve.config.sections import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    MeshConfig,
    SchedulerConfig,
    ServedModelConfig,
    ServerConfig,
    TelemetryConfig,
)

OPEN_FIELDS = {  # fields with names of the user's own in them, and what one is called
    "lora.adapters": "adapter",
    "scheduler.params": "parameter",
    "server.slo_classes": "class",
}


@dataclass(frozen=True)
class Config:
    """Everything that can be set. A part of jaxserve gets the sections that it needs.

    Attributes:
        cache: The pool of blocks.
        engine: How steps are run.
        lora: Adapters beside the model.
        mesh: The devices.
        model: The served model.
        scheduler: Which requests are served next.
        server: Addresses, access and limits.
        telemetry: Logs and traces.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ServedModelConfig = field(default_factory=ServedModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        queue, in_flight = self.scheduler.max_queue, self.server.batch_in_flight
        if not 0 <= in_flight <= queue:
            limits = f"must be 0 to scheduler.max_queue ({queue}), got {in_flight}"
            raise ConfigError(f"server.batch_in_flight: {limits}")

    def with_fields(self, **fields: Any) -> Config:
        """The same configuration with other values.

        Args:
            fields: By name, `scheduler__max_rows=16`.

        Raises:
            ConfigError: There is no such field, or it cannot have that value.
        """
        return config_from_dict(self.as_dict(), fields)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The fields by section."""
        return dataclasses.asdict(self)


_DEFAULT = Config()
DEFAULTS: Mapping[str, Any] = {
    f"{section}.{name}": value
    for section, fields in _DEFAULT.as_dict().items()
    for name, value in fields.items()
}
"""All fields by path, SECTION.FIELD."""


def config_from_dict(given: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> Config:
    """The configuration tree of plain values.

    Args:
        given: Fields by section; all of them, and no others.
        fields: Other values of some of them, by name as `section__field`.

    Raises:
        ConfigError: A field is unknown, missing, of another type or out of its range.
    """
    leaves = dict(_leaves(given))
    for name, value in (fields or {}).items():
        path = name.replace("__", ".", 1)
        if path not in DEFAULTS:
            problem = "there is no such field; fields are named section__field"
            raise ConfigError(f"{name}: {problem}")
        leaves[path] = value
    for path in leaves:
        if path not in DEFAULTS:
            raise ConfigError(f"config: unknown field {path}{did_you_mean_field(path)}")
    for path, default in DEFAULTS.items():
        if path not in leaves:
            raise ConfigError(f"config: {path} is missing; start from configs/base.py")
        if not _fits(leaves[path], default):
            kind = "tuple of int" if isinstance(default, tuple) else type(default).__name__
            raise ConfigError(f"{path}: must be {kind}, got {leaves[path]!r}")
    sections: dict[str, dict[str, Any]] = {}
    for path, value in leaves.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    return Config(**{name: type(getattr(_DEFAULT, name))(**of) for name, of in sections.items()})


def field_docs(section: str) -> dict[str, str]:
    """Descriptions of a section's fields, by name."""
    text = inspect.getdoc(getattr(_DEFAULT, section)) or ""
    found: dict[str, str] = {}
    name = ""
    for line in text.partition("Attributes:\n")[2].splitlines():
        if line.startswith(" " * 8):
            found[name] += f" {line.strip()}"
        else:
            name, _, text = line.strip().partition(": ")
            found[name] = text
    return found


def section_docs() -> dict[str, str]:
    """Descriptions of the sections, by name."""
    return {
        name: (inspect.getdoc(section) or "").partition("\n")[0]
        for name, section in vars(_DEFAULT).items()
    }


def did_you_mean_field(path: str) -> str:
    """The end of a message about an unknown path: the nearest field, or all fields."""
    near = difflib.get_close_matches(path, DEFAULTS, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; fields are {', '.join(DEFAULTS)}"


def _leaves(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in OPEN_FIELDS:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(type(entry) is int for entry in value)
    if isinstance(default, float):
        return type(value) in (int, float)
    return type(value) is type(default)
