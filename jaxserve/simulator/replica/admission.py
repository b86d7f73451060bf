"""Admission as in the server: requests are refused if they would wait too long, or if the replica's
queue is full."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.request import Request
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.slo_admission import is_late
from jaxserve.sched.slo.ttft_estimator import TtftEstimator
from jaxserve.simulator.replica.outputs import Outputs
from jaxserve.simulator.replica.replica import Replica


class Lateness:
    """Predicts waits, and refuses requests that would come too late.

    Args:
        refuse_late: See `server.refuse_late`; inf predicts but refuses none, None does neither.
    """

    def __init__(self, refuse_late: float | None) -> None:
        self._share = refuse_late
        self._expected: dict[int, float] = {}

    def admits(self, machine: Replica, number: int, request: Request, now: float) -> bool:
        """Whether the replica takes a request that arrives now.

        Args:
            machine: The replica that it was routed to.
            number: Its number in the workload.
            request: The request.
            now: Seconds.
        """
        if self._share is None:
            return True
        backlog = Backlog.from_scheduler(machine.scheduler, now, machine.device_free)
        cached = machine.scheduler.cached(request)
        wait = TtftEstimator(backlog).wait(request, now, cached)
        self._expected[number] = wait.seconds
        return not is_late(wait, request, self._share)

    def expected(self, numbers: np.ndarray) -> np.ndarray | None:
        """Predicted seconds to the first token of these requests, float64 [n]; None without
        predictions."""
        if self._share is None:
            return None
        return np.array([self._expected.get(number, math.nan) for number in numbers.tolist()])


class BoundedQueue:
    """Counts the requests that are queued or running at each replica.

    Args:
        capacity: Most requests of a replica, inf for no limit.
        replicas: Number of replicas.
        outputs: Outputs of all requests known so far.
    """

    def __init__(self, capacity: float, replicas: int, outputs: Outputs) -> None:
        self._capacity, self._outputs = capacity, outputs
        self._unfinished: list[list[int]] = [[] for _ in range(replicas)]

    def admits(self, replica: int, number: int, now: float, *, always: bool = False) -> bool:
        """Whether a request is admitted. If so, it is counted.

        Args:
            replica: Where it arrives.
            number: Its number.
            now: Seconds.
            always: Whether it needs no room.
        """
        if self._capacity == math.inf:
            return True
        mine = np.array(self._unfinished[replica], np.int64)
        over = self._outputs.last_times(mine) <= now
        self._unfinished[replica] = mine[~over].tolist()
        if not always and len(self._unfinished[replica]) >= self._capacity:
            return False
        self._unfinished[replica].append(number)
        return True

    def leave(self, replica: int, number: int) -> None:
        """The request has gone on elsewhere."""
        if number in self._unfinished[replica]:
            self._unfinished[replica].remove(number)
