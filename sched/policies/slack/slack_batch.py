"""A batch of decodes and as many prompt tokens as there is time for.

Memory is handled like Sarathi's: a prompt gets blocks for all of it when it starts, other starts
wait behind one that finds none, and decodes that lack a block preempt running requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import columns, longest, prefix
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING
from jaxserve.sched.unified.batch_budget import MemoryBudget
from jaxserve.sched.unified.batch_builder import BatchBuilder, PlannedWork, seconds_of
from jaxserve.sched.unified.making_room import givers


class Prompts:
    """Prompts that find memory, in order, of which a batch computes a number of leading tokens:
    whole prompts and part of one.

    Attributes:
        work: All pending tokens of each prompt.
        tokens: Tokens of all of them.
    """

    def __init__(self, work: PlannedWork) -> None:
        self.work = work
        self.ends = np.concatenate([[0], np.cumsum(work.tokens)])
        self.tokens = int(self.ends[-1])
        sums = work.columns()
        self._sums = np.zeros((len(sums), len(work) + 1), np.int64)
        np.cumsum(sums, axis=1, out=self._sums[:, 1:])
        self._start = np.append(work.start, 0)

    def columns(self, tokens: np.ndarray) -> np.ndarray:
        """What these numbers of leading tokens add to a batch, int64 [columns, m]. tokens: int64
        [m]."""
        whole = self.whole(tokens)
        part = tokens - self.ends[whole]
        sums = self._sums[:, whole]
        return sums + (part > 0) * columns(part, self._start[whole], np.zeros(len(part), bool))

    def whole(self, tokens: np.ndarray) -> np.ndarray:
        """How many prompts these numbers of leading tokens complete, int64 [m]."""
        return np.searchsorted(self.ends, tokens, side="right") - 1

    def first(self, tokens: int) -> PlannedWork:
        """The work of this many leading tokens."""
        count = int(np.searchsorted(self.ends, tokens))
        work, left = self.work[:count], tokens - self.ends[:count]
        return replace(work, tokens=np.minimum(work.tokens, left))


class SlackBatch(BatchBuilder[PlannedWork]):
    """Starts empty.

    Args:
        view: What the policy sees.
        watermark: Share of the pool that starts leave free while others hold cache.

    Attributes:
        room: The memory left.
        relegated: Rows of prompts that cannot be in time, whether or not the batch has them.
    """

    def __init__(self, view: View, watermark: float) -> None:
        super().__init__(view, pending(view, np.zeros(0, np.int64)))
        self.room = MemoryBudget(view)
        self.relegated = np.zeros(0, np.int64)
        self._holders = len(view.table.in_state(RUNNING))
        self._watermark = int(watermark * view.pool.num_blocks)
        self._rows = 0

    @property
    def tokens_left(self) -> int:
        """Tokens that C leaves."""
        return self.view.limits.max_batch_tokens - self.tokens

    @property
    def rows_left(self) -> int:
        """Requests that may still join."""
        return self.view.limits.max_rows - self._rows

    def make_way(self, giving: np.ndarray, asking: PlannedWork, growth: int) -> np.ndarray:
        """Preempts rows for as many asking prompts as that makes room for.

        Args:
            giving: Rows that may lose their caches, in order.
            asking: Prompts that would start, in order.
            growth: Blocks that decodes take before them.

        Returns:
            The preempted rows.
        """
        held = self.view.pool.private(giving)
        free = self.room.free - self._watermark - growth
        count = givers(asking.new, asking.starts, held, free, self.room.slots)
        gone = giving[: int(count[-1])] if len(count) else giving[:0]
        for row in gone.tolist():
            self.room.preempt(row)
        self._holders -= len(gone)
        return gone

    def decode(self, work: PlannedWork, keepers: np.ndarray) -> np.ndarray:
        """Adds decodes in order, as far as C and the rows allow, and preempts for their blocks.

        Args:
            work: The decodes.
            keepers: Rows that hold a cache, none of which is in the batch yet; the last is
                preempted first.

        Returns:
            bool [n], which decodes are in the batch.
        """
        every, work = work, work[: min(self.tokens_left, self.rows_left)]
        lacking = int(work.new.sum()) - self.room.free
        if lacking > 0:
            new = dict(zip(work.rows.tolist(), work.new.tolist(), strict=True))
            for row in keepers[::-1].tolist():
                before = self.room.free
                self.room.preempt(row)
                self._holders -= 1
                lacking -= self.room.free - before + new.get(row, 0)
                if lacking <= 0:
                    break
            work = work[~self.room.is_out(work.rows)]
        self._take(work)
        return np.isin(every.rows, work.rows)

    def admissible(self, work: PlannedWork) -> Prompts:
        """The prompts that find blocks, a place and a row, in order. After the first waiting one
        that finds none, only running ones may continue."""
        work = work[~self.room.is_out(work.rows)]
        new, starts = np.cumsum(work.new), np.cumsum(work.starts)
        alone = self._holders == 0
        free = self.room.free - self._watermark
        ok = (new <= free) & (starts <= self.room.slots)
        if alone and len(ok):
            ok[0] = new[0] <= self.room.free and self.room.slots > 0
        count = prefix(ok | ~work.starts)
        others = ~work.starts
        others[:count] = True
        work = work[others]
        return Prompts(work[: self.rows_left])

    def seconds_with(self, prompts: Prompts, tokens: np.ndarray) -> np.ndarray:
        """Seconds of the batch with these numbers of leading prompt tokens, float64 [m]. tokens:
        int64 [m]."""
        return seconds_of(self.view, self._sums + prompts.columns(tokens))

    def longest(self, prompts: Prompts, limit: float) -> int:
        """Most tokens of the prompts, within C, with which it takes no longer than `limit`
        seconds."""
        most = min(prompts.tokens, self.tokens_left)
        return longest(lambda tokens: self.seconds_with(prompts, tokens), limit, most)

    def chunk(self, prompts: Prompts, limit: float, least: int) -> int:
        """Tokens of the prompts to compute: as many as there is time for, and at least one if the
        batch would otherwise be empty.

        Args:
            prompts: At least one.
            limit: Longest time of the batch, seconds.
            least: Tokens of the batch for which there is always time.
        """
        found = self.longest(prompts, limit)
        floor = min(least - self.tokens, prompts.tokens, self.tokens_left)
        return max(found, floor, 0 if self.tokens else 1)

    def compute(self, prompts: Prompts, tokens: int) -> None:
        """Adds this many leading tokens of the prompts."""
        self._take(prompts.first(tokens))

    def plan(self) -> BatchPlan:
        """The plan; every request keeps room for all of its known tokens. Requests that cannot be
        in time and get no tokens are relegated, if they have targets and no token yet."""
        work, table = self.work(), self.view.table
        reserve = table.prompt_len[work.rows] + table.generated[work.rows]
        kinds = np.zeros(len(work), np.int64)
        lost = self.relegated[~np.isin(self.relegated, work.rows)]
        lost = lost[table.has_targets(lost) & (table.generated[lost] == 0)]
        moves = self.room.preemptions()
        return BatchPlan(work.rows, work.tokens, reserve, kinds, moves, relegated=lost)

    def _take(self, work: PlannedWork) -> None:
        self.room.allocate(work)
        self.add(work)
        self._rows += len(work)
        self._holders += int(np.count_nonzero(work.starts))


def pending(view: View, rows: np.ndarray) -> PlannedWork:
    """All pending tokens of these rows."""
    return PlannedWork.pending(view, rows, view.table.computed[rows])


def least_slack(batch: SlackBatch, slack: np.ndarray, tbt: np.ndarray) -> float:
    """How long a batch with decodes of this slack may take, seconds. A request that would be late
    even without prompts asks for no more than its TBT.

    Args:
        batch: Has the decodes, and no prompts yet.
        slack: float64 [n], slack of all decodes.
        tbt: float64 [n], their targets.
    """
    met = slack >= batch.seconds
    return float(np.where(met, slack, np.maximum(tbt, slack)).min(initial=np.inf))
