"""Who has missed a target for good, as far as the table tells."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.sched.policy import View
from jaxserve.sched.row_columns import grow_columns


class Missed:
    """By row: whose it was (order of arrival) when a target was missed."""

    def __init__(self) -> None:
        self._seq = np.zeros(0, np.int64)

    def read(self, view: View, rows: np.ndarray, clock: float) -> np.ndarray:
        """Who has missed one, bool [n]: whose first token, or all of it, comes too late, and who
        lost its cache between two tokens that have a target. Asked in every plan, as the table
        forgets when first tokens came. clock: when the next token comes at the earliest."""
        table = view.table
        grow_columns(self, table.capacity, _seq=NOBODY)
        age = clock - table.arrival[rows]
        missed = (table.received[rows] == 0) & (age > table.ttft[rows])
        missed |= age > table.jct[rows]
        between = (table.preemptions[rows] > 0) & (table.generated[rows] > 0)
        missed |= between & (table.tbt[rows] < np.inf)
        gone = rows[missed]
        self._seq[gone] = table.seq[gone]
        return np.asarray(self._seq[rows] == table.seq[rows])
