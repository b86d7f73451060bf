"""The SLOs and options of many requests, one array per property."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.request import (
    LEAST_MAX_TBT,
    LEAST_VALUE,
    MAX_TBT,
    MOST_VALUE,
    NO_CLASS,
    Tier,
)

TARGETS = ("ttft", "tbt", "jct")
"""What the papers' rule looks at (`request.Rule`)."""
ALL_TARGETS = (*TARGETS, "max_tbt")
"""The fields of `SLO`, in order."""


@dataclass(frozen=True)
class SloColumns:
    """What n requests ask for, except for the work itself.

    Attributes:
        tier: int8 [n] of `Tier`.
        ttft, tbt, jct, max_tbt: float64 [n], the requested targets of `request.SLO` in seconds; inf
        for none.
        slo_class: int64 [n], index into classes; requests of a class are reported together.
        greedy: bool [n], which requests take the most likely token
        (`SamplingParams.is_plain_greedy`).
        classes: Names.
        value: float64 [n], `Request.value`; 1 if omitted.

    Raises:
        ValueError: The columns do not fit together.
    """

    tier: np.ndarray
    ttft: np.ndarray
    tbt: np.ndarray
    jct: np.ndarray
    max_tbt: np.ndarray
    slo_class: np.ndarray
    greedy: np.ndarray
    classes: tuple[str, ...] = (NO_CLASS,)
    value: Any = None

    def __post_init__(self) -> None:
        shape = self.tier.shape
        if self.value is None:
            object.__setattr__(self, "value", np.ones(shape))
        names = (*ALL_TARGETS, "slo_class", "greedy", "value")
        if any(getattr(self, name).shape != shape for name in names):
            raise ValueError(f"tier, {', '.join(names)} must have the same length")
        if not np.isin(self.tier, list(Tier)).all():
            raise ValueError(f"tier must be one of {', '.join(f'{int(t)}' for t in Tier)}")
        for name in ALL_TARGETS:
            values = getattr(self, name)
            if not (values > 0).all():  # nor nan
                raise ValueError(f"{name} must be a positive time, got {values.min()}")
        if not ((self.value >= LEAST_VALUE) & (self.value <= MOST_VALUE)).all():
            raise ValueError(f"value must be between {LEAST_VALUE:g} and {MOST_VALUE:g}")
        if ((self.slo_class < 0) | (self.slo_class >= len(self.classes))).any():
            raise ValueError("slo_class must be an index into classes")

    @classmethod
    def none(cls, count: int) -> SloColumns:
        """Columns of `count` greedy real-time requests without targets."""
        never, first = np.full(count, np.inf), np.zeros(count, np.int64)
        return cls(first.astype(np.int8), *(never,) * 4, first, np.ones(count, bool))

    def __len__(self) -> int:
        return len(self.tier)

    @property
    def max_tbt_that_counts(self) -> np.ndarray:
        """`max_tbt` with its default (`SLO.with_max_tbt`), float64 [n]; inf for none."""
        default = np.maximum(MAX_TBT * self.tbt, LEAST_MAX_TBT)
        return np.where(self.max_tbt < np.inf, self.max_tbt, default)

    @property
    def asked(self) -> np.ndarray:
        """Which requests have any target, bool [n]: others neither attain nor miss any."""
        return np.asarray(np.minimum.reduce([getattr(self, n) for n in ALL_TARGETS]) < np.inf)

    @classmethod
    def joined(cls, parts: Sequence[SloColumns]) -> SloColumns:
        """Concatenates the parts; classes of the same name are merged."""
        classes = tuple(dict.fromkeys(name for part in parts for name in part.classes))
        index = [
            np.array([classes.index(n) for n in part.classes])[part.slo_class] for part in parts
        ]
        names = ("tier", *ALL_TARGETS, "greedy", "value")
        columns = {n: np.concatenate([getattr(part, n) for part in parts]) for n in names}
        return cls(**columns, slo_class=np.concatenate(index), classes=classes)

    def select(self, which: np.ndarray) -> SloColumns:
        """The columns of selected requests: indices, or a mask."""
        names = ("tier", *ALL_TARGETS, "slo_class", "greedy", "value")
        return dataclasses.replace(self, **{name: getattr(self, name)[which] for name in names})
