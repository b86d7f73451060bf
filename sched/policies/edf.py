"""Earliest deadline first on Sarathi's batches: the baseline that a policy for service-level
objectives has to beat.

The deadline of a request's token j (from 0) is arrival + TTFT + j TBT. It orders the decodes, then
the prefills and those that wait together, and the latest deadline is preempted.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.unified import Group, Phase, UnifiedPolicy


@register(
    "edf",
    summary="sarathi by earliest deadline, arrival + TTFT + j TBT; preempts the latest deadline",
    source="earliest deadline first on InferMax 3.1",
)
def edf() -> UnifiedPolicy:
    """Decodes by deadline, then prefills and the waiting by deadline; only decodes preempt."""
    groups = (Group(Phase.DECODE, preempts=True), Group(Phase.PREFILL | Phase.WAITING))
    return UnifiedPolicy(groups, mixed_batches=True, chunked=True, key=_deadline)


def _deadline(view: View, rows: np.ndarray, now: float) -> tuple[np.ndarray]:
    """When the next token is due, float64 [n]; infinite for a request without targets.

    Without a TTFT, the tokens after the first are due one TBT after the one before. A JCT bounds
    them all.
    """
    table = view.table
    arrival, ttft, tbt = table.arrival[rows], table.ttft[rows], table.tbt[rows]
    later = table.generated[rows] > 0
    steps = np.where(later, tbt, 0.0) * np.maximum(table.generated[rows], 1)
    due = np.where(later & np.isinf(ttft), table.last_token[rows] + tbt, arrival + ttft + steps)
    return (np.minimum(due, arrival + table.jct[rows]),)
