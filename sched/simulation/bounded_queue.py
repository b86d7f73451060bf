"""The bounded queue before each replica, as the server's: who finds it full is refused."""

from __future__ import annotations

import math

import numpy as np


class BoundedQueue:
    """Counts the requests that are queued or running at each replica.

    capacity: how many one has at most, inf for any number. token_times: float64, when tokens reach
    the host, nan until that is known; last_token: int64 [n], where each one's last is in it.
    """

    def __init__(
        self, capacity: float, replicas: int, last_token: np.ndarray, token_times: np.ndarray
    ) -> None:
        self._capacity = capacity
        self._last_token, self._token_times = last_token, token_times
        self._unfinished: list[list[int]] = [[] for _ in range(replicas)]

    def admits(self, replica: int, number: int, now: float) -> bool:
        """Whether request `number`, which comes at `now`, finds room; then it counts."""
        if self._capacity == math.inf:
            return True
        mine = np.array(self._unfinished[replica], np.int64)
        over = self._token_times[self._last_token[mine]] <= now
        self._unfinished[replica] = mine[~over].tolist()
        if len(self._unfinished[replica]) >= self._capacity:
            return False
        self._unfinished[replica].append(number)
        return True
