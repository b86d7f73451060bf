"""What requests are told when they come of how long they will wait, and who is refused for it, as
by the server."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.request import Request
from jaxserve.sched.simulation.replica.replica import Replica
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.slo_admission import is_late
from jaxserve.sched.slo.ttft_estimator import TtftEstimator


class Lateness:
    """refuse_late: as the server's of that name; inf predicts and refuses nobody, None does
    neither."""

    def __init__(self, refuse_late: float | None) -> None:
        self._share = refuse_late
        self._expected: dict[int, float] = {}

    def admits(self, machine: Replica, number: int, request: Request, now: float) -> bool:
        """Whether the request, which comes to that replica now, is taken."""
        if self._share is None:
            return True
        wait = TtftEstimator(
            Backlog.from_scheduler(machine.scheduler, now, machine.device_free)
        ).wait(request, now)
        self._expected[number] = wait.seconds
        return not is_late(wait, request, self._share)

    def expected(self, numbers: np.ndarray) -> np.ndarray | None:
        """Seconds until the first token, as they were predicted for these requests, float64 [n]."""
        if self._share is None:
            return None
        return np.array([self._expected.get(number, math.nan) for number in numbers.tolist()])
