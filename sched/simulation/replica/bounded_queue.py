"""The bounded queue before each replica, as the server's: who finds it full is refused."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.simulation.replica.outputs import Outputs


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
