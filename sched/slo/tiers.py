"""The cost of best-effort requests for the real-time ones beside them: time and memory (BROS)."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.plan import Join
from jaxserve.sched.policy import View
from jaxserve.sched.request import Tier
from jaxserve.sched.step import ProjectSlots, Step

SHARED = "shared"
_NAMES = np.array([*(tier.name.lower() for tier in Tier), SHARED])


def lengthening(step: Step, view: View, took: float) -> float:
    """Seconds by which best-effort requests lengthen a step for the real-time ones in it: `took`,
    its predicted time, less the predicted time of the real-time ones alone. If best-effort caches
    are moved, all moves count as theirs. 0 if no best-effort request takes part. Called when the
    step is booked, while its rows still belong to its requests."""
    tier, moved = view.table.tier, [op for op in step.plan.operations if not isinstance(op, Join)]
    alone = tier[step.rows] == Tier.REALTIME
    theirs = [step.rows, *(op.rows for op in moved)]
    if not alone.any() or all((tier[rows] == Tier.REALTIME).all() for rows in theirs):
        return 0.0
    plan, emitting = step.plan, step.rows[alone & step.emits]
    batch = BatchFeatures.from_rows(
        plan.num_tokens[alone],
        step.start[alone],
        step.decodes[alone],
        padding=view.padding,
        hidden=None if step.hidden is None else step.hidden[alone],
        projected_tokens=_projected(step, step.rows[alone]),
        sampling=not view.table.greedy[emitting].all(),
    )
    return max(0.0, took - float(view.step_time(batch)))


def _projected(step: Step, rows: np.ndarray) -> int:
    """Cached tokens of these rows whose hidden vectors become K and V for the step."""
    moves = (move for move in step.moves if isinstance(move, ProjectSlots))
    return sum(int(move.cached[np.isin(move.rows, rows)].sum()) for move in moves)


def blocks_used(pool: BlockPool, tier: np.ndarray) -> dict[tuple[str, str], int]:
    """Used blocks by kind of cache, and by the holder's tier, or SHARED if a block is filled from
    both ends. Each counts once. tier: by row of the table."""
    ids, rows = pool.holders()
    whose = np.where(np.isin(ids, pool.both_ends()), len(Tier), tier[rows])
    kinds = pool.kind[rows]
    return {
        (kind.name.lower(), str(name)): int(np.count_nonzero((kinds == kind) & (whose == number)))
        for kind in CacheKind
        for number, name in enumerate(_NAMES)
    }
