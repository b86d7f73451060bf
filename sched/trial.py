"""Trial allocation: what still fits into the batch being planned.

Counts only; the pool itself is changed by `Scheduler` once the plan is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View
from jaxserve.sched.table import State


@dataclass(frozen=True)
class Candidates:
    """Parallel arrays [n], most urgent first. tokens: to compute now; reserve: cache tokens to
    have room for; kinds: `CacheKind`; prefill: whether P applies."""

    rows: np.ndarray
    tokens: np.ndarray
    reserve: np.ndarray
    kinds: np.ndarray
    prefill: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Candidates:
        return Candidates(
            self.rows[part],
            self.tokens[part],
            self.reserve[part],
            self.kinds[part],
            self.prefill[part],
        )


class Trial:
    """A batch in the making. The checks are those of InferMax section 3.1, CanAllocate: C, P, M,
    and the number of rows."""

    def __init__(self, view: View) -> None:
        self.view = view
        limits = view.limits
        self.batch_left = limits.max_batch_tokens
        self.prefill_left = limits.max_prefill_tokens
        self.rows_left = limits.max_rows
        self.free = view.pool.num_free
        running = int((view.table.state == State.RUNNING).sum())
        self.slots_left = limits.max_rows - running
        self.chosen: list[Candidates] = []
        self.evicted: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self.chosen))

    def new_blocks(self, cands: Candidates) -> np.ndarray:
        """Free blocks each candidate takes, [n]."""
        return self.view.pool.needed(cands.rows, cands.reserve, cands.kinds)

    def fits_budget(self, cands: Candidates) -> int:
        """How many candidates, taken in order, stay within C, P and the row limits."""
        tokens = np.cumsum(cands.tokens)
        new = np.cumsum(self.view.table.state[cands.rows] == State.WAITING)
        ok = (tokens <= self.batch_left) & (new <= self.slots_left)
        ok &= ~cands.prefill | (tokens <= self.prefill_left)
        ok[self.rows_left :] = False
        return _prefix(ok)

    def fits_memory(self, cands: Candidates, keep_free: int = 0) -> int:
        """How many candidates, taken in order, find their blocks and leave `keep_free`."""
        return _prefix(np.cumsum(self.new_blocks(cands)) <= self.free - keep_free)

    def add(self, cands: Candidates) -> None:
        """Puts all of them into the batch; the caller has checked that they fit."""
        if not len(cands):
            return
        used = int(cands.tokens.sum())
        self.batch_left -= used
        self.prefill_left -= used
        self.rows_left -= len(cands)
        self.slots_left -= int((self.view.table.state[cands.rows] == State.WAITING).sum())
        self.free -= int(self.new_blocks(cands).sum())
        self.chosen.append(cands)

    def evict(self, row: int) -> None:
        """Takes the row's cache away. It must not be in the batch."""
        self.free += self.view.pool.returned_by(row)
        self.slots_left += 1
        self.evicted.append(row)

    def finish(self) -> BatchPlan:
        """The plan, rows of one token first (the steps want decodes ahead of chunks)."""
        evict = np.asarray(self.evicted, np.int64)
        if not self.chosen:
            return BatchPlan(evict=evict)
        fields = ("rows", "tokens", "reserve", "kinds")
        rows, tokens, reserve, kinds = (
            np.concatenate([getattr(c, name) for c in self.chosen]).astype(np.int64)
            for name in fields
        )
        order = np.argsort(tokens != 1, kind="stable")
        return BatchPlan(rows[order], tokens[order], reserve[order], kinds[order], evict)


def _prefix(ok: np.ndarray) -> int:
    return len(ok) if ok.all() else int(np.argmin(ok))
