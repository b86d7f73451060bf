"""Which requests are paused if memory is short, and where their caches go."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.plan import Checkpoint, Operation, Preempt
from jaxserve.sched.policies.goodput.batch import GoodputBatch, GoodputWork
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import WAITING
from jaxserve.sched.unified.batch_budget import MemoryBudget
from jaxserve.sched.unified.making_room import givers

FREE_OF_LOSS, AT_ANY_LOSS = 0.0, math.inf
MORE, LESS, LEAST = 0.05, 0.8, 0.1  # of `Returns`


class Returns:
    """How much of the memory that comes free the paused can count on: less (LESS) whenever one has
    not come back before its longest gap, more (MORE) whenever one has. In an overload that lasts
    others start in most of it. Without that, 6 points fewer keep their longest gaps in such a one
    (`azure-conv` on Llama-3-70B).

    Attributes:
        share: The share, from LEAST to 1.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._due = dict[int, tuple[int, float]]()  # by row: request, and its longest gap's end

    def note(self, view: View, rows: np.ndarray, due: np.ndarray) -> None:
        """These rows, which can be in time, are paused. due: float64 [n], when their longest gaps
        end, seconds."""
        requests = view.table.seq[rows].tolist()
        for row, seq, end in zip(rows.tolist(), requests, due.tolist(), strict=True):
            self._due[row] = seq, end

    def read(self, view: View, clock: float) -> None:
        """Sees who is back; called once per plan. clock: when the planned step begins, seconds."""
        table = view.table
        for row, (seq, due) in [*self._due.items()]:
            there, back = table.seq[row] == seq, table.state[row] != WAITING
            if there and not back and clock <= due:
                continue
            del self._due[row]
            if there and back:
                self.share = min(self.share + MORE, 1.0)
            elif there:
                self.share = max(self.share * LESS, LEAST)


