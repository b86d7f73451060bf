"""Which jobs are done so that as many as possible are in time."""

from __future__ import annotations

import heapq

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix


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
    ends = begin + np.cumsum(cost[order])
    first = prefix(ends <= due[order])  # that would be late
    if first == len(order):
        return order
    jobs, whens, seconds = order.tolist(), due.tolist(), cost.tolist()
    ranks = np.divide(-cost, worth, out=np.zeros(len(cost)), where=worth > 0).tolist()
    dearest = [(ranks[i], i) for i in jobs[:first]]
    heapq.heapify(dearest)
    end, chosen = float(ends[first - 1]) if first else begin, np.ones(len(cost), bool)
    for i in jobs[first:]:
        end += seconds[i]
        heapq.heappush(dearest, (ranks[i], i))
        while end > whens[i] and dearest:
            _, gone = heapq.heappop(dearest)
            chosen[gone] = False
            end -= seconds[gone]
    return order[chosen[order]]
