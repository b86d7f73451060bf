"""The time until the deadline of each real-time request's next token (BROS section 4.2).

A token of the step on the device counts as returned when that step ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policy import View


@dataclass(frozen=True)
class Queue:
    """rows [n], most urgent first; residual: float64 [n], seconds to each row's deadline."""

    rows: np.ndarray
    residual: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def sorted(self) -> Queue:
        """Sorted by residual. A queue in order of arrival is already, unless targets differ."""
        if not np.count_nonzero(self.residual[1:] < self.residual[:-1]):
            return self
        order = np.argsort(self.residual, kind="stable")
        return Queue(self.rows[order], self.residual[order])


@dataclass(frozen=True)
class Targets:
    """Default targets, in seconds, of requests without their own. ttft: to the first token. tbt:
    between two tokens."""

    ttft: float
    tbt: float

    def residual(self, view: View, rows: np.ndarray, clock: float) -> np.ndarray:
        """Seconds that each request has left at `clock`, when the next step may begin, float64 [n];
        negative if it is late."""
        table = view.table
        received = table.received[rows]
        ttft, tbt = table.ttft[rows], table.tbt[rows]
        ttft[np.isinf(ttft)] = self.ttft
        tbt[np.isinf(tbt)] = self.tbt
        left = table.last_token[rows] + np.where(received == 0, ttft, tbt) - clock
        return np.where(table.generated[rows] > received, tbt, left)

    def poll(self, view: View, waiting: np.ndarray, pending: np.ndarray, clock: float) -> Queue:
        """Merges both queues. Waiting requests are in order and pending ones get sorted; then both
        queues take turns to give their most urgent request (section 4.2, "Request pulling
        optimization").

        Args:
            view: What the policy sees.
            waiting: Rows in order of arrival.
            pending: Rows in order of arrival.
            clock: When the next step may begin, seconds.
        """
        first = Queue(waiting, self.residual(view, waiting, clock)).sorted()
        second = Queue(pending, self.residual(view, pending, clock)).sorted()
        if not len(first) or not len(second):
            return first if len(first) else second
        at = np.searchsorted(second.residual, first.residual) + np.arange(len(first))
        total = len(first) + len(second)
        theirs = np.ones(total, bool)
        theirs[at] = False
        rows, residual = np.empty(total, np.int64), np.empty(total)
        rows[at], residual[at] = first.rows, first.residual
        rows[theirs], residual[theirs] = second.rows, second.residual
        return Queue(rows, residual)
