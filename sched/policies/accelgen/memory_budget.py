"""Blocks and places that a plan hands out, and which requests it preempts (section 4.4)."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES
from jaxserve.sched.cache.cache_kinds import KV
from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policies.accelgen.batch import AccelGenBatch, AccelGenWork
from jaxserve.sched.policy import View
from jaxserve.sched.unified.batch_budget import MemoryBudget
from jaxserve.sched.unified.batch_builder import PlannedWork

MOST_LOSSES = 3  # preemptions after which urgent requests spare a request's cache


class AccelGenBudget(MemoryBudget):
    """The memory of a plan. It first takes caches that can be spared for longest; of equal ones,
    the least urgent.

    Args:
        view: What the policy sees.
        batch: The batch being built; preempted rows leave it.
        running: All requests that hold a cache, the most urgent first.
        watermark: Share of the pool that starts leave free.
    """

    def __init__(
        self, view: View, batch: AccelGenBatch, running: AccelGenWork, watermark: float
    ) -> None:
        super().__init__(view)
        self._batch = batch
        running = running[np.argsort(running.spare, kind="stable")]
        self._running, self._spare = running.rows, running.spare
        self._taken = np.zeros(view.table.capacity, np.int64)  # by row: blocks in this plan
        self._holders = len(running)
        self._watermark = int(watermark * view.pool.num_blocks)
        self._growth = 0  # blocks that starts leave to each running request

    @property
    def startable(self) -> int:
        """Free blocks, less those that a start must leave free."""
        return max(self.free - self._watermark - self._growth * self._holders, 0)

    def leave_growth(self) -> None:
        """From now on, starts leave every running request room for another block of tokens."""
        self._growth = PLANES[KV]

    def fit(self, work: AccelGenWork) -> int:
        """How many requests, in order, find blocks and a place. Starts and long prompts leave the
        same blocks free, unless nobody else holds a cache."""
        need = np.cumsum(work.new)
        ok = need <= np.where(work.starts | work.long, self.startable, self.free)
        ok &= ~work.starts | (np.cumsum(work.starts) <= self.slots)
        if len(work) and self._alone(work)[0]:
            ok[0] = need[0] <= self.free
        return prefix(ok)

    def tokens(self, work: AccelGenWork) -> np.ndarray:
        """Tokens that each long prompt could compute with its own blocks and the free ones that it
        may take, int64 [n]."""
        pool = self.view.pool
        free = np.where(self._alone(work), self.free, self.startable) // PLANES[KV]
        return np.maximum(pool.room(work.rows) + free * pool.block_size - work.start, 0)

    def allocate(self, work: PlannedWork) -> None:
        """Takes the blocks and places for this work."""
        super().allocate(work)
        self._taken[work.rows] = work.new
        self._holders += int(np.count_nonzero(work.starts))

    def grow(self, work: AccelGenWork) -> AccelGenWork:
        """The decodes, the most urgent first, that find blocks after the least urgent running
        requests were preempted as needed."""
        need = work.new.copy()
        at = dict(zip(work.rows.tolist(), range(len(work)), strict=True))
        for row in self._running[::-1].tolist():
            if int(need.sum()) <= self.free:
                break
            self.preempt(row)
            if row in at:
                need[at[row]] = 0
        if self.preempted:
            work = work[~self.is_out(work.rows)]
        self.allocate(work)
        return work

    def make_room(self, one: AccelGenWork) -> bool:
        """Preempts requests that can spare their caches for longer than this request can wait,
        until it finds blocks and a place; preempts none if that is not enough. Returns whether it
        fits now.
        """
        ok = (self._spare > one.key[0]) & (self.view.table.preemptions[self._running] < MOST_LOSSES)
        ok &= ~self.is_out(self._running)
        victims = self._running[ok][::-1]
        have = self.free + np.cumsum(self.view.pool.private(victims) + self._taken[victims])
        starts = bool(one.starts[0])
        need = int(one.new[0]) + (self._watermark if starts else 0)
        count = max(int(np.searchsorted(have, need)) + 1, 1 if starts and self.slots < 1 else 0)
        if count > len(victims):
            return False
        for row in victims[:count].tolist():
            self.preempt(row)
        return self.fit(one) == 1

    def _alone(self, work: AccelGenWork) -> np.ndarray:
        """Whether no other request holds a cache, bool [n]."""
        return np.asarray(self._holders == ~work.starts)

    def preempt(self, row: int, gives: int | None = None) -> None:
        """Preempts the row and takes it out of the batch."""
        super().preempt(row, int(self.view.pool.private(row) + self._taken[row]))
        self._holders -= 1
        self._taken[row] = 0
        self._batch.drop(row)
