"""Blocks and places that a plan hands out, and whom it preempts for them (BROS section 5.2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.plan import Operation
from jaxserve.sched.policies.bros.packing import BEST_EFFORT, BrosBatch, BrosWork
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING
from jaxserve.sched.unified.batch_budget import MemoryBudget


class BrosBudget(MemoryBudget):
    """The memory of a plan.

    Args:
        view: What the policy sees.
        batch: The batch being built.
        watermark: Share of the pool that starts leave free.
        late_watermark: The same for late starts, if it is higher.

    Attributes:
        running: Rows that hold a cache, in order of arrival, without those preempted by the plan.
    """

    def __init__(
        self, view: View, batch: BrosBatch, watermark: float, late_watermark: float
    ) -> None:
        super().__init__(view)
        self._batch = batch
        self.running = view.table.in_state(RUNNING)
        blocks = view.pool.num_blocks
        self._watermark = int(watermark * blocks)
        self._late_watermark = int(max(watermark, late_watermark) * blocks)

    def starting(self, new: np.ndarray, left: Any, *, alone: bool, late: Any = False) -> np.ndarray:
        """Which starts, in order, find their blocks and leave the watermark.

        Args:
            new: int64 [n], blocks that each start takes.
            left: Free blocks; a number, or one for each start.
            alone: Whether no row holds a cache, so that the first start need not leave the
            watermark.
            late: Which starts are late and leave `late_watermark`; a bool, or bool [n].

        Returns:
            bool [n].
        """
        over = left - np.cumsum(new)
        ok = over >= np.where(late, self._late_watermark, self._watermark)
        if len(new) and alone:
            ok[0] = over[0] >= 0
        return ok

    def best_effort(self) -> np.ndarray:
        """Best-effort rows outside the batch that hold a cache, the latest arrivals first."""
        rows = self.running[::-1]
        theirs = self.view.table.tier[rows] == BEST_EFFORT
        return rows[theirs & ~self._batch.chosen[rows]]

    def lendable(self) -> int:
        """Blocks of best-effort requests that real-time ones may take."""
        return int(self.returned_by(self.best_effort()).sum())

    def returned_by(self, rows: np.ndarray) -> np.ndarray:
        """Blocks that preempting each of these best-effort rows would free, int64 [n]."""
        return self.view.pool.private(rows)

    def given_by(self, rows: np.ndarray) -> np.ndarray:
        """Blocks that others could use if each of these running rows were preempted, int64 [n]."""
        return self.view.pool.private(rows)

    def price(self, work: BrosWork) -> BrosWork:
        """The same work with the blocks that it takes, given the preemptions so far."""
        return work

    def offers(self, rows: np.ndarray) -> BrosWork:
        """What these best-effort rows would do, without those that cannot be in this step."""
        return BrosWork.of_rows(self.view, rows[~self._batch.chosen[rows] & ~self.is_out(rows)])

    def affordable(self, work: BrosWork, late: np.ndarray) -> np.ndarray:
        """Which real-time requests, in order of urgency, find blocks and a place: a mask [n].

        All best-effort caches may be taken for them. Starts leave the watermark and what running
        requests need now, and none overtakes one that found no room. Running requests take missing
        blocks from the end of the queue.

        Args:
            work: The requests [n].
            late: bool [n], which requests leave the late watermark.
        """
        theirs, blocks = self.best_effort(), self.free + self.lendable()
        starts, runs = np.flatnonzero(work.starts), np.flatnonzero(~work.starts)
        need, mask = np.cumsum(work.new[runs]), np.zeros(len(work), bool)
        used = int(need[-1]) if len(need) else 0
        if used > blocks:
            held = self.given_by(work.rows[runs])
            count = prefix(need <= blocks + held.sum() - np.cumsum(held))
            short = (int(need[count - 1]) if count else 0) - blocks
            lost = int(np.searchsorted(np.cumsum(held[::-1]), short)) + 1 if short > 0 else 0
            stays = np.arange(len(runs)) < len(runs) - lost
            mask[runs] = stays & ((np.arange(len(runs)) < count) | (work.new[runs] == 0))
            return mask
        mask[runs] = True
        ok = self.starting(work.new[starts], blocks - used, alone=not len(runs), late=late[starts])
        count = prefix(ok[: max(self.slots + len(theirs), 0)])
        mask[starts[:count]] = True
        return mask

    def provide(self, work: BrosWork, behind: np.ndarray) -> BrosWork:
        """Takes blocks and places for these real-time requests, which must be affordable. behind:
        the other real-time requests, the most urgent first."""
        need, starts = int(work.new.sum()), int(work.starts.sum())
        runs = behind[self.view.table.state[behind] == RUNNING]
        for row in np.concatenate([self.best_effort(), runs[::-1]]).tolist():
            if need <= self.free and starts <= self.slots:
                break
            self.preempt(row)
        self.allocate(work)
        return work

    def offers_first(self, rows: np.ndarray) -> BrosWork:
        """`offers` for best-effort rows that come before real-time ones."""
        return self.offers(rows)

    def preempt(self, row: int, gives: int | None = None) -> None:
        """Preempts the row, which must not be in the batch."""
        super().preempt(row, gives)
        self.running = self.running[self.running != row]

    def operations(self, work: BrosWork) -> tuple[Operation, ...]:
        """The operations on caches before the step. work: the whole batch."""
        return self.preemptions()
