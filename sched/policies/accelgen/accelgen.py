"""AccelGen: the strictest target in a batch limits its size; the rest of it is filled by choice.

Decodes stay in the batch. Prompts that must run now to meet their targets join them, cut to the
token; then prompts in progress; then those waiting ones that best use the tokens and blocks left.
docs/accelgen-policy.md lists the differences from the paper.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.accelgen.allowance import Allowances, laxity
from jaxserve.sched.policies.accelgen.batch import AccelGenBatch, AccelGenWork
from jaxserve.sched.policies.accelgen.filling import AccelGenFilling
from jaxserve.sched.policies.accelgen.history import History, Missed
from jaxserve.sched.policies.accelgen.memory_budget import AccelGenBudget
from jaxserve.sched.policies.accelgen.pivot import Gauge, Pivot
from jaxserve.sched.policies.accelgen.remaining import Targets, chunks, left
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import register
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import RUNNING, WAITING

_FAR = 1e12  # seconds: sorts behind all requests that are not late


class Ordering(enum.Enum):
    """Who comes first."""

    SLO = "who has the least time left, T_r"
    FIFO = "who arrived first; nobody is urgent"


@register(
    "accelgen",
    summary="batches as large as their strictest target allows; least time left, then best fit",
    source="AccelGen 4",
)
@dataclass(frozen=True)
class AccelGen(Policy):
    """ttft, tbt: targets, in seconds, of real-time requests without their own (the paper's reading
    speed). long: prompts of this many tokens are long, and only one is computed at a time. gamma:
    width of the window of remaining time, in seconds, from which starts are chosen. pivot: forward
    size S_pf, tokens; None to find it. watermark: share of the pool that starts leave free while
    others run.

    late_last: whether urgent prompts that can no longer meet their targets come behind all others.
        In an overload, more requests then meet theirs, and late ones wait for its end; late_turn:
        after this many starts of others, one late prompt comes first; 0 for never. sparing: whether
        urgent requests take memory only from requests that have missed a target, or will miss none
        without their caches, instead of from those with most time left. paced: whether the time
        that a job may wait is spread evenly over its iterations, instead of being used up by the
        first ones.

    chunked, ordering, euclidean: the three parts of the design; without them prompts are whole,
        come in order of arrival, and start in that order.

    Raises ValueError for a value out of range.
    """

    ttft: float = 1.0
    tbt: float = 0.1875
    long: int = 4096
    gamma: float = 0.75
    pivot: int | None = None
    watermark: float = 0.01
    late_last: bool = True
    late_turn: int = 0
    sparing: bool = True
    paced: bool = False
    chunked: bool = True
    ordering: Ordering = Ordering.SLO
    euclidean: bool = True
    _gauge: Gauge = field(init=False, repr=False, compare=False)
    _history: History = field(init=False, repr=False, compare=False)
    _allowances: Allowances = field(init=False, repr=False, compare=False)
    _missed: Missed = field(init=False, repr=False, compare=False)
    counts_blocks = True
    full_prefill = True

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        for name in ("long", "pivot"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("gamma", "late_turn"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {self.watermark}")
        object.__setattr__(self, "_gauge", Gauge(self.pivot))
        object.__setattr__(self, "_history", History())
        object.__setattr__(self, "_allowances", Allowances())
        object.__setattr__(self, "_missed", Missed())

    def plan(self, view: View, now: float) -> BatchPlan:
        """Decodes, urgent prompts, prompts in progress, and the best fit of the others."""
        clock, pivot = now + self._history.in_flight(view), self._gauge.read(view)
        longest = self._history.longest(pivot.seconds)
        work = self._ranked(view, clock, pivot, longest)
        batch = AccelGenBatch(view)
        runs = work[~work.starts]
        room = AccelGenBudget(view, batch, runs, self.watermark)
        filling = AccelGenFilling(batch, room, pivot, chunked=self.chunked)
        decodes, prompts = runs[runs.decodes], work[work.starts | ~work.decodes]
        if len(decodes):
            filling.retain(_in_reach(AccelGenBatch(view), decodes, decodes.tokens)[0])
        self._fill(filling, prompts[~room.is_out(prompts.rows)], pivot, longest)
        if not batch.tokens:
            filling.force(prompts[~room.is_out(prompts.rows)])
        return self._booked(view, batch, room, clock)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """By the first token's deadline; with `late_last`, late requests come behind the others.
        Requests without a deadline come last. Without the ordering, by arrival."""
        if self.ordering is Ordering.FIFO:
            return requests.seq
        bare = np.isinf(requests.ttft) & np.isinf(requests.jct)
        own = np.where(bare & np.equal(requests.tier, Tier.REALTIME), self.ttft, requests.ttft)
        due = requests.arrival + own
        late = (due < now) & self.late_last
        return np.where(requests.waiting & late, due + _FAR, due)

    def _ranked(self, view: View, clock: float, pivot: Pivot, longest: float) -> AccelGenWork:
        """All requests, the most urgent first, except long prompts that wait for another long
        prompt."""
        table = view.table
        rows = np.concatenate([table.in_state(RUNNING), table.in_state(WAITING)])
        work = AccelGenWork.of_rows(
            view, rows, table.arrival[rows], table.prompt_len[rows] >= self.long
        )
        parts = self._chunks(work.tokens, pivot)
        slo = Targets(self.ttft, self.tbt).token_targets(view, rows)
        time, loss = left(view, rows, slo, clock), self._history.loss
        slack = wait = laxity(view, rows, parts, clock, longest, loss)
        if self.paced:
            wait = self._allowances.due(view, rows, parts, clock, longest, loss) - clock
        job = np.where(wait >= -longest, np.maximum(wait, 0.0) + longest, np.inf)
        key = work.key
        if self.ordering is Ordering.SLO:
            key = np.minimum(time - parts * longest, wait)
        lost, spare = self._missed.read(view, rows, clock), key
        if self.ordering is Ordering.SLO and self.sparing:
            again = self._chunks(work.tokens + work.start, pivot) * longest
            out = longest + self._history.absence  # part of a job's laxity
            spare = np.minimum(time - out, slack + parts * longest) - again
            spare = np.where(lost, np.inf, np.where(spare > 0, spare, -np.inf))
        late = np.where(work.decodes, slo, np.inf)
        limit = np.minimum(time / parts, job)
        work = _one_long(replace(work, key=key, limit=limit, late=late, spare=spare, lost=lost))
        return work[np.argsort(work.key, kind="stable")]

    def _chunks(self, pending: np.ndarray, pivot: Pivot) -> np.ndarray:
        """N_ck of each row."""
        return chunks(pending, self._history.chunk(pivot.size) if self.chunked else None)

    def _fill(
        self, filling: AccelGenFilling, prompts: AccelGenWork, pivot: Pivot, longest: float
    ) -> None:
        """Adds prompts beside the decodes."""
        first = -(-prompts.tokens // self._chunks(prompts.tokens, pivot))
        prompts, savable = _in_reach(filling.batch, prompts, first)
        urgent = prompts.key <= longest
        if self.ordering is Ordering.FIFO:
            urgent[:] = False
        late = prompts[:0]
        if self.late_last:
            order = np.argsort(urgent & ~savable, kind="stable")
            prompts, savable, urgent = prompts[order], savable[order], urgent[order]
            # Whole prompts would not fit into the time that the others leave.
            behind = urgent & ~savable & prompts.starts & self.chunked
            late, rest = prompts[behind], ~behind
            prompts, savable, urgent = prompts[rest], savable[rest], urgent[rest]
        now, limit = prompts[urgent], filling.limit
        if self.chunked:
            filling.limit = min(limit, float(now.limit.min(initial=np.inf)))
        else:  # whole prompts are added however large they are
            filling.limit, now = np.inf, replace(now, limit=np.full(len(now), np.inf))
        turn = self.late_turn and self._history.passed >= self.late_turn
        if turn:
            filling.fill(late[:1])
        starts = filling.fill(now, savable[urgent])
        if not self.chunked:
            filling.limit = limit
        stays = ~urgent & ~filling.room.is_out(prompts.rows)
        filling.fill(prompts[stays & ~prompts.starts])
        others = prompts[stays & prompts.starts]
        if starts and self.euclidean:
            filling.choose(others, self.gamma)
        elif starts:
            filling.fill(others)
        if starts and not turn:
            filling.room.leave_growth()
            filling.fill(late)
        done = filling.batch.work()
        self._history.note_late(late.rows, done.rows[done.starts])

    def _booked(
        self, view: View, batch: AccelGenBatch, room: AccelGenBudget, clock: float
    ) -> BatchPlan:
        """Makes the plan, and notes what the next one has to know of it."""
        done, seconds, history = batch.work(), batch.seconds, self._history
        history.note_absences(view, room.preempted, done.rows, clock)
        history.note_batch(view, done.rows, done.start + done.tokens, done.tokens, seconds)
        self._allowances.ran(done.rows, seconds)
        self._allowances.forget(room.preempted)
        kinds = np.zeros(len(done), np.int64)
        return BatchPlan(done.rows, done.tokens, done.reserve, kinds, room.preemptions())


def _in_reach(
    batch: AccelGenBatch, work: AccelGenWork, tokens: np.ndarray
) -> tuple[AccelGenWork, np.ndarray]:
    """The work, with limits only where they can be met beside the batch if these tokens of it,
    int64 [n], are computed now; and which requests will be in time, bool [n]."""
    seconds = batch.with_each(replace(work, tokens=tokens))
    met = seconds <= work.limit
    otherwise = np.where(seconds <= work.late, work.late, np.inf)
    return replace(work, limit=np.where(met, work.limit, otherwise)), met & ~work.lost


def _one_long(work: AccelGenWork) -> AccelGenWork:
    """Drops the long prompts that wait while another equally urgent one is computed, or all but the
    most urgent of them (exclusive request allocation)."""
    long = work.long & ~work.decodes
    if np.count_nonzero(long) < 2:
        return work
    waits = np.flatnonzero(long & work.starts)
    under_way = np.flatnonzero(long & ~work.starts)
    if len(under_way):
        key = work.key.copy()
        key[under_way] = min(key[under_way].min(), key[waits].min(initial=np.inf))
        work = replace(work, key=key)
    else:
        waits = np.delete(waits, np.argmin(work.key[waits]))
    stays = np.ones(len(work), bool)
    stays[waits] = False
    return work[stays]


@register(
    "accelgen_nochunk",
    summary="accelgen with whole prompts",
    source="AccelGen 6.3",
    ablation=True,
)
def accelgen_nochunk() -> AccelGen:
    """Without SLO-guaranteed dynamic chunking: prompts are whole, urgent ones however long."""
    return AccelGen(chunked=False)


@register(
    "accelgen_noorder",
    summary="accelgen in order of arrival, without urgent requests",
    source="AccelGen 6.3",
    ablation=True,
)
def accelgen_noorder() -> AccelGen:
    """Without task prioritization: first come, first served."""
    return AccelGen(ordering=Ordering.FIFO)


@register(
    "accelgen_nobatch",
    summary="accelgen whose prompts start in order, whatever they leave idle",
    source="AccelGen 6.3",
    ablation=True,
)
def accelgen_nobatch() -> AccelGen:
    """Without multi-resource-aware batching."""
    return AccelGen(euclidean=False)
