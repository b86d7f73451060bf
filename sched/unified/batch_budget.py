"""What is in the batch being planned, and what still fits.

Counts only; `Scheduler` changes the pool itself once the plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.parallel_arrays import ParallelArrays
from jaxserve.sched.plan import BatchPlan, Operation, Preempt
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.unified.batch_builder import PlannedWork

_NOTHING = np.zeros(0, np.int64)


class MemoryBudget:
    """Memory left for a plan that is being made. The pool itself changes when the plan is booked.

    Attributes:
        free: Free blocks.
        slots: Number of further requests that may start to hold a cache.
        preempted: Rows that the plan preempts, in order.
    """

    def __init__(self, view: View, max_rows: int | None = None) -> None:
        """max_rows: most requests that hold a cache, if it is not the view's limit."""
        self.view = view
        most = view.limits.max_rows if max_rows is None else max_rows
        self.free = view.pool.num_free
        self.slots = max(most - len(view.table.in_state(RUNNING)), 0)
        self.preempted: list[int] = []

    def allocate(self, work: PlannedWork) -> None:
        """Takes the blocks and slots for this work."""
        self.free -= int(work.new.sum())
        self.slots -= int(np.count_nonzero(work.starts))

    def preempt(self, row: int, gives: int | None = None) -> None:
        """Preempts the row, which must not be in the batch. gives: the blocks that it frees, if
        known. Blocks shared by two preempted rows are not counted."""
        self.free += int(self.view.pool.private(row)) if gives is None else gives
        self.slots += 1
        self.preempted.append(row)

    def is_out(self, rows: np.ndarray) -> np.ndarray:
        """Which rows are preempted by this plan, in whole or in part, bool [n]."""
        return np.isin(rows, self.preempted) if self.preempted else np.zeros(len(rows), bool)

    def preemptions(self) -> tuple[Operation, ...]:
        """The operations on caches before the step."""
        if not self.preempted:
            return ()
        return (Preempt.whole(np.array(self.preempted, np.int64)),)


@dataclass(frozen=True)
class Expected:
    """Memory that requests are expected to need.

    Attributes:
        peak: Maps rows to the cache tokens that each is expected to end with, int64 [n].
        of_running: Whether a start must leave free the blocks that running requests are expected to
        need.
    """

    peak: Callable[[np.ndarray], np.ndarray]
    of_running: bool = False


@dataclass
class Candidates(ParallelArrays):
    """Requests that may join the batch, most urgent first: parallel arrays [n].

    Attributes:
        rows: Table rows.
        tokens: Tokens to compute now.
        reserve: Cache tokens to have room for.
        kinds: `CacheKind` of each.
        prefill: bool, whether P applies.
        new: Free blocks that each takes; None until `BatchBudget.new_blocks` was called.
    """

    rows: np.ndarray
    tokens: np.ndarray
    reserve: np.ndarray
    kinds: np.ndarray
    prefill: np.ndarray
    new: np.ndarray | None = None


