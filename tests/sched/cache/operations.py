"""A scheduler that does what a test tells it, one step at a time."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.cache_kinds import CacheKind, Direction
from jaxserve.sched.plan import BatchPlan, Operation, Preempt, Restore
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.step import Step
from tests.cost_models import FLAT
from tests.sched.cache.invariants import check_host, check_pool

KV, HIDDEN = CacheKind.KV, CacheKind.HIDDEN
LEFT, RIGHT = Direction.LEFT, Direction.RIGHT
BLOCK = 4


class Scripted(Policy):
    """A policy that says what it is told to."""

    next = BatchPlan()
    moves_cache = True

    def plan(self, view: View, now: float) -> BatchPlan:
        return self.next


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scheduler(
    *,
    blocks: int = 16,
    host_slots: int = 64,
    rows: int = 3,
    prefix_caching: bool = False,
    rho: float | None = 0.0,
) -> Scheduler:
    """Four requests of ten tokens; blocks of four. With prefix caching all begin alike."""
    keys = (b"first", b"second") if prefix_caching else None
    made = Scheduler(
        Scripted(),
        Limits(64, 64, rows),
        num_blocks=blocks,
        block_size=BLOCK,
        max_model_len=32,
        capacity=4,
        cost_model=FLAT,
        host_slots=host_slots,
        prefix_caching=prefix_caching,
        rho=rho,
    )
    for i in range(4):
        made.add(Request(str(i), (1,) * 10, SamplingParams(max_tokens=9), block_keys=keys))
    return made


def run(
    made: Scheduler,
    tokens: dict[int, int] | None = None,
    *operations: Operation,
    kinds: dict[int, int] | None = None,
    directions: dict[int, int] | None = None,
) -> Step:
    """Books a step: row -> tokens. Kinds are those of the rows' caches, KV for those that start."""
    rows = array(*(tokens or {}))
    count = array(*(tokens or {}).values())
    computed = made.table.computed[rows].copy()
    for op in operations:  # what will be cached when the tokens are computed
        if isinstance(op, Preempt):
            for row, keep in zip(op.rows.tolist(), op.keep.tolist(), strict=True):
                computed[rows == row] = keep
        if isinstance(op, Restore):
            for row, first in zip(op.rows.tolist(), op.first.tolist(), strict=True):
                segment = made.host.find(row, first)
                end = 0 if segment is None else segment.end
                computed[rows == row] = np.maximum(computed[rows == row], end)
    kind = [(kinds or {}).get(row, int(made.pool.kind[row])) for row in rows.tolist()]
    sides = [(directions or {}).get(row, 0) for row in rows.tolist()]
    made.policy.next = BatchPlan(  # type: ignore[attr-defined]
        rows, count, computed + count, array(*kind), operations, array(*sides)
    )
    step = made.schedule(0.0)
    check_pool(made.pool)
    check_host(made.host)
    made.receive(step.emitting, 0.0)
    return step
