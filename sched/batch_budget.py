"""What still fits into the batch being planned, and what is in it so far.

Counts only; the pool itself is changed by `Scheduler` once the plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.plan import BatchPlan, Operation, Preempt
from jaxserve.sched.policy import View
from jaxserve.sched.table import RUNNING, WAITING


@dataclass(frozen=True)
class Expected:
    """What requests will take. peak: rows -> cache tokens that each is expected to end with, int64
    [n]. of_running: whether a start leaves free, besides its own peak, what those that run are
    expected to take yet."""

    peak: Callable[[np.ndarray], np.ndarray]
    of_running: bool = False


@dataclass
class Candidates:
    """Parallel arrays [n], most urgent first. tokens: to compute now; reserve: cache tokens to
    have room for; kinds: `CacheKind`; prefill: whether P applies. new: free blocks that each takes,
    once `BatchBudget.new_blocks` has been asked."""

    rows: np.ndarray
    tokens: np.ndarray
    reserve: np.ndarray
    kinds: np.ndarray
    prefill: np.ndarray
    new: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | np.ndarray) -> Candidates:
        """A slice of them, or those that a mask or indices choose."""
        return Candidates(
            self.rows[part],
            self.tokens[part],
            self.reserve[part],
            self.kinds[part],
            self.prefill[part],
            None if self.new is None else self.new[part],
        )


class BatchBudget:
    """A batch in the making. The checks are those of InferMax section 3.1, CanAllocate: C, P, M,
    and the number of rows.

    max_rows, prefill_tokens: the policy's own limits where they differ from the view's (never more
    than its max_rows and C). expected: a start then needs room for its peak.
    """

    def __init__(
        self,
        view: View,
        *,
        max_rows: int | None = None,
        prefill_tokens: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        self.view = view
        limits = view.limits
        rows = limits.max_rows if max_rows is None else min(max_rows, limits.max_rows)
        prefill = limits.max_prefill_tokens if prefill_tokens is None else prefill_tokens
        running = view.table.in_state(RUNNING)
        self.batch_left = limits.max_batch_tokens
        self.prefill_left = prefill
        self.rows_left = rows
        self.free = view.pool.num_free
        self.slots_left = max(rows - len(running), 0)
        self.chosen: list[Candidates] = []
        self.preempted: list[int] = []
        # By row: in the batch, or preempted for it. Neither may be preempted (again).
        self.decided = np.zeros(view.table.capacity, bool)
        self._holders = len(running)
        # What two of the preempted share is free after the second.
        self._refs = view.pool.refs.copy() if view.pool.shares else None
        self._expected = expected
        # By row: blocks that it is expected to take yet. Their sum over those that run.
        self._promises = expected is not None and expected.of_running
        self._growth = np.zeros(view.table.capacity if self._promises else 0, np.int64)
        if self._promises:
            self._growth[running] = self._growth_of(running)
        self._promised = int(self._growth.sum())

    def __len__(self) -> int:
        return sum(map(len, self.chosen))

    @property
    def alone(self) -> bool:
        """Nobody holds cache: whoever comes next has the pool to itself."""
        return self._holders == 0

    def new_blocks(self, cands: Candidates) -> np.ndarray:
        """Free blocks each candidate takes, [n]."""
        if cands.new is None:
            cands.new = self.view.pool.needed(cands.rows, cands.reserve, cands.kinds)
        return cands.new

    def fits_budget(self, cands: Candidates) -> int:
        """How many candidates, taken in order, stay within C, P and the rows of a batch."""
        ok = len(cands)
        total = int(np.add.reduce(cands.tokens))
        if total > self.batch_left or total > self.prefill_left:
            tokens = np.cumsum(cands.tokens)
            ok = _prefix(
                (tokens <= self.batch_left) & (~cands.prefill | (tokens <= self.prefill_left))
            )
        return min(ok, self.rows_left)

    def fits_memory(self, cands: Candidates, keep_free: int = 0) -> int:
        """How many candidates, taken in order, find their blocks and a slot. keep_free: blocks
        that those who start leave free. The only one to hold cache leaves none."""
        new = self.new_blocks(cands)
        starts = self.view.table.state[cands.rows] == WAITING
        total, starting = int(np.add.reduce(new)), int(np.count_nonzero(starts))
        if starting == 0:
            return len(cands) if total <= self.free else _prefix(np.cumsum(new) <= self.free)
        if self._expected is None:
            if starting <= self.slots_left and total + keep_free <= self.free:
                return len(cands)
            peak = new
        else:
            peak = np.maximum(self._growth_of(cands.rows), new)
        ok = np.cumsum(starts) <= self.slots_left
        taken, limit = np.cumsum(new), self.free - keep_free
        if self._promises:
            self._growth[cands.rows[starts]] = peak[starts]
            more = np.maximum(new - self._growth[cands.rows], 0)  # than those that run promised
            promised = np.cumsum(np.where(starts, peak, more)) + self._promised
            ok &= (taken <= self.free) & (~starts | (promised <= limit))
        else:
            ok &= np.where(starts, taken - new + peak <= limit, taken <= self.free)
        if self.alone and new[0] <= self.free and self.slots_left:
            ok[0] = True
        return _prefix(ok)

    def add(self, cands: Candidates) -> None:
        """Puts all of them into the batch; the caller has checked that they fit."""
        if not len(cands):
            return
        used = int(np.add.reduce(cands.tokens))
        new = self.new_blocks(cands)
        starts = self.view.table.state[cands.rows] == WAITING
        starting = int(np.count_nonzero(starts))
        self.batch_left -= used
        self.prefill_left -= used
        self.rows_left -= len(cands)
        self.slots_left -= starting
        self._holders += starting
        self.free -= int(np.add.reduce(new))
        if self._promises:
            growth = self._growth[cands.rows]
            before = growth[~starts].sum() if starting else growth.sum()
            self._promised += int(np.maximum(growth - new, 0).sum()) - int(before)
        self.decided[cands.rows] = True
        self.chosen.append(cands)

    def preempt(self, row: int) -> None:
        """Takes the row's cache away. It must not be in the batch."""
        self.free += int(self.view.pool.returned_by(np.array([row]), self._refs)[0])
        self.slots_left += 1
        self._holders -= 1
        if self._promises:
            self._promised -= int(self._growth[row])
        self.decided[row] = True
        self.preempted.append(row)

    def finish(self) -> BatchPlan:
        """The plan."""
        operations: tuple[Operation, ...] = ()
        if self.preempted:
            operations = (Preempt.whole(np.asarray(self.preempted, np.int64)),)
        if not self.chosen:
            return BatchPlan(operations=operations)
        if len(self.chosen) == 1:
            only = self.chosen[0]
            return BatchPlan(only.rows, only.tokens, only.reserve, only.kinds, operations)
        fields = ("rows", "tokens", "reserve", "kinds")
        rows, tokens, reserve, kinds = (
            np.concatenate([getattr(c, name) for c in self.chosen]).astype(np.int64, copy=False)
            for name in fields
        )
        return BatchPlan(rows, tokens, reserve, kinds, operations)

    def _growth_of(self, rows: np.ndarray) -> np.ndarray:
        """Free blocks that each is expected to take yet, [n]."""
        assert self._expected is not None
        return self.view.pool.needed(rows, self._expected.peak(rows), self.view.pool.kind[rows])


def _prefix(ok: np.ndarray) -> int:
    return len(ok) if np.count_nonzero(ok) == len(ok) else int(np.argmin(ok))
