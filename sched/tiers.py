"""What real-time and best-effort requests that are served together have of each other (BROS)."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.cost_model import BatchFeatures
from jaxserve.sched.kinds import CacheKind
from jaxserve.sched.policy import View
from jaxserve.sched.request import Tier
from jaxserve.sched.step import Step, Widen

SHARED = "shared"
_NAMES = np.array([*(tier.name.lower() for tier in Tier), SHARED])


def lengthening(step: Step, view: View, took: float) -> float:
    """Seconds that its best-effort rows make a step longer for the real-time ones in it: `took`,
    which it is predicted to take, less what `View.step_time` says of those alone. What is moved for
    the step counts as the best-effort rows' doing. 0 where all rows are of one tier. Asked when the
    step is booked, while its rows are still its requests'."""
    alone = view.table.tier[step.rows] == Tier.REALTIME
    if np.count_nonzero(alone) in (0, len(step)):
        return 0.0
    plan, emitting = step.plan, step.rows[alone & step.emits]
    batch = BatchFeatures.of(
        plan.num_tokens[alone],
        step.start[alone],
        step.decodes[alone],
        padding=view.padding,
        hidden=None if step.hidden is None else step.hidden[alone],
        projected_tokens=_widened(step, step.rows[alone]),
        sampling=not view.table.greedy[emitting].all(),
    )
    return max(0.0, took - float(view.step_time(batch)))


def _widened(step: Step, rows: np.ndarray) -> int:
    """Cached tokens of these rows whose hidden vectors become K and V for the step."""
    moves = (move for move in step.moves if isinstance(move, Widen))
    return sum(int(move.cached[np.isin(move.rows, rows)].sum()) for move in moves)


def blocks_used(pool: BlockPool, tier: np.ndarray) -> dict[tuple[str, str], int]:
    """How many used blocks hold what for whom: by kind of cache, and by tier of the one holder, or
    SHARED where a block is filled from both ends. Each counts once. tier: by row of the table."""
    ids, rows = pool.holders()
    whose = np.where(np.isin(ids, pool.both_ends()), len(Tier), tier[rows])
    kinds = pool.kind[rows]
    return {
        (kind.name.lower(), str(name)): int(np.count_nonzero((kinds == kind) & (whose == number)))
        for kind in CacheKind
        for number, name in enumerate(_NAMES)
    }
