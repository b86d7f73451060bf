"""The order in which a policy of the unified scheduler considers requests, and preempts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.table import RUNNING, WAITING


@dataclass(frozen=True)
class Ranking:
    """All requests in the policy's order. waiting, running: rows, most urgent first. place: int64
    by row, smaller is more urgent."""

    waiting: np.ndarray
    running: np.ndarray
    place: np.ndarray


def rank(
    view: View,
    keys: Callable[[np.ndarray], np.ndarray] | None = None,
    requeue: bool = False,
) -> Ranking:
    """The requests in order of their keys, then of arrival; see `UnifiedPolicy`. keys: rows to
    numbers [n]."""
    table = view.table
    waiting, running = table.in_state(WAITING), table.in_state(RUNNING)
    if keys is None and not requeue:
        return Ranking(waiting, running, table.seq)
    if requeue:
        again = np.flatnonzero(table.preempted_order[waiting])
        if len(again):
            latest_first = again[np.argsort(-table.preempted_order[waiting[again]])]
            waiting = np.concatenate([waiting[latest_first], np.delete(waiting, again)])
        running = running[np.lexsort((table.last_batch_order[running], table.arrival[running]))]
    rows = np.concatenate([running, waiting])
    order = np.arange(len(rows))
    if keys is not None:
        if not requeue:
            order = np.argsort(table.seq[rows], kind="stable")
        order = order[np.argsort(keys(rows)[order], kind="stable")]
    ranked = rows[order]
    place = np.empty(table.capacity, np.int64)
    place[ranked] = np.arange(len(ranked))
    runs = order < len(running)
    return Ranking(ranked[~runs], ranked[runs], place)