class BatchBudget(MemoryBudget):
    """A batch being built, checked by InferMax's CanAllocate (section 3.1): C, P, M and rows.

    Args:
        view: What the policy sees.
        max_rows: The policy's own limit, at most the view's; None for the view's.
        prefill_tokens: The policy's own P, at most C; None for the view's.
        expected: If not None, a start needs room for its expected peak.

    Attributes:
        batch_left: Tokens left of C.
        prefill_left: Tokens left of P.
        rows_left: Requests that may still join the batch.
        chosen: Requests in the batch, in order.
        decided: bool by row, whether it is in the batch or preempted for it.
    """

    def __init__(
        self,
        view: View,
        *,
        max_rows: int | None = None,
        prefill_tokens: int | None = None,
        expected: Expected | None = None,
    ) -> None:
        super().__init__(view, max_rows)
        limits = view.limits
        prefill = limits.max_prefill_tokens if prefill_tokens is None else prefill_tokens
        running = view.table.in_state(RUNNING)
        self.batch_left = limits.max_batch_tokens
        self.prefill_left = prefill
        self.rows_left = limits.max_rows if max_rows is None else max_rows
        self.chosen: list[Candidates] = []
        # By row: in the batch, or preempted for it. Neither may be preempted (again).
        self.decided = np.zeros(view.table.capacity, bool)
        self._holders = len(running)
        self._expected = expected
        # By row: blocks that it is expected to need. Their sum over running requests.
        self._promises = expected is not None and expected.of_running
        self._growth, self._promised = _NOTHING, 0
        if self._promises:
            self._growth = np.zeros(view.table.capacity, np.int64)
            self._growth[running] = growth = self._growth_of(running)
            self._promised = int(growth.sum())

    def __len__(self) -> int:
        return sum(map(len, self.chosen))

    @property
    def alone(self) -> bool:
        """Whether no request holds a cache, so that the next one has the pool to itself."""
        return self._holders == 0

    @property
    def sums(self) -> bool:
        """Whether the memory of several requests is the sum of their needs: no growth is
        expected."""
        return self._expected is None

    def new_blocks(self, cands: Candidates) -> np.ndarray:
        """Free blocks that each candidate takes, int64 [n]."""
        if cands.new is None:
            cands.new = self.view.pool.needed(cands.rows, cands.reserve, cands.kinds)
        return cands.new

    def add(self, cands: Candidates, keep_free: int = 0) -> int:
        """Adds candidates in order as long as they fit C, P, rows, blocks and slots. Returns their
        number. keep_free: blocks that starts leave free, unless no other request holds a cache."""
        if self.add_all(cands, keep_free):
            return len(cands)
        each = OneByOne(self, cands, keep_free)
        count = 0
        while self.rows_left and each.fits_budget(count) and each.fits_memory(count):
            each.allocate_one(count)
            count += 1
        each.close()
        return count

    def add_all(self, cands: Candidates, keep_free: int = 0) -> bool:
        """Adds all candidates if their sums show that they fit, and returns whether they do.
        keep_free: see `add`."""
        rows, tokens, count = cands.rows, int(np.add.reduce(cands.tokens)), len(cands.rows)
        if tokens > self.batch_left or count > self.rows_left:
            return False
        if tokens > self.prefill_left and np.count_nonzero(cands.prefill):
            return False
        new = self.new_blocks(cands)
        total = int(np.add.reduce(new))
        starting = int(np.count_nonzero(self.view.table.state[rows] == WAITING))
        if starting and (starting > self.slots or self._expected is not None):
            return False
        if total + (keep_free if starting else 0) > self.free:
            return False
        self.batch_left -= tokens
        self.prefill_left -= tokens
        self.rows_left -= count
        self.slots -= starting
        self._holders += starting
        self.free -= total
        if self._promises:
            growth = self._growth[rows]
            self._promised += int((np.maximum(growth - new, 0) - growth).sum())
        if count:
            self.decided[rows] = True
            self.chosen.append(cands)
        return True

    def preempt(self, row: int, gives: int | None = None) -> None:
        """As `MemoryBudget.preempt`."""
        super().preempt(row, gives)
        self._holders -= 1
        if self._promises:
            self._promised -= int(self._growth[row])
        self.decided[row] = True

    def finish(self) -> BatchPlan:
        """The plan."""
        operations = self.preemptions()
        if not self.chosen:
            return BatchPlan(operations=operations)
        parts = [(c.rows, c.tokens, c.reserve, c.kinds) for c in self.chosen]
        rows, tokens, reserve, kinds = (
            parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        )
        return BatchPlan(rows, tokens, reserve, kinds, operations)

    def _growth_of(self, rows: np.ndarray) -> np.ndarray:
        """Free blocks that each is expected to need, [n]."""
        assert self._expected is not None
        return self.view.pool.needed(rows, self._expected.peak(rows), self.view.pool.kind[rows])


# The place of a request in the ranking, the blocks that it lacks, and whether it lacks a slot, to
# the blocks and slots that preempted requests have freed for it, and the place from which on nobody
# starts any more; None if they do not free enough.
MakesRoom = Callable[[int, int, bool], tuple[int, int, int] | None]


