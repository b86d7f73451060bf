"""Fills a batch: decodes, prompts that will be in time, and the others with what is left."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policies.goodput.batch import GoodputBatch, GoodputWork
from jaxserve.sched.policies.goodput.feasibility import in_time
from jaxserve.sched.policies.goodput.pausing import AT_ANY_LOSS, FREE_OF_LOSS, Memory
from jaxserve.sched.policies.goodput.prices import Prices
from jaxserve.sched.policy import View

NOT_AT_ALL = -1.0  # loss that paused requests may cause: no request is paused
# Points are points of attainment lost with the constant at its extremes, over the league's
# workloads on both systems at 1.5 and 2.5 times saturation.
SHORT = 0.9
"""Share of the pool in use from which memory is short. To cut prompts all the same costs half a
point there, two with long prompts."""
ROOMY = 0.7
"""Share of the pool and of the rows in use up to which decodes may be put off. Never costs 0.4
points; always costs 0.6, since steps without them let caches be held for longer."""
SPARE = 0.05
"""Share of the pool that stays free of the late and the paused. With none ten points are lost where
prompts are very long."""
LAST_CALL = 0.5
"""Part of its longest gap that is left when a paused request gets urgent, and freed memory is kept
for it. Urgent a second before its end, and with nothing kept, 9 points fewer keep their longest
gaps where prompts are very long (`bookcorpus` at saturation on Llama-3-70B)."""
STEPS = 3.0  # steps before a first token: in flight, planned already, and its own
PROMPTS = 0.1  # least share of a step for prompts: otherwise their cost would be unbounded
MANY = 32  # requests for which it is checked first whether there is time for any
MOST_LATE = 32  # most late and paused requests that a plan tries to start


class GoodputFilling:
    """Fills one batch. Requests are indices of `work`.

    Args:
        view: What the policy sees.
        work: All requests.
        batch: The batch, empty at first.
        memory: Its memory.
        clock: When it begins, seconds.
        headroom: Longest time to which requests that can wait may extend it, seconds, so that the
        next arrivals can be in time, unless the decodes alone take longer.
        first: bool [n], which requests come before all others.
        prices: Which prompts are worth their time.

    Attributes:
        base: Seconds of the decodes alone.
        patient: Seconds that requests that come first add.
    """

    def __init__(
        self,
        view: View,
        work: GoodputWork,
        batch: GoodputBatch,
        memory: Memory,
        clock: float,
        headroom: float,
        first: np.ndarray,
        prices: Prices,
    ) -> None:
        self._view, self._work, self._batch, self._memory = view, work, batch, memory
        self._headroom, self._first = headroom, first
        self._dear = work.starts & ~work.paused
        self._dear &= ~prices.affordable(work.rows, work.attains)
        self._overdrawn = prices.overdrawn
        self.base = self.patient = 0.0
        self._slack = work.due - clock
        self._last_call = work.gap_due - clock  # seconds that paused ones can wait; inf for others
        self._last_call[~work.paused | (self._last_call > LAST_CALL * work.longest)] = np.inf
        self._seq = view.table.seq[work.rows]
        self._limit = np.inf  # longest time of the batch, seconds
        self._starved = False  # whether a start has found no memory

    def fill(self, starved: np.ndarray) -> None:
        """Fills it. starved: bool [n], requests that come first and for which time is made."""
        work = self._work
        running = work.decodes & ~work.starts
        decodes = self._find_blocks(np.flatnonzero(running))
        late = self._hopeless(decodes)
        hopeless, decodes = decodes[late], decodes[~late]
        others = np.flatnonzero(~running & ~self._memory.out)
        early = self._first[others]
        patient, others = others[early], others[~early]
        chosen, decodes, limit = self._choose(others, decodes)
        self._take(decodes)
        base = self.base = self._batch.seconds
        self._limit = min(limit, self._least_slack(decodes, base))
        if len(patient):
            patient = patient[np.argsort(self._seq[patient])]
            worn = starved[patient]
            self._add_all(patient[worn], AT_ANY_LOSS)
            self._add_all(patient[~worn], FREE_OF_LOSS)
            self._make_time(patient[worn])
            self.patient = self._batch.seconds - base
        some = others[chosen]
        can_wait = (self._slack[some] > STEPS * self._headroom) & (base < self._headroom)
        self._add_all(some[~can_wait], FREE_OF_LOSS)
        if can_wait.any():
            self._limit = min(self._limit, self._headroom)
            self._add_all(some[can_wait], FREE_OF_LOSS)
        rest = np.ones(len(others), bool)
        rest[chosen] = False
        if not len(decodes):
            base = GoodputBatch(self._view, work, hopeless).seconds
        if base < self._headroom:
            self._limit = min(self._limit, self._headroom)
        self._add_all(hopeless, NOT_AT_ALL)
        if self._overdrawn and len(decodes):  # whose time it would be
            rest &= ~self._dear[others]
        self._fill_up(others[rest])
        if not self._batch.parts:
            self._do_something()

    def _hopeless(self, decodes: np.ndarray) -> np.ndarray:
        """Which of these decodes cannot attain their targets, bool [n]. They continue with what is
        left of the step, since they would make it longer for those that can."""
        return self._work.missed[decodes] & ~self._first[decodes]

    def _find_blocks(self, decodes: np.ndarray) -> np.ndarray:
        """The decodes that find blocks, after those with the least loss were paused as needed."""
        work, memory = self._work, self._memory
        order = np.argsort(-work.loss[decodes], kind="stable")
        decodes = decodes[order[: self._view.limits.max_batch_tokens]]
        if int(work.new[decodes].sum()) <= memory.free:
            return decodes
        memory.pause_for(decodes)
        decodes = decodes[~memory.out[decodes]]
        return decodes[work.new[decodes].cumsum() <= memory.free]

    def _choose(
        self, others: np.ndarray, decodes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Which of the others come first, in order, so that most are in time; the decodes beside
        them: all, or if that saves a request and there is room for many more, only those that
        cannot wait for another step, or have waited for too long; and how long the step may be for
        the waiting ones, seconds."""
        work, view = self._work, self._view
        slack, last_call = self._slack[others], self._last_call[others]
        slack = np.where((slack <= 0) & (last_call < np.inf), last_call, slack)
        some = np.flatnonzero((slack > 0) & (slack < np.inf) & (work.attains[others] > 0))
        if not len(some):
            return some, decodes, np.inf
        jobs, slack = others[some], slack[some]
        full = GoodputBatch(view, work, decodes)
        chosen = self._in_time(jobs, slack, full, decodes)
        if len(decodes) and len(chosen) < len(jobs) and self._roomy(len(decodes)):
            # The next step has them all, and the prompts that end in this one decode.
            again = full.seconds * (1.0 + len(jobs) / len(decodes))
            soon = float(GoodputBatch(view, work).with_each(jobs).min()) + again
            waits = (self._slack[decodes] > soon) & ~self._first[decodes]
            urgent = decodes[~waits]
            saved = self._in_time(jobs, slack, GoodputBatch(view, work, urgent), urgent)
            more = work.attains[jobs[saved]].sum() > work.attains[jobs[chosen]].sum()
            if more and (full.times(jobs[saved]) > slack[saved]).any():
                left = self._slack[decodes[waits]].min(initial=np.inf) - again
                return some[saved], urgent, float(left)
        return some[chosen], decodes, np.inf

    def _in_time(
        self, jobs: np.ndarray, slack: np.ndarray, batch: GoodputBatch, decodes: np.ndarray
    ) -> np.ndarray:
        """Which jobs come first beside these decodes, so that most are in time, of those that are
        worth their time. A job costs what it adds to the batch, and its share of further steps if
        the decodes limit their length."""
        base, end = batch.seconds, batch.with_each(jobs)
        dearest = int(np.argmax(end))
        cost = np.maximum(batch.with_each(jobs, jobs[dearest : dearest + 1]) - end[dearest], 1e-9)
        begin = max(end[dearest] - cost[dearest], base)  # fixed cost of the first prompt
        limit = self._least_slack(decodes, base)
        if limit < np.inf:
            cost = cost * (limit / max(limit - base, PROMPTS * limit))
        able = np.flatnonzero(end <= slack)
        worthy = able[~self._dear[jobs[able]]]
        if len(worthy) or self._overdrawn:  # otherwise the time would be for nobody
            able = worthy
        return able[in_time(slack[able], cost[able], self._work.attains[jobs[able]], begin)]

    def _roomy(self, decodes: int) -> bool:
        pool, rows = self._view.pool, self._view.limits.max_rows
        return decodes < ROOMY * rows and pool.num_used < ROOMY * pool.num_blocks

    def _least_slack(self, decodes: np.ndarray, base: float) -> float:
        """The longest step, in seconds, after which all of these decodes are in time that would be
        after one of `base` seconds, even if it takes longer than predicted: most outputs may have
        no late gap at all, and each has many steps."""
        slack = self._slack[decodes] / self._view.device.overrun
        able = (slack >= base) & (self._work.attains[decodes] > 0)
        return float(slack[able].min(initial=np.inf))

    def _add_all(self, some: np.ndarray, most: float, spare: int = 0) -> bool:
        """Adds requests in order, the last one cut to the time that is left. Requests that find no
        memory are skipped.

        Args:
            some: The requests.
            most: Most total loss of the requests that are paused for one of them. For a request
            that was paused itself, only those without targets are paused, unless any loss is
            allowed.
            spare: Blocks that they leave free for others.

        Returns:
            Whether there is room for another request after them.
        """
        work, memory = self._work, self._memory
        some, times = some[~memory.out[some]], None
        bounds = np.zeros(0)
        while len(some):
            if times is None:  # of the batch with each request and those before it
                if len(some) > MANY and not self._begins(some[:1]):
                    return False
                times = self._batch.times(some)
                bounds = self._bounds(some, times)
            timely = self._timely(some, times, bounds)
            new, starts = work.new[some], work.starts[some]
            left = memory.free - spare
            fits = (new.cumsum() <= left) & (starts.cumsum() <= memory.slots)
            count = prefix(fits[:timely])
            if count:
                self._limit = min(self._limit, float(bounds[:count].min()))
                self._take(some[:count])
                some, times, bounds = some[count:], times[count:], bounds[count:]
                continue
            one = int(some[0])
            part = self._part(one, float(times[0]), None if fits[0] else 1)
            if not part or (fits[0] and len(self._batch) >= self._view.limits.max_rows):
                return False
            asks = some[: max(timely, 1)]
            if most < AT_ANY_LOSS:
                asks = asks[: prefix(work.paused[asks] == work.paused[one])]
            if not fits[0] and len(asks) and most >= 0 and memory.make_room(asks, most):
                some, times = some[~memory.out[some]], None
            elif not fits[0]:
                self._starved = True
                able = (new <= left) & (starts <= memory.slots)
                if work.paused[one] and 0 <= most < AT_ANY_LOSS:  # others may pause
                    able = np.logical_or.accumulate(able | ~work.paused[some])
                if most >= 0 and self._last_call[one] < np.inf and work.attains[one] > 0:
                    able &= ~starts  # what comes free is kept for this one
                some, times = some[able], None
            else:
                if part < work.tokens[one]:
                    work.cut(one, part)
                    self._take(some[:1])
                    return False
                self._take(some[:1])
                some, times, bounds = some[1:], times[1:], bounds[1:]
        return True

    def _timely(self, some: np.ndarray, times: np.ndarray, bounds: np.ndarray) -> int:
        """How many of the requests, in order, there is time for.

        Args:
            some: The requests.
            times: `Batch.times`.
            bounds: `_bounds`.
        """
        limits, batch = self._view.limits, self._batch
        ok = times <= np.minimum.accumulate(np.concatenate(((self._limit,), bounds[:-1])))
        ok &= self._work.tokens[some].cumsum() <= limits.max_batch_tokens - batch.tokens
        ok[max(limits.max_rows - len(batch), 0) :] = False
        return prefix(ok)

    def _bounds(self, some: np.ndarray, times: np.ndarray) -> np.ndarray:
        """How long the batch may take for each request, given these times of the batch at its last
        token, so that it is in time, float64 [n]; inf if it is late in any case."""
        slack = self._slack[some]
        return np.where((self._work.attains[some] > 0) & (times <= slack), slack, np.inf)

    def _part(self, one: int, whole: float, enough: int | None) -> int:
        """Tokens of a request that there is time for. If memory is short, part of a prompt would
        only occupy it: all or none, unless the batch has no other prompt.

        Args:
            one: The request.
            whole: Seconds of the batch with all of it.
            enough: A number of tokens that suffices as an answer; None to find the most.
        """
        batch, want = self._batch, int(self._work.tokens[one])
        left = self._view.limits.max_batch_tokens - batch.tokens
        if want <= left and whole <= self._limit:
            return want
        if want == 1 or (self._short and batch.tokens > len(batch)):
            return 0
        return batch.longest(one, self._limit, min(enough or want, left))

    def _begins(self, one: np.ndarray) -> bool:
        """Whether there is time for any token of this request, [1]."""
        return self._part(int(one[0]), float(self._batch.with_each(one)[0]), 1) > 0

    @property
    def _short(self) -> bool:
        return self._view.pool.num_used > SHORT * self._view.pool.num_blocks

    def _fill_up(self, rest: np.ndarray) -> None:
        """Adds the others: those that hold memory, and if none lacks memory, paused and late
        requests."""
        work, starts = self._work, self._work.starts[rest]
        holding, waiting = rest[~starts], rest[starts]
        holding = holding[np.lexsort((work.due[holding], -work.attains[holding]))]
        if not self._add_all(holding, FREE_OF_LOSS) or self._starved or self._memory.preempted:
            return
        order = np.lexsort((self._seq[waiting], work.attains[waiting] <= 0))
        spare = int(SPARE * self._view.pool.num_blocks)
        self._add_all(waiting[order[:MOST_LATE]], NOT_AT_ALL, spare)

    def _make_time(self, starved: np.ndarray) -> None:
        """Adds the first of these for which there was no time, with as many tokens as make the step
        take twice as long as with one. Otherwise decodes that are in time one by one could keep it
        out for ever, if it has much to read."""
        one = starved[~np.isin(starved, self._batch.chosen())][:1]
        if len(one):
            limit = self._limit
            self._limit = 2 * float(self._batch.with_tokens(int(one[0]), np.ones(1, np.int64))[0])
            self._add_all(one, AT_ANY_LOSS)
            self._limit = limit

    def _do_something(self) -> None:
        """Adds the first request that can continue, whatever it takes and whatever is paused for
        it."""
        self._limit = np.inf
        order = np.lexsort((self._seq, self._work.starts))
        for i in range(len(order)):
            self._add_all(order[i : i + 1], AT_ANY_LOSS)
            if self._batch.parts:
                return

    def _take(self, some: np.ndarray) -> None:
        self._memory.take(some)
        self._batch.add(some)
