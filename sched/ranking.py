"""The order in which a policy of the unified scheduler considers requests, and preempts them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.table import RUNNING, WAITING, RequestTable


class Ranking:
    """All requests in the policy's order. waiting, running: rows, most urgent first. order: all of
    them; if not given, those that run are before those that wait."""

    def __init__(
        self,
        table: RequestTable,
        waiting: np.ndarray,
        running: np.ndarray,
        order: np.ndarray | None = None,
    ) -> None:
        self.waiting, self.running = waiting, running
        self._table, self._order = table, order

    @cached_property
    def order(self) -> np.ndarray:
        """Rows of all of them."""
        if self._order is not None:
            return self._order
        return np.concatenate([self.running, self.waiting])

    @cached_property
    def place(self) -> np.ndarray:
        """int64 by row, smaller is more urgent."""
        place = np.empty(self._table.capacity, np.int64)
        place[self.order] = np.arange(len(self.order))
        return place


class ByArrival(Ranking):
    """All in order of arrival."""

    @cached_property
    def order(self) -> np.ndarray:
        """Rows of all of them."""
        rows = np.concatenate([self.running, self.waiting])
        return rows[np.argsort(self.place[rows], kind="stable")]

    @cached_property
    def place(self) -> np.ndarray:
        """int64 by row, smaller is more urgent."""
        return self._table.seq


def rank(
    view: View,
    keys: Callable[[np.ndarray], np.ndarray] | None = None,
    requeue: bool = False,
) -> Ranking:
    """The requests in order of their keys, then of arrival; see `UnifiedPolicy`. keys: rows to
    numbers [n]."""
    table = view.table
    running = table.in_state(RUNNING)
    if requeue:
        waiting, arrival = table.requeued(), table.arrival[running]
        if np.count_nonzero(arrival[1:] == arrival[:-1]):
            running = running[np.lexsort((table.last_batch_order[running], arrival))]
        if keys is None:
            return Ranking(table, waiting, running)
    else:
        waiting = table.in_state(WAITING)
        if keys is None:
            return ByArrival(table, waiting, running)
    rows = np.concatenate([running, waiting])
    if requeue:
        order = np.argsort(keys(rows), kind="stable")
    else:
        order = np.argsort(table.seq[rows], kind="stable")
        order = order[np.argsort(keys(rows)[order], kind="stable")]
    ranked, runs = rows[order], order < len(running)
    return Ranking(table, ranked[~runs], ranked[runs], ranked)
