"""Static classes as in vLLM and TensorRT-LLM: real-time before best-effort.

Within a class decodes go first, then prefills, then waiting requests, each by arrival. A request
takes the memory and the slots it lacks from the lower class; decodes also from later ones of their
own class.
"""

from __future__ import annotations

from typing import Any

from jaxserve.sched.registry import register
from jaxserve.sched.unified.policy_spec import where
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy


@register(
    "priority",
    summary="static classes by tier, each as sarathi; takes memory from the lower class",
    source="vLLM and TensorRT-LLM priority scheduling",
)
def priority() -> UnifiedPolicy:
    """Chunked prefill in mixed batches, in one order by tier, phase and arrival."""
    groups = (Group(Phase.ANY, preempts=True),)
    return UnifiedPolicy(groups, mixed_batches=True, chunked=True, key=_tier_then_phase)


def _tier_then_phase(r: Any) -> Any:
    return r.tier * 3 + where(r.waiting, 2, where(r.decoding, 0, 1))
