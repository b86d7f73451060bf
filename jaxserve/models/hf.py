"""Reading fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def positive_int(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The field as an int of at least 1; ValueError naming it when missing or something else."""
    value = hf.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {field} must be a positive integer, got {value!r}")
    return value


def number(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """The field as a float above 0; ValueError naming it when missing or something else."""
    value = hf.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {field} must be a number above 0, got {value!r}")
    return float(value)


def flag(hf: Mapping[str, Any], field: str, default: bool) -> bool:
    """The field as a bool; ValueError naming it when it is something else."""
    value = hf.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {field} must be true or false, got {value!r}")
    return value


def one_of(hf: Mapping[str, Any], field: str, known: tuple[str, ...]) -> str:
    """The field (default: the first known value); ValueError naming it when it is not known."""
    value = hf.get(field)
    value = known[0] if value is None else value
    if value not in known:
        raise ValueError(f"config.json: {field} {value!r} is not supported (known: {_list(known)})")
    return value


def token_ids(hf: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple without repeats."""
    value = hf.get(field)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(f"config.json: {field} must hold token ids, got {value!r}")
    return tuple(dict.fromkeys(values))


def bos_token_id(hf: Mapping[str, Any]) -> int | None:
    """The first of the ids that `bos_token_id` gives; None where it gives none."""
    ids = token_ids(hf, "bos_token_id")
    return ids[0] if ids else None


def refuse_quantized(hf: Mapping[str, Any]) -> None:
    """ValueError when the checkpoint's weights are quantized."""
    given = hf.get("quantization_config")
    if given is not None:
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else repr(given)
        raise ValueError(
            f"config.json: quantization_config ({method}) is not supported; "
            "use a checkpoint with float32, float16 or bfloat16 weights"
        )


def _list(known: tuple[str, ...]) -> str:
    return ", ".join(known)
