"""Reading fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

# A larger number is a mistake, or meant to fill the memory.
MAX_POSITION = 1 << 27
_MOST_OF = {
    "num_hidden_layers": 4096,
    "max_position_embeddings": MAX_POSITION,
    "original_max_position_embeddings": MAX_POSITION,
}
_MOST_ELSE = 1 << 24
_LEAST, _MOST = 1e-30, 1e30
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: Any) -> str:
    """A field's value for a message, shortened if it is long."""
    return _repr.repr(value)


def positive_int(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The field as an int of at least 1. Raises ValueError, which names the field, if it is
    missing, something else or absurdly large."""
    value = hf.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {field} must be a positive integer, got {shown(value)}")
    most = _MOST_OF.get(field, _MOST_ELSE)
    if value > most:
        raise ValueError(f"config.json: {field} must be at most {most}, got {shown(value)}")
    return value


def layer_count(hf: Mapping[str, Any], field: str) -> int:
    """The field as a number of layers, 0 if it is missing. Raises ValueError, which names the
    field, if it is something else."""
    value = hf.get(field)
    value = 0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"config.json: {field} must be a number of layers, got {shown(value)}")
    return value


def number(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """The field as a finite float above 0. Raises ValueError, which names the field, if it is
    missing or something else."""
    value = hf.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST < value < _MOST:
        raise ValueError(f"config.json: {field} must be a number above 0, got {shown(value)}")
    return float(value)


def flag(hf: Mapping[str, Any], field: str, default: bool) -> bool:
    """The field as a bool. Raises ValueError, which names the field, if it is something else."""
    value = hf.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {field} must be true or false, got {shown(value)}")
    return value


def one_of(hf: Mapping[str, Any], field: str, known: tuple[str, ...]) -> str:
    """The field (default: the first known value). Raises ValueError, which names the field, if its
    value is not known."""
    value = hf.get(field)
    value = known[0] if value is None else value
    if value not in known:
        raise ValueError(
            f"config.json: {field} {shown(value)} is not supported (known: {', '.join(known)})"
        )
    return value


def mapping(hf: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The field as an object, empty if it is missing. Raises ValueError, which names the field, if
    it is something else."""
    value = hf.get(field) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {field} must be an object, got {shown(value)}")
    return value


def token_ids(hf: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple without repeats."""
    value = hf.get(field)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(f"config.json: {field} must hold token ids, got {shown(value)}")
    return tuple(dict.fromkeys(values))


def bos_token_id(hf: Mapping[str, Any]) -> int | None:
    """The first of the ids in `bos_token_id`; None if there is none."""
    ids = token_ids(hf, "bos_token_id")
    return ids[0] if ids else None


LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_types(
    hf: Mapping[str, Any],
    num_layers: int,
    default: list[str],
    known: tuple[str, ...] = LAYER_TYPES,
) -> list[str]:
    """What each layer attends to.

    Args:
        hf: the config.
        num_layers: its layers.
        default: used if the field is missing.
        known: what a layer may be.

    Raises:
        ValueError: it is something else; names the field.
    """
    kinds = hf.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        what = f"must be a list of {num_layers}, got {shown(kinds)}"
        raise ValueError(f"config.json: layer_types {what}")
    for kind in kinds:
        if kind not in known:
            what = f"{shown(kind)}, which is not supported (known: {', '.join(known)})"
            raise ValueError(f"config.json: layer_types has {what}")
    return kinds
