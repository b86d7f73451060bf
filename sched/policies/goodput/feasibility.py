"""Chooses jobs so that as many as possible are in time."""

from __future__ import annotations

import heapq

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix


def in_time(due: np.ndarray, cost: np.ndarray, worth: np.ndarray, begin: float = 0.0) -> np.ndarray:
    """Chooses jobs for one machine so that as many as possible end when they are due.

    Goes through the jobs in order of due times. Whenever one would be late, the most expensive so
    far is left out: the one with the most seconds for its worth. With equal worth this is optimal
    (Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs",
    1968).

    Args:
        due: float64 [n], seconds.
        cost: float64 [n], seconds that each takes.
        worth: float64 [n]; jobs without worth are left out.
        begin: When the machine is free, seconds.

    Returns:
        Indices of the chosen, in order of their due times, int64 [k].
    """
    order = np.argsort(due, kind="stable")
    order = order[worth[order] > 0]
    ends = begin + np.cumsum(cost[order])
    first = prefix(ends <= due[order])  # index of the first late one
    if first == len(order):
        return order
    # The heap has places in this ranking: numbers compare faster than pairs of rank and index.
    dear = np.argsort(
        np.divide(-cost, worth, out=np.zeros(len(cost)), where=worth > 0), kind="stable"
    )
    place = np.empty(len(dear), np.int64)
    place[dear] = np.arange(len(dear))
    dearest, late = place[order[:first]].tolist(), order[first:]
    heapq.heapify(dearest)
    seconds = cost[dear].tolist()  # by place
    end = float(ends[first - 1]) if first else begin
    gone = []
    for when, one in zip(due[late].tolist(), place[late].tolist(), strict=True):
        end += seconds[one]
        heapq.heappush(dearest, one)
        while end > when and dearest:
            gone.append(heapq.heappop(dearest))
            end -= seconds[gone[-1]]
    chosen = np.ones(len(cost), bool)
    chosen[dear[np.array(gone, np.int64)]] = False
    return order[chosen[order]]