class Memory(MemoryBudget):
    """Blocks and rows of a plan. The request whose next late token costs least is paused first; of
    equal ones those without targets, then those that cannot attain theirs, then those with most
    blocks. Requests are indices of `work`.

    Args:
        view: What the policy sees.
        work: All requests, those that hold a cache first.
        batch: The batch being built, which paused requests leave.
        kept: bool [n], which requests are not paused.
        pace: Recent seconds of a step.
        returns: How much of the memory that comes free is for the paused.
        swaps: Whether caches may go to the host.

    Attributes:
        out: bool [n], which requests are paused by this plan.
    """

    def __init__(
        self,
        view: View,
        work: GoodputWork,
        batch: GoodputBatch,
        kept: np.ndarray,
        pace: float,
        returns: Returns,
        *,
        swaps: bool,
    ) -> None:
        super().__init__(view)
        self.out = np.zeros(len(work), bool)
        self._work, self._batch, self._kept, self._swaps = work, batch, kept, swaps
        self._pace, self._share = pace, returns.share
        self._left: np.ndarray | None = None

    def take(self, some: np.ndarray) -> None:
        """Takes the blocks and slots for these requests."""
        self.free -= int(self._work.new[some].sum())
        self.slots -= int(np.count_nonzero(self._work.starts[some]))

    def pause_for(self, decodes: np.ndarray) -> None:
        """Pauses the requests with the least loss, these decodes or others, until the decodes that
        remain find blocks."""
        work, others = self._work, self._pausable()
        takes = np.zeros(len(work), np.int64)
        takes[decodes] = work.new[decodes]
        gives = (self.view.pool.private(work.rows[others]) + takes[others]).cumsum()
        enough = int(np.searchsorted(gives, int(takes.sum()) - self.free)) + 1
        self._pause(others[:enough])

    def make_room(self, some: np.ndarray, most: float) -> int:
        """Pauses others until requests find their blocks and slots, if it is worth it: unless any
        loss is allowed, paused ones must be able to return before their longest gaps, and their
        caches must not take longer to come back than the requests take. Requests without targets
        make room for those with targets, however long these take; for a request that was paused
        itself, only they do.

        Args:
            some: The requests, in order.
            most: Most total loss of the paused requests.

        Returns:
            How many of the requests, in order, find them now; none is paused for the others.
        """
        work, others = self._work, self._pausable()
        asks = np.zeros(len(work), bool)
        asks[some] = True
        others = others[~asks[others]]
        others = others[: prefix(work.loss[others].cumsum() <= most)]
        if most < AT_ANY_LOSS:
            others = others[work.bare[others] | ~work.paused[some[0]]]
            others = self._back_in_time(others)
        held = self.view.pool.private(work.rows[others])
        paused = givers(work.new[some], work.starts[some], held, self.free, self.slots)
        fit = len(paused)
        others = others[: int(paused[-1])] if fit else others[:0]
        if fit and most < AT_ANY_LOSS:
            own = self.view.refill_time(work.tokens[some[:fit]]).cumsum()
            back = self._return_time(others)
            back[work.bare[others] & ~work.bare[some[0]]] = 0.0
            worth = np.append(0.0, back.cumsum())[paused] <= own
            fit = int(np.flatnonzero(worth)[-1]) + 1 if worth.any() else 0
        if fit:
            self._pause(others[: int(paused[fit - 1])])
        return fit

    def _back_in_time(self, some: np.ndarray) -> np.ndarray:
        """The requests that can attain nothing, or would find memory before their longest gaps if
        those before them and all paused ones did, too."""
        work, pool = self._work, self.view.pool
        waits = (work.attains > 0) & (work.longest < np.inf)
        held = np.where(waits[some], pool.blocks_held(work.rows[some]), 0)
        if not held.any():
            return some
        running = work.rows[~work.starts & ~self.out]
        ends = np.maximum(self.view.table.tokens_ahead(running), 1.0) * max(self._pace, 1e-9)
        owed = int(work.new[work.paused & waits].sum())
        owed += int(pool.blocks_held(work.rows[self.out & waits]).sum())
        longest = np.where(waits[some], work.longest[some], 0.0)
        freed = np.minimum(longest[:, None] / ends, 1.0) @ pool.private(running)
        return some[(held == 0) | (owed + held.cumsum() <= self._share * freed)]

    def _return_time(self, some: np.ndarray) -> np.ndarray:
        """Seconds until the caches of these would be back: copied to the host and back if it has
        room, otherwise computed again; float64 [n]."""
        view, rows = self.view, self._work.rows[some]
        tokens, kinds = view.table.computed[rows], view.pool.kind[rows]
        again = view.refill_time(tokens)
        if not (self._swaps and view.host.capacity):
            return np.array(again)
        room = view.host.slots_for(tokens, kinds).cumsum() <= view.host.num_free
        return np.where(room, np.minimum(again, view.swap_time(tokens, kinds)), again)

    def operations(self) -> tuple[Operation, ...]:
        """Checkpoints of caches that are copied to the host and back faster than computed again, as
        far as there is room, and the preemptions."""
        if not self.preempted:
            return ()
        view, rows = self.view, np.array(self.preempted, np.int64)
        found: list[Operation] = []
        if self._swaps and view.host.capacity:
            tokens, kinds = view.table.computed[rows], view.pool.kind[rows]
            saved = (tokens > 0) & (view.host.tokens[rows] == 0) & ~view.pool.sharing(rows)
            saved &= view.swap_time(tokens, kinds) < view.refill_time(tokens)
            slots = np.where(saved, view.host.slots_for(tokens, kinds), 0)
            saved &= np.cumsum(slots) <= view.host.num_free
            if saved.any():
                found.append(Checkpoint(rows[saved], np.zeros_like(rows[saved]), tokens[saved]))
        return (*found, Preempt.whole(rows))

    def _pausable(self) -> np.ndarray:
        """Requests that hold a cache and are not paused yet, those whose next late token costs
        least first."""
        if self._left is None:
            some = np.flatnonzero(~self._work.starts & ~self._kept)
            held = self.view.pool.private(self._work.rows[some])
            hopeful, asks = self._work.attains[some] > 0, ~self._work.bare[some]
            self._left = some[np.lexsort((-held, hopeful, asks, self._work.loss[some]))]
        return self._left

    def _pause(self, some: np.ndarray) -> None:
        self.out[some] = True
        left = self._pausable()
        self._left = left[~self.out[left]]
        self.free += self._batch.drop(some)
        rows = self._work.rows[some]
        for row, gives in zip(rows.tolist(), self.view.pool.private(rows).tolist(), strict=True):
            self.preempt(row, gives)
