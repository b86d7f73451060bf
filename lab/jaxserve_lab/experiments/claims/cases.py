"""The simulated runs of the pages on papers, and what is taken from them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Policy, View
from jaxserve_lab.experiments.common.runs import digits

Numbers = dict[str, Any]
"""What a case comes to, by name. The `run` of each paper says what each number is."""


class Case:
    """Base of the dataclasses of cases."""

    def named(self) -> dict[str, Any]:
        """Its fields, without those that have their default."""
        usual = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        values = asdict(self)  # type: ignore[call-overload]
        named = {name: value for name, value in values.items() if value != usual[name]}
        return named | ({"switches": dict(named["switches"])} if "switches" in named else {})


class Timed(Policy):
    """A policy whose plans are timed: CPU seconds of each."""

    def __init__(self, policy: Policy) -> None:
        self.seconds: list[float] = []
        self._policy = policy
        for name, value in vars(Policy).items():
            if isinstance(value, bool):  # what it says of itself
                setattr(self, name, getattr(policy, name))

    def plan(self, view: View, now: float) -> BatchPlan:
        """The policy's plan."""
        begin = time.thread_time()
        plan = self._policy.plan(view, now)
        self.seconds.append(time.thread_time() - begin)
        return plan


def shortened(values: Mapping[str, Any], count: int = 5) -> Numbers:
    """Rounds the values to `count` significant digits, all but integers; of lists each."""
    return {name: _short(value, count) for name, value in values.items()}


def _short(value: Any, count: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_short(one, count) for one in value)
    return value if isinstance(value, int) else digits(value, count)
