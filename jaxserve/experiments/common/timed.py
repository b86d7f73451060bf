"""How long a policy takes to plan."""

from __future__ import annotations

import time

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Policy, View


class Timed(Policy):
    """A policy whose plans are timed: CPU seconds of each."""

    def __init__(self, policy: Policy) -> None:
        self.seconds: list[float] = []
        self._policy = policy
        for name, value in vars(Policy).items():
            if isinstance(value, bool):  # what it says of itself
                setattr(self, name, getattr(policy, name))

    def plan(self, view: View, now: float) -> BatchPlan:
        """The policy's."""
        begin = time.thread_time()
        plan = self._policy.plan(view, now)
        self.seconds.append(time.thread_time() - begin)
        return plan
