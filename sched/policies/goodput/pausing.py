"""Who is paused where memory is short, and where its cache goes meanwhile."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.plan import Checkpoint, Operation, Preempt
from jaxserve.sched.policies.goodput.batch import Batch, Work
from jaxserve.sched.policy import View
from jaxserve.sched.unified.batch_budget import MemoryBudget

FREE_OF_LOSS, AT_ANY_LOSS = 0.0, math.inf


class Memory(MemoryBudget):
    """Blocks and rows of a plan. Whose next late token costs least is paused first, of equal ones
    the one with most blocks.

    Args:
        view: What the policy sees.
        batch: The batch in the making, which those who are paused leave.
        running: All that hold cache.
        kept: bool by row, who is not paused.
        swaps: Whether caches may go to the host.
    """

    def __init__(
        self, view: View, batch: Batch, running: Work, kept: np.ndarray, *, swaps: bool
    ) -> None:
        super().__init__(view)
        self._batch, self._swaps = batch, swaps
        held = view.pool.blocks_held(running.rows)
        order = np.lexsort((-held, running.loss))
        order = order[~kept[running.rows[order]]]
        # Those who are left to be paused, whose next late token costs least first.
        self._rows, self._loss, self._held = running.rows[order], running.loss[order], held[order]

    def pause_one(self) -> bool:
        """Pauses whoever loses least; returns whether there was somebody."""
        if not len(self._rows):
            return False
        self._pause(np.arange(1))
        return True

    def make_room(self, work: Work, most: float) -> int:
        """Pauses others, until requests find their blocks and slots.

        Args:
            work: The requests, in order.
            most: The most that all of those who are paused may lose.

        Returns:
            How many of the requests, in order, find them now; nobody is paused for the others.
        """
        others = np.flatnonzero(~np.isin(self._rows, work.rows))
        others = others[: prefix(np.cumsum(self._loss[others]) <= most)]
        have = np.append(0, np.cumsum(self._held[others])) + self.free
        need, starts = np.cumsum(work.new), np.cumsum(work.starts)
        fit = prefix((need <= have[-1]) & (starts <= self.slots + len(others)))
        if fit:
            blocks = int(np.searchsorted(have, need[fit - 1]))
            self._pause(others[: max(blocks, int(starts[fit - 1]) - self.slots)])
        return fit

    def operations(self) -> tuple[Operation, ...]:
        """Checkpoints of caches that are sooner copied to the host and back than computed again,
        as far as there is room, and the preemptions."""
        if not self.preempted:
            return ()
        view, rows = self.view, np.array(self.preempted, np.int64)
        found: list[Operation] = []
        if self._swaps and view.host.capacity:
            tokens, kinds = view.table.computed[rows], view.pool.kind[rows]
            saved = (tokens > 0) & (view.host.tokens[rows] == 0)
            saved &= view.swap_time(tokens, kinds) < view.refill_time(tokens)
            slots = np.where(saved, slots_for(tokens, kinds), 0)
            saved &= np.cumsum(slots) <= view.host.num_free
            if saved.any():
                found.append(Checkpoint(rows[saved], np.zeros_like(rows[saved]), tokens[saved]))
        return (*found, Preempt.whole(rows))

    def _pause(self, which: np.ndarray) -> None:
        """which: indices of those who are left."""
        rows, held = self._rows[which], self._held[which]
        self._rows, self._loss, self._held = (
            np.delete(each, which) for each in (self._rows, self._loss, self._held)
        )
        self.free += self._batch.drop(rows)
        for row, blocks in zip(rows.tolist(), held.tolist(), strict=True):
            self.preempt(row, blocks)
