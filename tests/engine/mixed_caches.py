"""Policies for tests: their requests hold caches of both kinds, and go from one to the other.

A request starts hidden or KV by turns, the other way round after each preemption, but as what it
finds; every other hidden one becomes KV in place once it has cached enough.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxserve.sched import registry
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.plan import BatchPlan, ProjectToKV
from jaxserve.sched.policies.sarathi import DECODE_FIRST
from jaxserve.sched.policies.vllm import PREFILL_FIRST
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.state.request_table import RUNNING
from jaxserve.sched.unified.batch_budget import Candidates
from jaxserve.sched.unified.unified_policy import UnifiedPolicy

ENOUGH = 13  # tokens; the middle of a block in most tests

KV, HIDDEN = CacheKind.KV, CacheKind.HIDDEN


@dataclass
class Seen:
    """What happened: rows that were planned as hidden, those of them that started with what others
    had computed, projections, batches with both kinds."""

    hidden: int = 0
    found: int = 0
    projected: int = 0
    mixed: int = 0


@dataclass(frozen=True)
class MixedCaches(UnifiedPolicy):
    seen: Seen = dataclasses.field(default_factory=Seen)
    hybrid_cache: bool = True

    def candidates(self, view: View, rows: np.ndarray) -> Candidates:
        table = view.table
        waiting = table.state[rows] != RUNNING
        anew = waiting & (table.computed[rows] == 0)
        start = (table.seq[rows] + table.preemptions[rows]) % 2 * (table.adapter[rows] == 0)
        project_to_kv = (table.seq[rows] % 4 == 1) & (table.computed[rows] >= ENOUGH)
        project_to_kv &= ~waiting & ~view.pool.sharing(rows)
        stay = np.where(project_to_kv, KV, view.pool.kind[rows])
        kinds = np.where(anew, start, stay).astype(np.int64)
        return dataclasses.replace(super().candidates(view, rows), kinds=kinds)

    def plan(self, view: View, now: float) -> BatchPlan:
        plan, table = super().plan(view, now), view.table
        runs = table.state[plan.rows] == RUNNING
        widens = runs & (plan.kinds == KV) & (view.pool.kind[plan.rows] == HIDDEN)
        hidden = plan.kinds == HIDDEN
        self.seen.hidden += int(hidden.sum())
        self.seen.found += int((hidden & ~runs & (table.computed[plan.rows] > 0)).sum())
        self.seen.projected += int(widens.sum())
        self.seen.mixed += int(hidden.any() and not hidden.all())
        to_kv = (ProjectToKV(plan.rows[widens]),) if widens.any() else ()
        return dataclasses.replace(plan, operations=plan.operations + to_kv)


def make(name: str) -> Policy:
    """`mixed_chunks`, `mixed_whole`, or what the registry makes of the name. They are not in the
    registry themselves: other tests go through all that is."""
    if name == "mixed_chunks":
        return MixedCaches(DECODE_FIRST, mixed_batches=True, chunked=True)
    if name == "mixed_whole":
        return MixedCaches(PREFILL_FIRST, mixed_batches=False, chunked=False, full_prefill=True)
    return registry.make_policy(name)