class OneByOne:
    """Candidates that join the batch one by one. They are kept as Python numbers, since array
    operations on single ones would take longer than the work itself.

    Args:
        budget: The batch.
        cands: The candidates [n].
        keep_free: See `BatchBudget.add`.

    Attributes:
        rows, tokens, prefill, new: See `Candidates`.
        starts: Which candidates hold no cache yet.
    """

    def __init__(self, budget: BatchBudget, cands: Candidates, keep_free: int) -> None:
        self._budget, self._cands, self._keep_free = budget, cands, keep_free
        new = budget.new_blocks(cands)
        self.rows, self.tokens = cands.rows.tolist(), cands.tokens.tolist()
        self.prefill, self.new = cands.prefill.tolist(), new.tolist()
        self.starts = (budget.view.table.state[cands.rows] == WAITING).tolist()
        # Blocks that each is expected to end with, beyond those that it has.
        self._peak = self.new
        if budget._expected is not None:
            self._peak = np.maximum(budget._growth_of(cands.rows), new).tolist()
        self._taken: list[int] = []
        self._places: list[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def places(self, place: np.ndarray) -> list[int]:
        """Each candidate's place in a ranking. place: int64 by row, the same in every call."""
        if self._places is None:
            self._places = place[self._cands.rows].tolist()
        return self._places

    def fits_budget(self, i: int) -> bool:
        """Whether number i fits C and P."""
        tokens, budget = self.tokens[i], self._budget
        return tokens <= budget.batch_left and (
            not self.prefill[i] or tokens <= budget.prefill_left
        )

    def fits_memory(self, i: int) -> bool:
        """Whether number i finds its blocks and a slot."""
        budget, new = self._budget, self.new[i]
        if not self.starts[i]:
            return bool(new <= budget.free)
        if new > budget.free or not budget.slots:
            return False
        promised = budget._promised if budget._promises else 0
        return budget.alone or promised + self._peak[i] <= budget.free - self._keep_free

    def allocate_one(self, i: int) -> None:
        """Adds number i, which must fit, to the batch."""
        budget, tokens, new = self._budget, self.tokens[i], self.new[i]
        budget.batch_left -= tokens
        budget.prefill_left -= tokens
        budget.rows_left -= 1
        budget.free -= new
        if self.starts[i]:
            budget.slots -= 1
            budget._holders += 1
            if budget._promises:
                budget._promised += self._peak[i] - new
        elif budget._promises:
            budget._promised -= min(new, int(budget._growth[self.rows[i]]))
        budget.decided[self.rows[i]] = True
        self._taken.append(i)

    def take_run(self, which: list[int]) -> int:
        """Adds running candidates in order, up to the first that does not fit, waits, or was
        preempted. Returns how many."""
        budget, promises = self._budget, self._budget._promises
        rows, tokens, prefill, new, starts = (
            self.rows, self.tokens, self.prefill, self.new, self.starts
        )  # fmt: skip
        batch, prefills, free = budget.batch_left, budget.prefill_left, budget.free
        gone = budget.decided if budget.preempted else None
        count = 0
        for i in which[: budget.rows_left]:
            if starts[i] or new[i] > free or tokens[i] > batch:
                break
            if (prefill[i] and tokens[i] > prefills) or (gone is not None and gone[rows[i]]):
                break
            batch, prefills, free = batch - tokens[i], prefills - tokens[i], free - new[i]
            if promises:
                budget._promised -= min(new[i], int(budget._growth[rows[i]]))
            count += 1
        if count:
            self._taken += which[:count]
            budget.decided[[rows[i] for i in which[:count]]] = True
            budget.batch_left, budget.prefill_left, budget.free = batch, prefills, free
            budget.rows_left -= count
        return count

    def take_starts(
        self, which: list[int], places: list[int] | None, last: int, room: MakesRoom | None
    ) -> int:
        """Adds waiting candidates in order, up to the first that does not fit. Only for budgets
        that `sums`.

        Args:
            which: Their numbers, in order.
            places: Places [n] of all candidates in the ranking; None if not needed.
            last: Candidates at this place or behind it are passed over.
            room: Preempts others for a candidate; None if nobody is preempted.

        Returns:
            How many of `which` were added or passed over.
        """
        budget, keep, decided = self._budget, self._keep_free, self._budget.decided
        rows, tokens, prefill, new = self.rows, self.tokens, self.prefill, self.new
        batch, prefills, free = budget.batch_left, budget.prefill_left, budget.free
        slots, holders, left = budget.slots, budget._holders, budget.rows_left
        passed, starts, taken = 0, self.starts, []
        for i in which:
            if not (left and starts[i]):
                break
            if places is None or places[i] < last:
                if tokens[i] > batch or (prefill[i] and tokens[i] > prefills):
                    break
                short = new[i] - free + (keep if holders else 0)
                if short > 0 or slots <= 0:
                    made = room and places and room(places[i], short, slots <= 0)
                    if not made:
                        break
                    free, slots, holders = free + made[0], slots + made[1], holders - made[1]
                    last = made[2]
                batch, prefills, free = batch - tokens[i], prefills - tokens[i], free - new[i]
                slots, holders, left = slots - 1, holders + 1, left - 1
                taken.append(i)
            passed += 1
        if taken:
            self._taken += taken
            decided[[rows[i] for i in taken]] = True
        budget.batch_left, budget.prefill_left, budget.free = batch, prefills, free
        budget.slots, budget._holders, budget.rows_left = slots, holders, left
        return passed

    def close(self) -> None:
        """Puts the candidates added so far into the plan; more may follow."""
        if self._taken:
            self._budget.chosen.append(self._cands[np.array(self._taken)])
            self._taken = []
