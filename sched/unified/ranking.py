"""The order in which a unified policy considers requests, and preempts them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING, WAITING, RequestTable


class Ranking:
    """All requests in the policy's order: running ones first, then waiting ones.

    Args:
        table: The requests.
        waiting: Rows, most urgent first.
        running: Rows, most urgent first.
    """

    def __init__(self, table: RequestTable, waiting: np.ndarray, running: np.ndarray) -> None:
        self._table, self._waiting, self.running = table, waiting, running

    @cached_property
    def waiting(self) -> np.ndarray:
        """Waiting rows, most urgent first."""
        return self._waiting

    @cached_property
    def order(self) -> np.ndarray:
        """All rows, most urgent first."""
        return np.concatenate([self.running, self.waiting])

    @cached_property
    def place(self) -> np.ndarray:
        """Place in the order, int64 by row; smaller is more urgent."""
        place = np.empty(self._table.capacity, np.int64)
        place[self.order] = np.arange(len(self.order))
        return place


class ByKey(Ranking):
    """Running and waiting requests in one order.

    Args:
        table: The requests.
        order: All rows, most urgent first.
        waits: bool, which of `order` are waiting.
    """

    def __init__(self, table: RequestTable, order: np.ndarray, waits: np.ndarray) -> None:
        super().__init__(table, order, order[~waits])
        self.order, self._waits = order, waits

    @cached_property
    def waiting(self) -> np.ndarray:
        """Waiting rows, most urgent first. Lazy: few policies ask, and there may be many."""
        return self.order[self._waits]


class ByArrival(Ranking):
    """Running and waiting requests in one order, that of arrival."""

    @cached_property
    def order(self) -> np.ndarray:
        """All rows, most urgent first."""
        rows = np.concatenate([self.running, self.waiting])
        return rows[np.argsort(self.place[rows], kind="stable")]

    @cached_property
    def place(self) -> np.ndarray:
        """Place in the order, int64 by row; smaller is more urgent."""
        return self._table.seq


def rank(
    view: View,
    keys: Callable[[np.ndarray], np.ndarray] | None = None,
    requeue: bool = False,
) -> Ranking:
    """Ranks the requests by their keys, then by arrival; see `UnifiedPolicy`. keys: from rows to
    numbers [n]."""
    table = view.table
    running = table.in_state(RUNNING)
    if requeue:
        waiting, arrival = table.requeued(), table.arrival[running]
        if np.count_nonzero(arrival[1:] <= arrival[:-1]):  # or it came to another replica first
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
    return ByKey(table, rows[order], order >= len(running))
