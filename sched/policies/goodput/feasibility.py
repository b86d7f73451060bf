"""Chooses jobs so that as many as possible are in time."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix

GAIN = 1.2
"""How many times as much has to be done a second for urgent jobs to be left out. Any from 1 to 1.5
gives the same within half a point."""


class InTime(NamedTuple):
    """The result of `in_time`.

    Attributes:
        jobs: Indices, in order of their due times, int64 [k].
        contested: How many of them, the first ones, are due before the last job that was late until
            others were left out.
    """

    jobs: np.ndarray
    contested: int


def in_time(due: np.ndarray, cost: np.ndarray, worth: np.ndarray, begin: float = 0.0) -> InTime:
    """Chooses jobs for one machine so that as many as possible end when they are due.

    Goes through the jobs in order of due times. Whenever one would be late, the most expensive so
        far is left out: the one with the most seconds for its worth. With equal worth this is
        optimal (Moore, "An n job, one machine sequencing algorithm for minimizing the number of
        late jobs", 1968).

    Args:
        due: float64 [n], seconds.
        cost: float64 [n], seconds that each takes.
        worth: float64 [n]; jobs without worth are left out.
        begin: When the machine is free, seconds.

    Returns:
        The chosen.
    """
    order = np.argsort(due, kind="stable")
    order = order[worth[order] > 0]
    ends = begin + np.cumsum(cost[order])
    first = prefix(ends <= due[order])  # index of the first late one
    if first == len(order):
        return InTime(order, 0)
    # The heap has places in this ranking: numbers compare faster than pairs of rank and index.
    dear = np.argsort(
        np.divide(-cost, worth, out=np.zeros(len(cost)), where=worth > 0), kind="stable"
    )
    place = np.empty(len(dear), np.int64)
    place[dear] = np.arange(len(dear))
    dearest, late = place[order[:first]].tolist(), order[first:]
    heapq.heapify(dearest)
    seconds = cost[dear].tolist()  # by place
    end, last = float(ends[first - 1]) if first else begin, begin  # due time of the last late one
    gone = []
    for when, one in zip(due[late].tolist(), place[late].tolist(), strict=True):
        end += seconds[one]
        heapq.heappush(dearest, one)
        while end > when and dearest:
            gone.append(heapq.heappop(dearest))
            end -= seconds[gone[-1]]
            last = when
    chosen = np.ones(len(cost), bool)
    chosen[dear[np.array(gone, np.int64)]] = False
    order = order[chosen[order]]
    return InTime(order, int(np.count_nonzero(due[order] <= last)))


def left_out(
    due: np.ndarray, ends: np.ndarray, worth: np.ndarray, begin: float, most: float
) -> int:
    """How many of the most urgent jobs are better left out of a step that ends before any of its
    jobs is late. If all are due soon, steps with the most urgent are short, and the fixed cost of
    each step leaves no time for the others.

    Args:
        due: float64 [n], seconds, in order.
        ends: float64 [n], time of a step with the first of them, with the first two, and so on.
        worth: float64 [n].
        begin: Time of the step without any.
        most: Longest allowed time of the step.

    Returns:
        The number, 0 unless the step without them does GAIN times as much per second.
    """
    saved = np.append(begin, ends[:-1]) - begin  # by leaving out those before it
    count = np.searchsorted(ends, np.minimum(due, most) + saved, side="right")
    total = np.append(0.0, worth.cumsum())
    done = np.where(count > np.arange(len(due)), total[count] - total[:-1], 0.0)
    rate = done / np.maximum(ends[np.maximum(count - 1, 0)] - saved, 1e-9)
    best = int(np.argmax(rate))
    return best if rate[best] > GAIN * rate[0] else 0
