"""Classes of requests with their own service-level objectives, as text and drawn by share.

A class in words: `NAME:SHARE`, then any of `tier=realtime|best_effort`, `greedy=true|false`,
`value=` with a number, and `ttft=`, `tbt=`, `jct=`, `max_tbt=` with a time in `ms` or `s`. Several
are separated by commas, and their shares add up to 1:

    chat:0.7:ttft=500ms:tbt=50ms,batch:0.3:tier=best_effort:jct=60s
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.request import LEAST_VALUE, MOST_VALUE, SLO, Tier
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns

NO_SLO = SLO()
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TIME = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(ms|s)")


class SloClassError(ValueError):
    """Invalid text of a class or of one of its terms; the message says which."""


@dataclass(frozen=True)
class SloClass:
    """A class of requests with their own SLOs.

    Attributes:
        name: Name in metrics.
        share: Share of the requests, in (0, 1].
        slo: Its targets.
        tier: Real-time or best-effort.
        greedy: Whether its requests take the most likely token; others are sampled at temperature
        1.
        value: Value of each of its requests (`Request.value`).

    Raises:
        SloClassError: The name or the share is invalid.
    """

    name: str
    share: float
    slo: SLO = NO_SLO
    tier: Tier = Tier.REALTIME
    greedy: bool = True
    value: float = 1.0

    def __post_init__(self) -> None:
        class_name("a class", self.name)
        if not 0 < self.share <= 1:
            raise SloClassError(f"class {self.name}: a share is in (0, 1], got {self.share}")

    def __str__(self) -> str:
        """The class as text, which `parse_classes` reads."""
        parts = [self.name, repr(self.share)]
        if self.tier is not Tier.REALTIME:
            parts.append(f"tier={self.tier.name.lower()}")
        if not self.greedy:
            parts.append("greedy=false")
        if self.value != 1:
            parts.append(f"value={self.value!r}")
        for name in ALL_TARGETS:
            seconds = getattr(self.slo, name)
            if seconds is not None:
                parts.append(f"{name}={seconds!r}s")
        return ":".join(parts)


def parse_classes(text: str) -> tuple[SloClass, ...]:
    """Parses classes in the order of the text. Raises SloClassError with what is wrong with it."""
    classes = tuple(_parse(part) for part in text.split(","))
    names = [one.name for one in classes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SloClassError(f"two classes are named {twice!r}")
    total = sum(one.share for one in classes)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise SloClassError(f"the shares of the classes must add up to 1, not {total:g}")
    return classes


def draw_terms(classes: Sequence[SloClass], count: int, rng: np.random.Generator) -> SloColumns:
    """SloColumns of `count` requests, each of a class drawn with its share."""
    shares = np.array([one.share for one in classes])
    which = rng.choice(len(classes), size=count, p=shares / shares.sum())
    targets = {
        name: np.array([seconds_or_inf(getattr(one.slo, name)) for one in classes])[which]
        for name in ALL_TARGETS
    }
    tier = np.array([one.tier for one in classes], np.int8)[which]
    greedy = np.array([one.greedy for one in classes])[which]
    value = np.array([one.value for one in classes])[which]
    names = tuple(one.name for one in classes)
    return SloColumns(
        tier,
        **targets,
        slo_class=which.astype(np.int64),
        greedy=greedy,
        classes=names,
        value=value,
    )


def with_targets(terms: SloColumns, slo: SLO) -> SloColumns:
    """The terms, with `slo` for requests that have no target of their own."""
    without = np.isinf([getattr(terms, name) for name in ALL_TARGETS]).all(axis=0)
    filled: dict[str, Any] = {
        name: np.where(without, seconds_or_inf(getattr(slo, name)), getattr(terms, name))
        for name in ALL_TARGETS
    }
    return dataclasses.replace(terms, **filled)


def seconds_or_inf(target: float | None) -> float:
    """The target in seconds, inf for none."""
    return math.inf if target is None else target


def class_name(where: str, text: str) -> str:
    """Checks the name of a class. The SloClassError begins with `where`."""
    if not _NAME.fullmatch(text):
        raise SloClassError(f"{where}: a name has letters, digits, '_', '-', '.', got {text!r:.40}")
    return text


def tier_named(where: str, text: str) -> Tier:
    """The tier of a given name. The SloClassError begins with `where` and lists the names."""
    names = {tier.name.lower(): tier for tier in Tier}
    if text not in names:
        raise SloClassError(f"{where}: must be one of {', '.join(names)}, got {text!r:.40}")
    return names[text]


def value_of(where: str, text: str) -> float:
    """Parses a `Request.value`. The SloClassError begins with `where`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST_VALUE <= value <= MOST_VALUE:
        limits = f"a number between {LEAST_VALUE:g} and {MOST_VALUE:g}"
        raise SloClassError(f"{where}: must be {limits}, got {text!r:.40}")
    return value


