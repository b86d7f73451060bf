"""Earliest deadline first on Sarathi's batches: the baseline that a policy for service-level
objectives has to beat.

The deadline of a request's token j (from 0) is arrival + TTFT + j TBT. It orders the decodes, then
the prefills and those that wait together, and the latest deadline is preempted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.keys import where
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


def _deadline(r: Any) -> Any:
    """When the next token is due, seconds; infinite for a request without targets.

    Without a TTFT, the tokens after the first are due one TBT after the one before. A JCT bounds
    them all.
    """
    later = r.generated > 0
    steps = where(later, r.tbt, 0.0) * np.maximum(r.generated, 1)
    due = where(later & np.isinf(r.ttft), r.last_token + r.tbt, r.arrival + r.ttft + steps)
    return np.minimum(due, r.arrival + r.jct)
