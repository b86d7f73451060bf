"""Which jobs are done so that as many as possible are in time."""

from __future__ import annotations

import heapq

import numpy as np


def in_time(due: np.ndarray, cost: np.ndarray, worth: np.ndarray, begin: float = 0.0) -> np.ndarray:
    """Chooses jobs for one machine so that as many as possible end when they are due.

    They are gone through in order of their due times. Whenever one would be late, the dearest so
    far is left out: the one with the most seconds for its worth. With equal worth nothing can be
    better (Moore, "An n job, one machine sequencing algorithm for minimizing the number of late
    jobs", 1968).

    Args:
        due: float64 [n], seconds.
        cost: float64 [n], seconds that each takes.
        worth: float64 [n]; jobs of none are left out.
        begin: When the machine is free, seconds.

    Returns:
        Indices of the chosen, in order of their due times, int64 [k].
    """
    order = np.argsort(due, kind="stable")
    order = order[worth[order] > 0]
    seconds = cost.tolist()
    dearest: list[tuple[float, int]] = []
    end, out = begin, set()
    for i, when, rank in zip(
        order.tolist(), due[order].tolist(), (-cost[order] / worth[order]).tolist(), strict=True
    ):
        end += seconds[i]
        heapq.heappush(dearest, (rank, i))
        while end > when and dearest:
            _, gone = heapq.heappop(dearest)
            out.add(gone)
            end -= seconds[gone]
    return np.array([i for i in order.tolist() if i not in out], np.int64)
