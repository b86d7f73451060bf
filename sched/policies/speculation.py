"""The variant `+spec`: any policy, with drafted tokens after its decodes."""

from __future__ import annotations

import copy

from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import register_variant


@register_variant(
    "spec",
    summary="speculative decoding: drafts tokens where the step-time model says that it pays",
    source="prompt lookup: Saxena 2023; who drafts: AdaServe, SLOs-Serve (after)",
)
def speculating(policy: Policy) -> Policy:
    """The policy; the scheduler adds drafts to its decodes (`sched/speculation/choice.py`)."""
    changed = copy.copy(policy)
    object.__setattr__(changed, "speculates", True)  # some policies are frozen
    return changed
