"""Targets for whole jobs, as the time that each iteration may wait (AccelGen section 4.3).

A job of N iterations that take T_e in total may wait for (JCT - T_e) / N before each. An iteration
passes unused time on to the next, and exceeded time is missing there. So it suffices to know when
the next iteration must begin at the latest: the latest begin of this one, plus its time, plus the
share.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.sched.policy import View
from jaxserve.sched.row_columns import grow_columns


def laxity(
    view: View, rows: np.ndarray, chunks: np.ndarray, clock: float, longest: float, loss: float
) -> np.ndarray:
    """Seconds that each job may wait over all its iterations, JCT - T_w - T_e.

    Args:
        view: What the policy sees.
        rows: int64 [n].
        chunks: N_ck, iterations until each row's next token.
        clock: Seconds, when the step starts.
        longest: T_max, seconds.
        loss: P_max P, seconds a token.

    Returns:
        float64 [n]; inf without a JCT target.
    """
    table = view.table
    found = np.full(len(rows), np.inf)
    some = np.flatnonzero(table.jct[rows] < np.inf)
    if len(some):
        jobs = rows[some]
        takes = _takes(view, jobs, chunks[some], longest, loss)
        found[some] = table.arrival[jobs] + table.jct[jobs] - clock - takes
    return found


def _takes(
    view: View, rows: np.ndarray, chunks: np.ndarray, longest: float, loss: float
) -> np.ndarray:
    """T_e of each row, float64 [n], seconds."""
    return chunks * longest + np.maximum(view.table.tokens_ahead(rows), 1.0) * (longest + loss)


class Allowances:
    """By row: the request (its order of arrival), when its next iteration must begin, the seconds
    that each iteration may wait, and the number of iterations still expected."""

    def __init__(self) -> None:
        self._seq = np.zeros(0, np.int64)
        self._due, self._share, self._left = np.zeros(0), np.zeros(0), np.zeros(0)

    def due(
        self,
        view: View,
        rows: np.ndarray,
        chunks: np.ndarray,
        clock: float,
        longest: float,
        loss: float,
    ) -> np.ndarray:
        """When each request's next iteration must begin at the latest. A request that is new, was
        preempted, or takes more iterations than expected gets a new share of the time left.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            chunks: N_ck, iterations until each row's next token.
            clock: Seconds, when the step starts.
            longest: T_max, seconds.
            loss: P_max P, seconds a token.

        Returns:
            float64 [n]; inf without a JCT target.
        """
        table = view.table
        due = np.full(len(rows), np.inf)
        some = np.flatnonzero(table.jct[rows] < np.inf)
        if not len(some):
            return due
        grow_columns(self, table.capacity, _seq=NOBODY, _due=0.0, _share=0.0, _left=0.0)
        jobs = rows[some]
        anew = (self._seq[jobs] != table.seq[jobs]) | (self._left[jobs] <= 0)
        if anew.any():
            self._spread(view, jobs[anew], chunks[some][anew], clock, longest, loss)
        due[some] = self._due[jobs]
        return due

    def _spread(
        self,
        view: View,
        rows: np.ndarray,
        chunks: np.ndarray,
        clock: float,
        longest: float,
        loss: float,
    ) -> None:
        table = view.table
        ahead = np.maximum(view.table.tokens_ahead(rows), 1.0)
        new = (table.computed[rows] == 0) & (table.preemptions[rows] == 0)
        begin = np.where(new, table.arrival[rows], clock)
        left, takes = chunks + ahead, _takes(view, rows, chunks, longest, loss)
        share = (table.arrival[rows] + table.jct[rows] - begin - takes) / left
        self._seq[rows], self._left[rows] = table.seq[rows], left
        self._share[rows], self._due[rows] = share, begin + share

    def ran(self, rows: np.ndarray, seconds: float) -> None:
        """Notes a batch of these rows that takes `seconds`."""
        rows = rows[rows < len(self._seq)]
        self._due[rows] += seconds + self._share[rows]
        self._left[rows] -= 1

    def forget(self, rows: list[int]) -> None:
        """Notes that these rows lose their caches and are queued again."""
        self._seq[[row for row in rows if row < len(self._seq)]] = NOBODY
