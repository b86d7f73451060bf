"""A policy for tests that has requests share blocks whenever a lot says so: some fill them from the
left, and write over what others have there, whose tokens go to the host, come back, into the same
block or another one, or are dropped and computed again (BROS section 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_a_plane, slots_for
from jaxserve.sched.cache.cache_kinds import HIDDEN, KV, LEFT, NOBODY, RIGHT
from jaxserve.sched.plan import BatchPlan, Checkpoint, Copy, Join, Operation, Preempt, Restore
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.restore_plan import left_filled, overwritten_ranges, plan_restore
from jaxserve.sched.state.request_table import RUNNING, WAITING

TRIES = 100


class SharingCaches(Policy):
    """Every other request fills blocks from the left, and may take others' ends. lots: numbers that
    say what happens, over and over again. did: how often it did."""

    hybrid_cache = True
    moves_cache = True

    def __init__(self, lots: Sequence[int] = (0,)) -> None:
        self.lots, self.did, self._next = list(lots), Counter[str](), 0

    def lot(self, of: int) -> int:
        """A number below `of`."""
        self._next += 1
        return (self.lots[self._next % len(self.lots)] + self._next // len(self.lots)) % of

    def plan(self, view: View, now: float) -> BatchPlan:
        for _ in range(TRIES):
            if (found := self._try(view)) is not None:
                return found
        running = view.table.in_state(RUNNING)
        return BatchPlan(operations=(Preempt.whole(running),) if len(running) else ())

    def _try(self, view: View) -> BatchPlan | None:
        """None if lots say that nothing happens."""
        made, did, table = _Plan(self, view), self.did.copy(), view.table
        rows = np.concatenate([table.in_state(RUNNING), table.in_state(WAITING)])
        left = table.seq[rows] % 2 == 0
        for row in rows[left].tolist():
            made.fill_from_the_left(row)
        made.save_what_is_written_over()
        for row in rows[~left].tolist():
            made.fill_from_the_right(row)
        plan = made.finish()
        self.did = self.did if plan is not None else did
        return plan


class _Plan:
    def __init__(self, policy: SharingCaches, view: View) -> None:
        self.policy, self.view, self.pool, self.table = policy, view, view.pool, view.table
        self.operations: list[Operation] = []
        self.batch: list[tuple[int, int, int, int, int]] = []  # row, tokens, reserve, kind, side
        self.left = left_filled(view)
        lone = (self.pool.refs == 1) & (self.pool.owners[:, RIGHT] != NOBODY)
        ends = np.flatnonzero(lone)
        self.ends = np.roll(ends, policy.lot(max(len(ends), 1))).tolist()
        self.free, self.host_free = self.pool.num_free, view.host.num_free
        self.tokens = view.limits.max_batch_tokens
        self.holders = len(self.table.in_state(RUNNING))
        self.damaged: set[int] = set()

    def _may(self, row: int, pending: int) -> bool:
        starts = self.table.state[row] == WAITING
        return pending <= self.tokens and self.holders + starts <= self.view.limits.max_rows

    def _kind(self, row: int) -> int:
        if self.table.state[row] == RUNNING:
            return int(self.pool.kind[row])
        offered = self.view.rho is not None
        return HIDDEN if offered and self.table.seq[row] // 2 % 2 else KV

    def _add(self, row: int, tokens: int, end: int, kind: int, side: int, waits: bool) -> None:
        self.batch.append((row, tokens, end, kind, side))
        self.tokens -= tokens
        self.holders += waits

    def fill_from_the_left(self, row: int) -> None:
        """It computes all that is pending, in free blocks or in the other ends of taken ones."""
        one, size, kind = np.array([row]), self.pool.block_size, self._kind(row)
        pending, start = int(self.table.pending(one)[0]), int(self.table.computed[row])
        if not self._may(row, pending) or not self.policy.lot(6):
            return
        end, planes = start + pending, 1 if kind == HIDDEN else 2
        more = max(blocks_a_plane(end, size) - int(self.pool.held[row]), 0)
        ids = self.pool.blocks_of(row)
        joins = more and len(self.ends) >= more * planes
        if joins and (self.policy.lot(3) or self.free < more * planes):
            taken = np.array([self.ends.pop() for _ in range(more * planes)]).reshape(more, planes)
            self.operations.append(Join(row, taken))
            self.policy.did["join"] += 1
            ids = np.hstack([ids[:planes], taken.T]) if self.pool.held[row] else taken.T
        elif self.free >= more * planes:
            self.free -= more * planes
        else:
            return
        index = np.arange(ids.shape[1])
        there = np.broadcast_to(np.clip(end - index * size, 0, size), ids.shape)
        self.left[ids] = np.where(self.pool.owners[ids, RIGHT] >= 0, there, 0)
        self._add(row, pending, end, kind, LEFT, self.table.state[row] == WAITING)

    def save_what_is_written_over(self) -> None:
        """Or cut off what the host has no room for."""
        ids = np.flatnonzero(self.left)
        cut: dict[int, int] = {}
        kept = []
        lost = overwritten_ranges(self.view, ids, self.left[ids])
        for row, first, end in zip(*(c.tolist() for c in lost), strict=True):
            self.damaged.add(row)
            slots = int(slots_for(end - first, self.pool.kind[row]))
            if row not in cut and slots <= self.host_free and self.policy.lot(8):
                self.host_free -= slots
                kept.append((row, first, end))
            else:
                cut.setdefault(row, first)
        if kept:
            self.operations.append(Checkpoint(*np.array(kept, np.int64).T))
            self.policy.did["checkpoint"] += len(kept)
        if cut:
            rows, keep = np.array([*cut]), np.array([*cut.values()])
            self.operations.append(Preempt(rows, keep))
            self.holders -= int(np.count_nonzero(keep == 0))
            self.policy.did["cut"] += len(cut)

    def fill_from_the_right(self, row: int) -> None:
        """It goes on, in blocks of its own; first it comes back, or it is dropped."""
        host = self.view.host
        waits = self.table.state[row] == WAITING
        if row in self.damaged or self.holders + waits > self.view.limits.max_rows:
            return
        computed, known = int(self.table.computed[row]), int(self.pool.held[row])
        kind, copied = self._kind(row), np.zeros(0, np.int64)
        if host.tokens[row] and (waits or host.segments(row)[0].first < computed):
            back = plan_restore(self.view, row, self.left)
            if not self.policy.lot(3) or back.blocks > self.free or not len(back.first):
                if not waits and not self.policy.lot(10):
                    self._drop(row, computed, swap=False)
                return
            self.free -= back.blocks
            kind, copied = int(host.segments(row)[0].kind), back.copy
            if len(copied):
                self.operations.append(Copy(np.full_like(copied, row), copied))
                self.policy.did["elsewhere"] += 1
            self.operations.append(Restore(np.full_like(back.first, row), back.first))
            self.policy.did["restore"] += 1
            self.holders += waits
            computed, waits = back.computed, np.False_
        elif not waits and not self.policy.lot(9):
            return self._drop(row, computed, swap=bool(self.policy.lot(3)))
        pending = int(self.table.prompt_len[row] + self.table.generated[row]) - computed
        if pending > self.tokens or not self.policy.lot(6):
            return
        self._go_on(row, computed, computed + pending, kind, copied, known, bool(waits))

    def _go_on(
        self, row: int, start: int, end: int, kind: int, copied: np.ndarray, known: int, waits: bool
    ) -> None:
        size, planes = self.pool.block_size, 1 if kind == HIDDEN else 2
        index = np.arange(start // size, min(blocks_a_plane(end, size), known))
        index = np.setdiff1d(index, copied)
        ids = self.pool.blocks_of(row)[:, index]
        full = (self.left[ids] + np.minimum(end - index * size, size) > size).any(axis=0)
        move = index[full]
        held = max(known, blocks_a_plane(start, size))
        need = planes * (len(move) + max(blocks_a_plane(end, size) - held, 0))
        if need > self.free:
            return
        self.free -= need
        if len(move):
            self.operations.append(Copy(np.full_like(move, row), move))
            self.policy.did["aside"] += 1
        self._add(row, end - start, end, kind, RIGHT, waits)

    def _drop(self, row: int, computed: int, *, swap: bool) -> None:
        slots = int(slots_for(computed, self.pool.kind[row]))
        one = np.array([row])
        if swap and slots <= self.host_free:
            self.host_free -= slots
            self.operations.append(Checkpoint(one, one * 0, one * 0 + computed))
            self.policy.did["swap"] += 1
        else:
            self.policy.did["drop"] += 1
        self.operations.append(Preempt.whole(one))
        self.holders -= 1

    def finish(self) -> BatchPlan | None:
        """None if that is nothing."""
        if not self.batch and not self.operations:
            return None
        rows, tokens, reserve, kinds, sides = np.array(self.batch, np.int64).reshape(-1, 5).T
        return BatchPlan(rows, tokens, reserve, kinds, tuple(self.operations), sides)
