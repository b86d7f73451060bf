"""Whether a plan can be booked: checked before anything is, so that a refused plan changes nothing.

Operations are gone through in order over a copy of the columns that they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.sched.blocks import blocks_a_plane, slots_for
from jaxserve.sched.kinds import HIDDEN, KV, CacheKind, Direction
from jaxserve.sched.plan import (
    BatchPlan,
    Checkpoint,
    Copy,
    InvalidPlan,
    Join,
    Preempt,
    Restore,
    ToKV,
)
from jaxserve.sched.policy import View
from jaxserve.sched.table import RUNNING, WAITING


def check_plan(plan: BatchPlan, view: View) -> None:
    """InvalidPlan says what the pool, the host memory or the limits do not allow."""
    after = _After(plan, view)
    for operation in plan.operations:
        _CHECKS[type(operation)](after, operation)
    table, limits, rows, tokens = view.table, view.limits, plan.rows, plan.num_tokens
    _demand(_different(rows, table.capacity), "a row is planned twice")
    _demand(not after.lost[rows].any(), "a row is planned and preempted")
    state = after.state[rows]
    waiting, running = state == WAITING, state == RUNNING
    _demand((waiting | running).all(), "a row that has nothing to compute is planned")
    computed = after.computed[rows]
    pending = table.prompt_len[rows] + table.generated[rows] - computed
    _demand(((tokens > 0) & (tokens <= pending)).all(), "more tokens than are pending")
    _demand((plan.reserve >= computed + tokens).all(), "less room than tokens")
    _demand(plan.total_tokens <= limits.max_batch_tokens, "more tokens than max_batch_tokens")
    holders = after.holders + int(np.count_nonzero(waiting))
    _demand(holders <= limits.max_rows, "more requests than max_rows hold cache")
    needed = view.pool.needed(rows, plan.reserve, plan.kinds, after.held, after.kind)
    _demand(needed.sum() <= after.free, "more blocks than are free")
    hidden = plan.kinds == HIDDEN
    offered = view.rho is not None or not hidden.any()
    _demand(offered, "hidden caches are planned where there are none")
    kind = after.kind[rows]
    stays_hidden = running & ~hidden & (kind == HIDDEN)
    _demand(not stays_hidden.any(), "a hidden cache is planned as KV without ToKV")
    _demand(((kind == plan.kinds) | waiting).all(), "a KV cache becomes hidden without preemption")
    _demand(after.owned(rows, computed), "a row would write into blocks that it shares; copy them")


class _After:
    """What the operations so far have made of the columns. lost: rows that have lost all of their
    cache; changed: those that any operation has touched; given: blocks that somebody gave back."""

    def __init__(self, plan: BatchPlan, view: View) -> None:
        self.plan, self.view = plan, view
        self.table, self.pool, self.host = view.table, view.pool, view.host
        own: Callable[[np.ndarray], np.ndarray] = np.copy if plan.operations else np.asarray
        self.state, self.computed = own(self.table.state), own(self.table.computed)
        self.held, self.kind = own(self.pool.held), own(self.pool.kind)
        self.lost = np.zeros(self.table.capacity, bool)
        self.changed = np.zeros(self.table.capacity, bool)
        self.copied: set[tuple[int, int]] = set()
        self.joined: set[int] = set()
        self.given: list[np.ndarray] = []
        self.free = self.pool.num_free
        self.host_free = self.host.num_free
        self.holders = len(self.table.in_state(RUNNING))
        self._taken: set[tuple[int, int]] = set()  # (row, first) of restored segments
        self._saved: list[tuple[int, int, int]] = []
        self._returned = _returned(plan, view)

    def preempt(self, op: Preempt) -> None:
        rows, keep = op.rows, op.keep
        _demand(_different(rows, self.table.capacity), "a row is preempted twice")
        cached = self.state[rows] == RUNNING
        _demand(cached.all(), "a row without cache is preempted")
        _demand(not self.changed[rows].any(), "a row is preempted after another operation on it")
        _demand(
            ((keep >= 0) & (keep < np.maximum(self.computed[rows], 1))).all(),
            "a preempted row is to keep no fewer tokens than it has, or fewer than none",
        )
        whole = keep == 0
        self.free += sum(self._returned[row] for row in rows.tolist())
        stay = blocks_a_plane(keep, self.pool.block_size)
        for row, blocks in zip(rows.tolist(), stay.tolist(), strict=True):
            self.given.append(self.pool.blocks_of(row)[:, blocks:].ravel())
        self.holders -= int(np.count_nonzero(whole))
        self.lost[rows[whole]] = self.changed[rows] = True
        self.state[rows[whole]] = WAITING
        self.computed[rows], self.held[rows] = keep, np.minimum(stay, self.held[rows])
        self.kind[rows[whole]] = CacheKind.KV

    def to_kv(self, op: ToKV) -> None:
        rows = op.rows
        _demand(_different(rows, self.table.capacity), "a row becomes KV twice")
        planned = np.isin(rows, self.plan.rows[self.plan.kinds == KV])
        _demand(planned.all(), "a row that is not planned as KV becomes KV")
        _demand(not self.changed[rows].any(), "a row becomes KV after another operation on it")
        for row in rows.tolist():
            _attempt(self.pool.check_widens, row)
        kinds = np.full(len(rows), KV)
        need = self.pool.needed(rows, self.computed[rows], kinds, self.held, self.kind)
        self._take(int(need.sum()))
        self.kind[rows], self.changed[rows] = CacheKind.KV, True

    def copy(self, op: Copy) -> None:
        returned = 0
        for row, index in zip(op.rows.tolist(), op.index.tolist(), strict=True):
            _demand(self.state[row] == RUNNING, "a block of a row without cache is copied")
            inside = 0 <= index < min(int(self.held[row]), int(self.pool.held[row]))
            _demand(inside and (row, index) not in self.copied, "a block is not there to be copied")
            old = self.pool.blocks_of(row)[:, index]
            self._take(len(old))
            returned += int(np.count_nonzero(self.pool.refs[old] == 1))
            self.given.append(old)
            self.copied.add((row, index))
            self.changed[row] = True
        self.free += returned

    def checkpoint(self, op: Checkpoint) -> None:
        for row, first, end in _triples(op.rows, op.first, op.end):
            _demand(self.state[row] == RUNNING, "a row without cache is checkpointed")
            inside = 0 <= first < end <= self.computed[row]
            _demand(inside, "tokens are checkpointed that are not cached")
            before = any(r == row and a < end and first < b for r, a, b in self._saved)
            _demand(
                not (before or self.host.overlaps(row, first, end)),
                "tokens are checkpointed that are on the host already",
            )
            self.host_free -= int(slots_for(end - first, self.kind[row]))
            _demand(self.host_free >= 0, "more is checkpointed than host memory holds")
            self._saved.append((row, first, end))

    def restore(self, op: Restore) -> None:
        for row, first in zip(op.rows.tolist(), op.first.tolist(), strict=True):
            segment = self.host.find(row, first)
            taken = (row, first) in self._taken
            _demand(segment is not None and not taken, "nothing is on the host to be restored")
            assert segment is not None
            reach = first <= self.computed[row] < segment.end
            _demand(reach, "a checkpoint is restored that does not go on where the cache ends")
            alive = self.state[row] in (WAITING, RUNNING) and not self.lost[row]
            _demand(alive, "a row is restored that is over or has just been preempted")
            if self.state[row] == WAITING:
                self.state[row], self.kind[row] = RUNNING, segment.kind
                self.holders += 1
            _demand(self.kind[row] == segment.kind, "a checkpoint of the other kind is restored")
            one = np.array([row])
            tokens, kinds = np.array([segment.end]), self.kind[one]
            need = self.pool.needed(one, tokens, kinds, self.held, self.kind)
            self._take(int(need[0]))
            blocks = blocks_a_plane(segment.end, self.pool.block_size)
            self.held[row] = max(self.held[row], blocks)
            self.computed[row], self.changed[row] = segment.end, True
            self._taken.add((row, first))

    def join(self, op: Join) -> None:
        at = np.flatnonzero(self.plan.rows == op.row)
        starts = self.state[op.row] == WAITING and len(at) == 1 and not self.lost[op.row]
        _demand(starts or self.state[op.row] == RUNNING, "a row that neither runs nor starts joins")
        if starts:
            kind, side = _start_of(self.plan, int(at[0]))
            held = 0
            self.kind[op.row] = kind
        else:
            kind = CacheKind(self.kind[op.row])
            side, held = Direction(self.pool.direction[op.row]), int(self.held[op.row])
        blocks = _attempt(self.pool.check_join, op.row, op.blocks, kind, side, held)
        ids = set(blocks.ravel().tolist())
        gone = any(np.isin(ids_given, list(ids)).any() for ids_given in self.given)
        _demand(not gone and not ids & self.joined, "a block is joined that has just changed hands")
        self.joined |= ids
        self.held[op.row] = held + len(blocks)
        self.changed[op.row] = True

    def owned(self, rows: np.ndarray, computed: np.ndarray) -> bool:
        """Whether every row may write where its next token goes, once shared blocks are copied."""
        bad = rows[~self.pool.writable(rows, computed)]
        index = self.computed[bad] // self.pool.block_size
        return all(pair in self.copied for pair in zip(bad.tolist(), index.tolist(), strict=True))

    def _take(self, blocks: int) -> None:
        self.free -= blocks
        _demand(self.free >= 0, "more blocks than are free")


def _returned(plan: BatchPlan, view: View) -> dict[int, int]:
    """Blocks that each preempted row gives back, in the order of the plan."""
    ops = [op for op in plan.operations if isinstance(op, Preempt)]
    if not ops:
        return {}
    rows, keep = (np.concatenate([getattr(op, name) for op in ops]) for name in ("rows", "keep"))
    return dict(zip(rows.tolist(), view.pool.returned_by(rows, keep).tolist(), strict=True))


def _start_of(plan: BatchPlan, at: int) -> tuple[CacheKind, Direction]:
    """Kind and direction in which the plan's row number `at` starts."""
    side = Direction.LEFT if plan.directions is None else Direction(int(plan.directions[at]))
    return CacheKind(int(plan.kinds[at])), side


def _triples(*arrays: np.ndarray) -> Any:
    return zip(*(a.tolist() for a in arrays), strict=True)


def _different(rows: np.ndarray, capacity: int) -> bool:
    last = np.empty(capacity, np.int64)
    order = np.arange(len(rows))
    last[rows] = order
    return bool((last[rows] == order).all())


def _attempt(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except ValueError as error:
        raise InvalidPlan(str(error)) from error


def _demand(condition: bool | np.bool_, problem: str) -> None:
    if not condition:
        raise InvalidPlan(problem)


_CHECKS: dict[type, Callable[[_After, Any], None]] = {
    Preempt: _After.preempt,
    ToKV: _After.to_kv,
    Copy: _After.copy,
    Checkpoint: _After.checkpoint,
    Restore: _After.restore,
    Join: _After.join,
}
