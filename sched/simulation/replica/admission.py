"""What requests are told when they come of how long they will wait, and who is refused, as by the
server: for that, or since the replica's queue is full."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.request import Request
from jaxserve.sched.simulation.replica.outputs import Outputs
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


class BoundedQueue:
    """Counts the requests that are queued or running at each replica.

    capacity: how many one has at most, inf for any number. outputs: of all requests, as far as they
    are known.
    """

    def __init__(self, capacity: float, replicas: int, outputs: Outputs) -> None:
        self._capacity, self._outputs = capacity, outputs
        self._unfinished: list[list[int]] = [[] for _ in range(replicas)]

    def admits(self, replica: int, number: int, now: float) -> bool:
        """Whether request `number`, which comes at `now`, finds room; then it counts."""
        if self._capacity == math.inf:
            return True
        mine = np.array(self._unfinished[replica], np.int64)
        over = self._outputs.last_times(mine) <= now
        self._unfinished[replica] = mine[~over].tolist()
        if len(self._unfinished[replica]) >= self._capacity:
            return False
        self._unfinished[replica].append(number)
        return True
