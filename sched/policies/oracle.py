"""What nobody can do: a schedule found by search, knowing arrivals and output lengths (AccelGen
section 6.1, "Oracle").

The search is in `jaxserve/simulator/oracle/search.py`, which a simulation of `oracle` runs first;
what it finds is a policy here, `Ordered`, or one of the others.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.edf import EarliestDeadline
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import register
from jaxserve.sched.request import Rule
from jaxserve.sched.unified.policy_spec import CompiledSpec, evaluate
from jaxserve.sched.unified.ranking import Ranking, rank
from jaxserve.sched.unified.unified_policy import UnifiedPolicy, eviction_free


@dataclass(frozen=True)
class Ordered(UnifiedPolicy):
    """The unified scheduler with the requests in a given order. given: float64 [n], a number for
    each of the workload's; the smallest is the most urgent."""

    given: np.ndarray = field(default_factory=lambda: np.zeros(0))
    hypothetical: bool = True

    def ranking(self, view: View, now: float) -> Ranking:
        """By the numbers."""
        known = view.oracle
        assert known is not None  # as it is hypothetical

        def keys(rows: np.ndarray) -> np.ndarray:
            return evaluate(_given, view, rows, self.given[known.numbers(rows)])

        return rank(view, keys, self.requeue)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """Unknown: the numbers are those of one workload."""
        return None

    def compiled_spec(self) -> CompiledSpec | None:
        """As `ranking` has it."""
        plain = super().compiled_spec()
        return plain and CompiledSpec(_given, self.given)


def _given(r: Any) -> Any:
    return r.given


class Portfolio(enum.Enum):
    """Whose schedules a search begins with."""

    ALL = "every policy"
    QUICK = "those that can be simulated in machine code"


_UNSEARCHED = eviction_free(EarliestDeadline())


@register(
    "oracle",
    summary="the best schedule that a search finds, knowing arrivals and output lengths",
    source="AccelGen 6.1",
)
@dataclass(frozen=True)
class OraclePolicy(Policy):
    """Where nobody searches for it, `edf+ef`.

    seconds: how long it searches on, once every policy of the portfolio has been tried. runs:
    simulations instead, so that the outcome is the same each time. portfolio: see there. rule: who
    attains their SLO. ValueError for fewer than none.
    """

    seconds: float = 10.0
    runs: int | None = None
    portfolio: Portfolio = Portfolio.ALL
    rule: Rule = Rule.SERVER
    hypothetical = True
    counts_blocks = True

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds must be at least 0, got {self.seconds}")
        if self.runs is not None and self.runs < 0:
            raise ValueError(f"runs must be at least 0, got {self.runs}")

    def plan(self, view: View, now: float) -> BatchPlan:
        """As `edf+ef`."""
        return _UNSEARCHED.plan(view, now)
