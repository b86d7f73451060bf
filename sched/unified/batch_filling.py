"""InferMax Algorithm 1, steps 3 and 4 (section 3.1): adds requests to a batch in order, as far as
they fit, and preempts others of lower priority for them.

As long as all fit, that takes a few sums over arrays; from the first that does not fit on, they are
considered one by one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING, WAITING, RequestTable
from jaxserve.sched.unified.batch_budget import BatchBudget, Candidates, OneByOne
from jaxserve.sched.unified.ranking import Ranking
from jaxserve.sched.unified.victims import Victims

FIRST_LOOK, LOOK_GROWTH = 64, 8
NEVER = np.iinfo(np.int64).max


class FillsBatches(Protocol):
    """What a policy says of its batches; `UnifiedPolicy` has each of these."""

    @property
    def watermark(self) -> float:
        """See there."""

    @property
    def probing(self) -> bool:
        """See there."""

    def candidates(self, view: View, rows: np.ndarray) -> Candidates:
        """See there."""

    def cut(self, budget: BatchBudget, head: Candidates) -> Candidates | None:
        """See there."""


class Filling:
    """Fills a batch with candidates of a policy, and preempts for them.

    Args:
        policy: Says what each request would compute.
        budget: The batch in the making.
        ranking: The order of requests.
        cuts_room: Whether a prefill that is cut also reserves less memory.
    """

    def __init__(
        self, policy: FillsBatches, budget: BatchBudget, ranking: Ranking, *, cuts_room: bool
    ) -> None:
        self.policy, self.budget, self.ranking = policy, budget, ranking
        self._cuts_room = cuts_room
        self._table: RequestTable = budget.view.table
        self._watermark = int(policy.watermark * budget.view.pool.num_blocks)
        # Whoever is preempted waits again, at its place in the queue: those behind it start later.
        self._last_start = NEVER
        self._prefills = True  # C and P leave something
        self._victims = Victims(budget, ranking)

    @property
    def takes_prefills(self) -> bool:
        """Whether C and P leave something for a prefill."""
        return self._prefills and self.budget.prefill_left > 0

    def fill(self, rows: np.ndarray, preempts: bool) -> None:
        """Adds rows in order, as far as they fit. A long queue is looked at only as far as may
        matter. preempts: whether those that lack memory preempt others."""
        first, size = 0, FIRST_LOOK
        if len(rows) and self._table.state[rows[0]] == RUNNING:
            size += len(self.ranking.running)
        while first < len(rows) and self.budget.rows_left and self.budget.batch_left:
            part = rows[first : first + size]
            part = part[self._may_join(part)]
            self._fill(self.policy.candidates(self.budget.view, part), preempts)
            first, size = first + size, size * LOOK_GROWTH
            if first < len(rows) and not (self._prefills and self._last_start >= 0):
                rows, first = rows[first:], 0  # nobody who waits may join any more
                rows = rows[self._table.state[rows] == RUNNING]

    def _may_join(self, rows: np.ndarray) -> np.ndarray | slice:
        """Mask of those that are not ruled out by what has happened in this plan."""
        if self._prefills and self._last_start == NEVER and not self.budget.preempted:
            return slice(None)
        ok = ~self.budget.decided[rows]
        waiting = self._table.state[rows] == WAITING
        if not self._prefills:
            return ok & ~waiting & self._table.decoding(rows)
        return ok & (~waiting | (self.ranking.place[rows] < self._last_start))

    def _fill(self, cands: Candidates, preempts: bool) -> None:
        budget = self.budget
        if budget.add_all(cands, self._watermark):
            return
        each = OneByOne(budget, cands, self._watermark)
        rest, at = list(range(len(each))), 0
        while at < len(rest) and budget.rows_left:
            i = rest[at]
            if each.starts[i]:
                passed = self._start_run(each, rest[at:], preempts)
            else:
                passed = each.take_run(rest[at:])
            if passed:
                at += passed
            elif budget.preempted and self._is_out(each, i):
                at += 1
            elif each.fits_budget(i):
                if each.fits_memory(i):
                    each.allocate_one(i)
                    at += 1
                elif not (preempts and self._make_room(each, i)):
                    rest, at = self._without_head(each, rest[at:], preempts), 0
            elif not each.prefill[i]:
                break  # not a token is left
            else:
                each.close()
                rest, at = self._cut(each, cands, rest[at:], preempts), 0
        each.close()

    def _start_run(self, each: OneByOne, which: list[int], preempts: bool) -> int:
        """Those of `OneByOne.take_starts`, with room made for them."""
        if not self.budget.sums:
            return 0
        last, room = NEVER, self._displace if preempts else None
        if self.budget.preempted:
            last = self._last_start
        places = None if room is None and last == NEVER else each.places(self.ranking.place)
        return each.take_starts(which, places, last, room)

    def _displace(self, place: int, blocks: int, slot: bool) -> tuple[int, int, int] | None:
        """Preempts as many requests as free so many blocks, and a slot if one is wanted, for the
        request at that place. Returns the blocks and slots that they free, and the place from which
        on nothing starts now. None, and none are preempted, if all would not be enough."""
        victims = self._victims.giving(place, blocks, slot=slot)
        if not victims:
            return None
        blocks, decided = 0, self.budget.decided
        for row, _, gives in victims:
            blocks += gives
            self.budget.preempted.append(row)
            decided[row] = True
        self._stop_starts(victims[-1][1])
        return blocks, len(victims), self._last_start

    def _stop_starts(self, place: int) -> None:
        """A preempted request waits again, at that place: only those before it may start."""
        if not self.policy.probing:
            self._last_start = min(self._last_start, place)

    def _is_out(self, each: OneByOne, i: int) -> bool:
        """Whether number i was preempted, or waits behind a preempted request."""
        row = each.rows[i]
        if each.starts[i]:
            return each.places(self.ranking.place)[i] >= self._last_start
        return bool(self.budget.decided[row])

    def _cut(self, each: OneByOne, cands: Candidates, rest: list[int], preempts: bool) -> list[int]:
        """Adds what C and P leave of the first of the rest, a prefill. Returns those that may still
        join."""
        cut = self.policy.cut(self.budget, cands[rest[0] : rest[0] + 1])
        if cut is None:
            room = min(self.budget.batch_left, self.budget.prefill_left)
            if self.policy.probing and room > 0:
                return [j for j in rest if not each.prefill[j] or each.tokens[j] <= room]
        elif not self._joins(cut, preempts):
            return self._without_head(each, rest, preempts)
        self._prefills = False
        running = [j for j in rest if not each.starts[j]]
        if not running:
            return running
        decoding = self._table.decoding(cands.rows[running])
        return [j for j, decodes in zip(running, decoding.tolist(), strict=True) if decodes]

    def _joins(self, cut: Candidates, preempts: bool) -> bool:
        """Adds a prefill that was cut to what C and P leave, if there is memory for it."""
        one = OneByOne(self.budget, cut, self._watermark)
        while not one.fits_memory(0):
            if not (preempts and self._make_room(one, 0)) or self.budget.decided[one.rows[0]]:
                return False
        one.allocate_one(0)
        one.close()
        return True

    def _without_head(self, each: OneByOne, rest: list[int], preempts: bool) -> list[int]:
        """Those that may join when the first of the rest found no memory, or no slot."""
        budget, (head, *rest) = self.budget, rest
        waits = each.starts[head]
        if waits and not self.policy.probing:
            self._last_start = -1
            return [j for j in rest if not each.starts[j]]
        if self._cuts_room:
            return rest  # cut, any of them may take less
        if not waits:
            return [j for j in rest if each.starts[j] or each.new[j] <= budget.free]
        free, slots = budget.free, budget.slots
        if preempts:
            victims = list(self._victims.behind(each.places(self.ranking.place)[head]))
            free += sum(gives for _, _, gives in victims)
            slots += len(victims)
        free -= 0 if budget.alone else self._watermark
        return [j for j in rest if not each.starts[j] or (slots > 0 and each.new[j] <= free)]

    def _make_room(self, each: OneByOne, i: int) -> bool:
        """Preempts running requests of lower priority that are not in the batch, the lowest first,
        until number i fits; one that runs may be the last of them. Whether any was preempted."""
        budget, row, place = self.budget, each.rows[i], each.places(self.ranking.place)[i]
        if each.starts[i]:
            blocks = each.new[i] + (0 if budget.alone else self._watermark) - budget.free
            if self._victims.giving(place, blocks, slot=budget.slots <= 0) is None:
                return False
        before = len(budget.preempted)
        for victim, its, gives in self._victims.behind(place):
            budget.preempt(victim, gives)
            self._stop_starts(its)
            if victim == row or each.fits_memory(i):
                break
        return len(budget.preempted) > before
