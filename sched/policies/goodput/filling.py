"""Fills a batch: decodes, prompts that will be in time, and with what is left everybody else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES
from jaxserve.sched.cache.cache_kinds import HIDDEN, KV
from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policies.goodput.batch import Batch, Work
from jaxserve.sched.policies.goodput.feasibility import in_time
from jaxserve.sched.policies.goodput.pausing import AT_ANY_LOSS, FREE_OF_LOSS, Memory
from jaxserve.sched.policy import View

NOT_AT_ALL = -1.0  # what those who are paused may lose: nobody is paused
SHORT = 0.9  # share of the pool in use from which memory is short
ROOMY = 0.7  # share of the pool and of the rows in use up to which decodes may be put off
SPARE_TO_START, SPARE_TO_RETURN = 0.05, 0.2  # shares that stay free of the late, and the paused
LAST_CALL = 1.0  # seconds before its longest gap from which a paused request is urgent
PROMPTS = 0.1  # least share of a step for prompts: else their cost would have no bound
MOST_LATE = 32  # late and paused requests that a plan tries to start


class Filling:
    """Fills one batch.

    Args:
        view: What the policy sees.
        batch: The batch, empty at first.
        memory: Its memory.
        clock: When it begins, seconds.
        headroom: The longest that those who are late may make it, seconds, so that who comes next
            can be in time, where the decodes alone do not make it longer.
    """

    def __init__(
        self, view: View, batch: Batch, memory: Memory, clock: float, headroom: float
    ) -> None:
        self._view, self._batch, self._memory = view, batch, memory
        self._clock, self._headroom = clock, headroom
        self._limit = np.inf  # the longest that the batch may take, seconds
        self._kind = KV
        self._starved = False  # whether a start has found no memory
        self._first = np.zeros(0, np.int64)  # rows that come before all others

    def choose_kind(self, running: Work, above: float) -> None:
        """Those who start get hidden caches, half as large, where the pool is expected to fill.

        Args:
            running: All that hold cache; half of what they are expected to write yet counts.
            above: Share of the pool in use from which on they do.
        """
        pool = self._view.pool
        ahead = self._view.table.tokens_ahead(running.rows) / 2
        growth = float((ahead * PLANES[running.kinds]).sum()) / pool.block_size
        fills = above < 1 and pool.num_used + growth > above * pool.num_blocks
        if fills and self._view.rho is not None:
            self._kind = HIDDEN

    def fill(self, work: Work, first: np.ndarray, starved: np.ndarray) -> None:
        """Fills it.

        Args:
            work: All requests.
            first: Rows that come before all others, in order, int64 [k].
            starved: Those of them for which time is made, int64 [m].
        """
        running = work.decodes & ~work.starts
        self._first = first
        decodes = self._find_blocks(work[running])
        others = work[~running & ~self._memory.is_out(work.rows)]
        early = np.isin(others.rows, first)
        patient, others = others[early], others[~early]
        chosen, decodes = self._choose(others, decodes)
        self._take(decodes)
        base = self._batch.seconds
        self._limit = self._least_slack(decodes, base)
        patient = patient[np.argsort(self._view.table.seq[patient.rows])]
        self._add_all(patient, AT_ANY_LOSS)
        self._make_time(patient[np.isin(patient.rows, starved)])
        self._add_all(others[chosen], FREE_OF_LOSS)
        rest = np.ones(len(others), bool)
        rest[chosen] = False
        if base < self._headroom:
            self._limit = min(self._limit, self._headroom)
        self._fill_up(others[rest])
        if not self._batch.parts:
            self._do_something(work)

    def _find_blocks(self, decodes: Work) -> Work:
        """The decodes that find blocks, once those who lose least are paused as needed."""
        order = np.argsort(-decodes.loss, kind="stable")
        decodes = decodes[order[: self._view.limits.max_batch_tokens]]
        while int(decodes.new.sum()) > self._memory.free and self._memory.pause_one():
            decodes = decodes[~self._memory.is_out(decodes.rows)]
        return decodes[np.cumsum(decodes.new) <= self._memory.free]

    def _choose(self, others: Work, decodes: Work) -> tuple[np.ndarray, Work]:
        """Which of the others come first, in order, so that most are in time; and the decodes
        beside them: all, or where that saves somebody and there is room for many more requests,
        only those that cannot wait for another step, or have waited for too long."""
        slack = others.due - self._clock
        last_call = others.gap_due - self._clock
        slack = np.where((slack <= 0) & (last_call < LAST_CALL), last_call, slack)
        some = np.flatnonzero((slack > 0) & (slack < np.inf) & (others.attains > 0))
        if not len(some):
            return some, decodes
        jobs, slack, nothing = others[some], slack[some], others[:0]
        full = Batch(self._view, nothing, decodes)
        chosen = self._in_time(jobs, slack, full, decodes)
        if len(decodes) and len(chosen) < len(jobs) and self._roomy(len(decodes)):
            soon = float(Batch(self._view, nothing).with_each(jobs).min()) + full.seconds
            waits = (decodes.due - self._clock > soon) & ~np.isin(decodes.rows, self._first)
            urgent = decodes[~waits]
            saved = self._in_time(jobs, slack, Batch(self._view, nothing, urgent), urgent)
            more = jobs.attains[saved].sum() > jobs.attains[chosen].sum()
            if more and (full.times(jobs[saved]) > slack[saved]).any():
                return some[saved], urgent
        return some[chosen], decodes

    def _in_time(self, jobs: Work, slack: np.ndarray, batch: Batch, decodes: Work) -> np.ndarray:
        """Which jobs come first beside these decodes, so that most are in time. A job costs what it
        adds to the batch, and its share of further steps where the decodes limit their length."""
        base, end = batch.seconds, batch.with_each(jobs)
        cost = np.maximum(end - base, 1e-9)
        limit = self._least_slack(decodes, base)
        if limit < np.inf:
            cost = cost * (limit / max(limit - base, PROMPTS * limit))
        able = np.flatnonzero(end <= slack)
        return able[in_time(slack[able], cost[able], jobs.attains[able], base)]

    def _roomy(self, decodes: int) -> bool:
        pool, rows = self._view.pool, self._view.limits.max_rows
        return decodes < ROOMY * rows and pool.num_used < ROOMY * pool.num_blocks

    def _least_slack(self, decodes: Work, base: float) -> float:
        """The longest step, in seconds, after which all of these decodes are in time that would be
        after one of `base` seconds."""
        slack = decodes.due - self._clock
        able = (slack >= base) & (decodes.attains > 0)
        return float(slack[able].min(initial=np.inf))

    def _add_all(self, work: Work, most: float) -> bool:
        """Adds requests in order, the last one cut to what there is time for. Those that find no
        memory are passed over.

        Args:
            work: The requests.
            most: What those may lose in all that are paused for some of them. Nobody is paused for
                one that was paused itself, unless they may lose anything.

        Returns:
            Whether there is room for another one behind them.
        """
        memory, work = self._memory, work[~self._memory.is_out(work.rows)]
        work = work.with_kind(self._view, self._kind)
        while len(work):
            timely, times = self._timely(work)
            fits = np.cumsum(work.new) + work.spare <= memory.free
            fits &= np.cumsum(work.starts) <= memory.slots
            count = prefix(fits[:timely])
            if count:
                bounds = self._bounds(work[:count], times[:count])
                self._limit = min(self._limit, float(bounds.min()))
                self._take(work[:count])
                work = work[count:]
                continue
            part = self._part(work[:1])
            if not part or (fits[0] and len(self._batch) >= self._view.limits.max_rows):
                return False
            asks = work[: max(timely, 1)]
            if most < AT_ANY_LOSS:
                asks = asks[: prefix(~asks.paused)]
            if not fits[0] and len(asks) and most >= 0 and memory.make_room(asks, most):
                work = work[~memory.is_out(work.rows)]
            elif not fits[0]:
                self._starved = True
                small = (work.new + work.spare <= memory.free) & (work.starts <= memory.slots)
                work = work[small if len(asks) else slice(1, None)]
            else:
                self._take(work[:1].cut(part))
                if part < work.tokens[0]:
                    return False
                work = work[1:]
        return True

    def _timely(self, work: Work) -> tuple[int, np.ndarray]:
        """How many of them, in order, there is time for, and seconds of the batch with each of
        them and those before it, float64 [n]."""
        limits, batch = self._view.limits, self._batch
        times = batch.times(work)
        limit = np.minimum.accumulate(np.append(self._limit, self._bounds(work, times)))
        ok = times <= limit[:-1]
        ok &= np.cumsum(work.tokens) <= limits.max_batch_tokens - batch.tokens
        ok &= np.arange(1, len(work) + 1) <= limits.max_rows - len(batch)
        return prefix(ok), times

    def _bounds(self, work: Work, times: np.ndarray) -> np.ndarray:
        """How long the batch may be for each of them, whose last one's end is at these times, if it
        is in time, float64 [n]; inf if it is late all the same."""
        due = work.due - self._clock
        return np.where((work.attains > 0) & (times <= due), due, np.inf)

    def _part(self, one: Work) -> int:
        """How many tokens of a request there is time for. Where memory is short, a part of a prompt
        would only hold it: all or none, unless no other prompt is in the batch."""
        batch, want = self._batch, int(one.tokens[0])
        most = min(want, self._view.limits.max_batch_tokens - batch.tokens)
        tokens = batch.longest(one, self._limit, most)
        return 0 if tokens < want and self._short and batch.tokens > len(batch) else tokens

    @property
    def _short(self) -> bool:
        return self._view.pool.num_used > SHORT * self._view.pool.num_blocks

    def _fill_up(self, rest: Work) -> None:
        """Everybody else: those who hold memory, and if nobody lacks it, who was paused, and who is
        late."""
        holding, waiting = rest[~rest.starts], rest[rest.starts]
        holding = holding[np.lexsort((holding.due, -holding.attains))]
        if not self._add_all(holding, FREE_OF_LOSS) or self._starved or self._memory.preempted:
            return
        order = np.lexsort((self._view.table.seq[waiting.rows], waiting.attains <= 0))
        waiting = waiting[order[:MOST_LATE]]
        share = np.where(waiting.paused, SPARE_TO_RETURN, SPARE_TO_START)
        spare = (share * self._view.pool.num_blocks).astype(np.int64)
        self._add_all(replace(waiting, spare=spare), NOT_AT_ALL)

    def _make_time(self, starved: Work) -> None:
        """Adds the first of these for whom there was no time: so much of it that the step takes
        twice as long as with one token. Decodes that are in time one by one could otherwise keep it
        out for ever, if it has much to read."""
        one = starved[~np.isin(starved.rows, self._batch.work().rows)][:1]
        if len(one):
            limit = self._limit
            self._limit = 2 * float(self._batch.with_each(one.cut(1))[0])
            self._add_all(one, AT_ANY_LOSS)
            self._limit = limit

    def _do_something(self, work: Work) -> None:
        """Adds the first that can go on, however long it takes and whoever is paused for it."""
        self._limit = np.inf
        for one in _each(work[np.lexsort((self._view.table.seq[work.rows], work.starts))]):
            self._add_all(one, AT_ANY_LOSS)
            if self._batch.parts:
                return

    def _take(self, work: Work) -> None:
        self._memory.allocate(work)
        self._batch.add(work)


def _each(work: Work) -> list[Work]:
    """One by one."""
    return [work[i : i + 1] for i in range(len(work))]
