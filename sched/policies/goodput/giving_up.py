"""Which requests will certainly miss their targets, so that their clients are told, and predicted
waits and routers know. No plan depends on it."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.policies.goodput.batch import GoodputWork
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import MISSED, RELEGATED, WAITING


def late_starts(view: View, waiting: np.ndarray, clock: float) -> np.ndarray:
    """Which of these waiting rows are too late for their first token, and not given up yet, int64
    [n]. clock: when the batch begins, seconds."""
    table = view.table
    new = waiting[(table.generated[waiting] == 0) & (table.outlook[waiting] < RELEGATED)]
    late = clock > table.arrival[new] + np.minimum(table.ttft[new], table.jct[new])
    return np.asarray(new[late])


def given_up(
    view: View, waiting: np.ndarray, work: GoodputWork, batch: np.ndarray, clock: float
) -> tuple[np.ndarray, np.ndarray]:
    """The requests that are newly given up.

    Args:
        view: What the policy sees.
        waiting: Rows that hold no cache, including those that the plan has not considered.
        work: All requests that it has considered.
        batch: Rows in the batch.
        clock: When the batch begins, seconds.

    Returns:
        Rows that have missed their targets, int64 [n]; and those among them that wait for what is
        left, int64 [m].
    """
    table, late = view.table, late_starts(view, waiting, clock)
    others = work.rows[work.missed & (work.paused | ~work.starts)]
    others = others[table.outlook[others] < RELEGATED]
    if not (len(late) or len(others)):
        return late, others
    # A first token in flight may still be in time: its arrival is predicted.
    coming = (table.generated[others] > 0) & (table.received[others] == 0)
    lost = np.concatenate([late, others[table.has_targets(others) & ~coming]])
    planned = np.zeros(table.capacity, bool)
    planned[batch] = True
    waits = (table.state[lost] == WAITING) & ~planned[lost]
    known = table.outlook[lost]
    return lost[~waits & (known < MISSED)], lost[waits & (known < RELEGATED)]
