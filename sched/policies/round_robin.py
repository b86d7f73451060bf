"""Iteration-level round robin between real-time and best-effort requests (BROS section 2.2).

Two queues, each first come, first served, take turns, one iteration each; the paper's baseline RR.
Within a turn batches, memory and preemption are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.vllm import PREFILL_FIRST
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.request import Tier
from jaxserve.sched.unified.batch_budget import Candidates
from jaxserve.sched.unified.unified_policy import Group, UnifiedPolicy

_FAR = 1 << 40  # requests: sorts behind all others


@dataclass
class _Turn:
    tier: Tier = Tier.REALTIME

    def pass_on(self) -> None:
        """Passes the turn to the other queue."""
        self.tier = Tier(1 - self.tier)


@register(
    "round_robin",
    summary="real-time and best-effort requests in turn, an iteration each, both as vllm",
    source="BROS 2.2",
)
@dataclass(frozen=True)
class RoundRobin(UnifiedPolicy):
    """Parameters as in `vllm`. A request that lacks memory takes it from the latest arrival of
    all."""

    groups: tuple[Group, ...] = field(default=PREFILL_FIRST)
    mixed_batches: bool = False
    chunked: bool = False
    full_prefill: bool = True
    _turn: _Turn = field(default_factory=_Turn, init=False, repr=False, compare=False)
    steady = False

    def plan(self, view: View, now: float) -> BatchPlan:
        """A batch of the queue whose turn it is, or of the other if that is empty."""
        for _ in Tier:
            plan = super().plan(view, now)
            self._turn.pass_on()
            if len(plan) or plan.operations:
                return plan
        return BatchPlan()

    def queue_priority(self, requests: Any, now: float) -> Any:
        """By arrival, and as if real-time requests, which get every second batch, met no others."""
        return requests.seq + (requests.tier == Tier.BEST_EFFORT) * _FAR

    def candidates(self, view: View, rows: np.ndarray) -> Candidates:
        """As in the unified scheduler, for the queue whose turn it is."""
        found = super().candidates(view, rows)
        return found[view.table.tier[found.rows] == self._turn.tier]
