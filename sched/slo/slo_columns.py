"""What many requests ask for, one array a property."""

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
    """What n requests ask for beside the work itself.

    Attributes:
        tier: int8 [n] of `Tier`.
        ttft, tbt, jct, max_tbt: float64 [n], seconds, the targets that `request.SLO` explains, as
            they were asked for; inf for none.
        slo_class: int64 [n], index into classes, whose requests are reported together.
        greedy: bool [n], who takes the most likely token as it is
            (`SamplingParams.is_plain_greedy`).
        classes: Names.
        value: float64 [n], `Request.value`; 1 if it is left out.

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
        """Of `count` greedy real-time requests without targets."""
        never, first = np.full(count, np.inf), np.zeros(count, np.int64)
        return cls(first.astype(np.int8), *(never,) * 4, first, np.ones(count, bool))

    def __len__(self) -> int:
        return len(self.tier)

    @property
    def max_tbt_that_counts(self) -> np.ndarray:
        """`max_tbt` as it counts, where it has a default (`SLO.with_max_tbt`), float64 [n]; inf for
        none."""
        default = np.maximum(MAX_TBT * self.tbt, LEAST_MAX_TBT)
        return np.where(self.max_tbt < np.inf, self.max_tbt, default)

    @property
    def asked(self) -> np.ndarray:
        """Who has a target at all, bool [n]: the others neither attain nor miss any."""
        return np.asarray(np.minimum.reduce([getattr(self, n) for n in ALL_TARGETS]) < np.inf)

    @classmethod
    def joined(cls, parts: Sequence[SloColumns]) -> SloColumns:
        """One after the other; classes of the same name are one."""
        classes = tuple(dict.fromkeys(name for part in parts for name in part.classes))
        index = [
            np.array([classes.index(n) for n in part.classes])[part.slo_class] for part in parts
        ]
        names = ("tier", *ALL_TARGETS, "greedy", "value")
        columns = {n: np.concatenate([getattr(part, n) for part in parts]) for n in names}
        return cls(**columns, slo_class=np.concatenate(index), classes=classes)

    def select(self, which: np.ndarray) -> SloColumns:
        """Those of some requests: indices, or a mask."""
        names = ("tier", *ALL_TARGETS, "slo_class", "greedy", "value")
        return dataclasses.replace(self, **{name: getattr(self, name)[which] for name in names})
