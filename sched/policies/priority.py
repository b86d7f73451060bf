"""Static classes, as priority scheduling in vLLM and TensorRT-LLM: real-time before best-effort.

Within a class decodes go first, then prefills, then those that wait, each by arrival. A request
takes the memory and the slots it lacks from the lower class; decodes also from later ones of their
own class.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.table import State
from jaxserve.sched.unified import Group, Phase, UnifiedPolicy


@register(
    "priority",
    summary="static classes by tier, each as sarathi; takes memory from the lower class",
    source="vLLM and TensorRT-LLM priority scheduling",
)
def priority() -> UnifiedPolicy:
    """Chunked prefill in mixed batches, in one order by tier, phase and arrival."""
    groups = (Group(Phase.ANY, preempts=True),)
    return UnifiedPolicy(groups, mixed_batches=True, chunked=True, key=_tier_then_phase)


def _tier_then_phase(view: View, rows: np.ndarray, now: float) -> tuple[np.ndarray]:
    table = view.table
    waiting = table.state[rows] == State.WAITING
    phase = np.where(waiting, 2, np.where(table.decoding(rows), 0, 1))
    return (table.tier[rows] * 3 + phase,)
