"""Dataclasses from JSON, with every value checked against the type of its field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

MOST = 2**53  # largest whole number that a float counts to
_Record = TypeVar("_Record")


def is_count(value: Any) -> bool:
    """Whether the value is a whole number of JSON, 0 or more."""
    return type(value) is int and 0 <= value <= MOST


def is_number(value: Any) -> bool:
    """Whether the value is a finite number of JSON."""
    if type(value) is int:
        return abs(value) < 1e300
    return type(value) is float and math.isfinite(value)


_TAKES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", is_count),
    float: ("a number", is_number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    dict: ("a JSON object", lambda value: isinstance(value, dict)),
    tuple: ("a list", lambda value: isinstance(value, list)),
}


def read_record(kind: type[_Record], value: Any, name: str = "") -> _Record:
    """A dataclass from the JSON of `dataclasses.asdict`.

    Args:
        kind: Class of the record.
        value: Parsed JSON.
        name: Name of the value in messages; "" for the whole file.

    Raises:
        ValueError: A field is missing or unknown, or its value has another type. The message names
            it.
    """
    found = _of_type(dict, value, name or "it")
    hints, where = get_type_hints(kind), f"{name}." if name else ""
    for field in fields(kind):  # type: ignore[arg-type]
        optional = (field.default, field.default_factory) != (MISSING, MISSING)
        if not (field.name in found or optional):
            raise ValueError(f"{where}{field.name} is missing")
    for key in sorted(found.keys() - hints.keys()):
        raise ValueError(f"{where + key!r:.60} is not a field")
    return kind(**{key: _of_type(hints[key], found[key], where + key) for key in found})


def _of_type(hint: Any, value: Any, name: str) -> Any:
    parts = get_args(hint)
    if type(None) in parts:
        return None if value is None else _of_type(parts[0], value, name)
    if isinstance(hint, type) and is_dataclass(hint):
        return read_record(hint, value, name)
    kind = get_origin(hint) or hint
    takes, fits = _TAKES[kind]
    if not fits(value):
        raise ValueError(f"{name} must be {takes}, got {value!r:.40}")
    if kind is tuple:
        return tuple(_of_type(parts[0], one, name) for one in value)
    return float(value) if kind is float else value
