"""Optional columns of any trace, beside arrival and lengths, and the parsing of single cells.
Invalid cells are rejected with file, line and column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.request import NO_CLASS, Tier
from jaxserve.sched.slo.classes import SloClassError, class_name, tier_named, truth_of, value_of
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns
from jaxserve.simulator.workloads.workload import MAX_LENGTH, WorkloadError

NO_LIMIT = 0  # for requests without max_tokens


@dataclass(frozen=True)
class Extras:
    """The optional columns of a request of a trace.

    Attributes:
        limit: max_tokens, or NO_LIMIT.
        tier: Real-time or best-effort.
        ttft, tbt, jct, max_tbt: Targets in seconds, inf for none.
        slo_class: Name of its class.
        greedy: Whether it takes the most likely token.
        value: See `Request.value`.
    """

    limit: int = NO_LIMIT
    tier: Tier = Tier.REALTIME
    ttft: float = math.inf
    tbt: float = math.inf
    jct: float = math.inf
    max_tbt: float = math.inf
    slo_class: str = NO_CLASS
    greedy: bool = True
    value: float = 1.0


def length_of(where: str, name: str, text: str) -> int:
    """Parses a trace cell as a number of tokens. Raises WorkloadError with `where` and the
    column."""
    # int() would also accept " 7", "1_000" and digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise WorkloadError(f"{where}: {name} must be a whole number, got {text!r:.40}")
    if len(text) > 10 or not 1 <= int(text) <= MAX_LENGTH:
        raise WorkloadError(f"{where}: {name} must be 1 to {MAX_LENGTH}, got {text:.20}")
    return int(text)


def seconds_of(where: str, name: str, text: str) -> float:
    """Parses a trace cell as a time of 0 or more. Raises WorkloadError with `where` and the
    column."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise WorkloadError(f"{where}: {name} must be a time from 0, got {text!r:.40}")
    return value


def _target(where: str, name: str, text: str) -> float:
    value = seconds_of(where, name, text) / 1e3
    if value == 0:
        raise WorkloadError(f"{where}: {name} must be a positive time, got {text!r:.40}")
    return value


# Column -> field of Extras, and the parser of the cell.
_COLUMNS: dict[str, tuple[str, Callable[[str, str, str], Any]]] = {
    "max_tokens": ("limit", length_of),
    "tier": ("tier", lambda where, name, text: tier_named(f"{where}: {name}", text)),
    **{f"{name}_ms": (name, _target) for name in ALL_TARGETS},
    "class": ("slo_class", lambda where, name, text: class_name(f"{where}: {name}", text)),
    "greedy": ("greedy", lambda where, name, text: truth_of(f"{where}: {name}", text)),
    "value": ("value", lambda where, name, text: value_of(f"{where}: {name}", text)),
}
OPTIONAL_COLUMNS = tuple(_COLUMNS)


def extras_of(where: str, cells: Mapping[str, str], output_len: int) -> Extras:
    """Parses a row's optional columns; empty cells are skipped. Raises WorkloadError with `where`
    and the column."""
    values = {}
    for name, text in cells.items():
        if text:
            field, read = _COLUMNS[name]
            try:
                values[field] = read(where, name, text)
            except SloClassError as error:
                raise WorkloadError(str(error)) from None
    extras = Extras(**values)
    if extras.limit != NO_LIMIT and extras.limit < output_len:
        raise WorkloadError(
            f"{where}: max_tokens is {extras.limit}, less than the {output_len} tokens written"
        )
    return extras


def terms_of(rows: Sequence[Extras]) -> SloColumns:
    """The rows as columns. Classes are in order of first appearance."""
    classes = tuple(dict.fromkeys(row.slo_class for row in rows))
    index = {name: i for i, name in enumerate(classes)}
    return SloColumns(
        np.array([row.tier for row in rows], np.int8),
        **{name: np.array([getattr(row, name) for row in rows]) for name in ALL_TARGETS},
        slo_class=np.array([index[row.slo_class] for row in rows], np.int64),
        greedy=np.array([row.greedy for row in rows], bool),
        classes=classes,
        value=np.array([row.value for row in rows], np.float64),
    )