def truth_of(where: str, text: str) -> bool:
    """Parses true or false. The SloClassError begins with `where`."""
    if text not in ("true", "false"):
        raise SloClassError(f"{where}: must be true or false, got {text!r:.40}")
    return text == "true"


def _parse(part: str) -> SloClass:
    name, *rest = part.split(":")
    if not rest:
        raise SloClassError(f"a class is NAME:SHARE[:KEY=VALUE...], got {part!r:.60}")
    where = f"class {name}"
    try:
        share = float(rest[0])
    except ValueError:
        raise SloClassError(f"{where}: its share must be a number, got {rest[0]!r:.40}") from None
    values = values_of(where, rest[1:], ("tier", "greedy", "value", *ALL_TARGETS))
    greedy = truth_of(f"{where}: greedy", values.pop("greedy", "true"))
    value = value_of(f"{where}: value", values.pop("value", "1"))
    return SloClass(name, share, *_asked(where, values), greedy, value)


def parse_terms(where: str, text: str) -> tuple[SLO, Tier, float, float | None]:
    """Parses the terms of a class without its name and share, such as `ttft=500ms:tbt=50ms` or
    `tier=best_effort:value=0.5`. `greedy` is not one of them: requests set it themselves, and
    `program` is only here: a class's deadline of programs. The SloClassError begins with `where`.

    Returns:
        Its targets, tier, `Request.value` and `Program.usual_deadline`.
    """
    values = values_of(where, text.split(":"), ("tier", "value", *ALL_TARGETS, "program"))
    value = value_of(f"{where}: value", values.pop("value", "1"))
    program = values.pop("program", None)
    deadline = None if program is None else time_of(f"{where}: program", program)
    return (*_asked(where, values), value, deadline)


def values_of(where: str, items: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Parses `KEY=VALUE` items, each key once at most. The SloClassError begins with `where`."""
    values: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or key not in keys or key in values:
            named = [f"{key}=" for key in keys]
            once = ", each once" if key in values else ""
            known = f"{', '.join(named[:-1])} and {named[-1]}"
            raise SloClassError(f"{where}: may have {known}{once}, got {item!r:.40}")
        values[key] = value
    return values


def _asked(where: str, values: dict[str, str]) -> tuple[SLO, Tier]:
    tier = tier_named(f"{where}: tier", values.pop("tier", "realtime"))
    return SLO(**{key: time_of(f"{where}: {key}", value) for key, value in values.items()}), tier


def time_of(where: str, text: str) -> float:
    """Parses a positive time such as `200ms` or `1.5s` into seconds. The SloClassError begins with
    `where`."""
    found = _TIME.fullmatch(text)
    value = float(found[1]) / (1e3 if found[2] == "ms" else 1.0) if found else 0.0
    if not (math.isfinite(value) and value > 0):
        raise SloClassError(f"{where}: must be a time such as 200ms or 1.5s, got {text!r:.40}")
    return value
