"""A schedule found by search that knows arrivals and output lengths, which no server can (AccelGen
section 6.1, "Oracle").

The search is in `jaxserve/simulator/oracle/search.py`, which a simulation of `oracle` runs first;
its result is a policy, `Ordered` from here or another one.
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
    """The unified scheduler with requests in a given order. given: float64 [n], a number for each
    request of the workload; the smallest is the most urgent."""

    given: np.ndarray = field(default_factory=lambda: np.zeros(0))
    hypothetical: bool = True

    def ranking(self, view: View, now: float) -> Ranking:
        """By the given numbers."""
        known = view.oracle
        assert known is not None  # since the policy is hypothetical

        def keys(rows: np.ndarray) -> np.ndarray:
            return evaluate(_given, view, rows, self.given[known.numbers(rows)])

        return rank(view, keys, self.requeue)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """Unknown: the numbers belong to one workload."""
        return None

    def compiled_spec(self) -> CompiledSpec | None:
        """The compiled form of `ranking`."""
        plain = super().compiled_spec()
        return plain and CompiledSpec(_given, self.given)


def _given(r: Any) -> Any:
    return r.given


class Portfolio(enum.Enum):
    """The policies with which a search begins."""

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
    """`edf+ef` if no search is made.

    seconds: how long it continues to search after all policies of the portfolio were tried. runs:
        number of simulations instead, so that the outcome is always the same. portfolio: see
        `Portfolio`. rule: when a request attains its SLO. ValueError for negative numbers.
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
        """Plans like `edf+ef`."""
        return _UNSEARCHED.plan(view, now)
