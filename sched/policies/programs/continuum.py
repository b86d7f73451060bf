"""Continuum: caches stay while a tool runs, for a time to live, and programs keep their order.

Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache
Time-to-Live" (arXiv 2511.02230). The order is theirs: preempted calls first, then those whose cache
was kept until they came, then the others, each by the start of their programs. The caches are kept
by the retention `ttl` of the prefix cache (`sched/cache/ttl.py`), without which only the order is
left. Batches are Sarathi's; the paper's are those of vLLM, which are chunked, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.policies.sarathi import DECODE_FIRST
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.unified.policy_spec import CompiledSpec
from jaxserve.sched.unified.ranking import Ranking, rank
from jaxserve.sched.unified.unified_policy import Group, UnifiedPolicy


@register(
    "continuum",
    summary="program_fcfs, but calls whose cache was kept come first; needs retention ttl",
    source="Continuum",
    for_programs=True,
)
@dataclass(frozen=True)
class Continuum(UnifiedPolicy):
    """Chunked prefill in mixed batches, decodes first. For servers with `cache.prefix_caching` and
    `cache.retention=ttl`."""

    groups: tuple[Group, ...] = field(default=DECODE_FIRST)
    mixed_batches: bool = True
    chunked: bool = True
    keeps_programs = True

    def ranking(self, view: View, now: float) -> Ranking:
        """Preempted calls, then kept ones, then the others, by the start of their programs. Among
        running calls, and so for victims, by the start alone."""
        start = rank(view, lambda rows: view.table.program_start[rows], self.requeue)
        waiting = start.waiting
        later = 1 - (view.table.preemptions[waiting] > 0)
        later = later * (2 - view.pool.finds_kept(waiting))
        return Ranking(view.table, waiting[np.argsort(later, kind="stable")], start.running)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """By the start of its program: which caches are kept is not known beforehand."""
        return requests.program_start

    def compiled_spec(self) -> CompiledSpec | None:
        """Not compiled: a preempted call goes before all others that wait."""
        return None
