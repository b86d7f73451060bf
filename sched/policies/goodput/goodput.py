"""Goodput: each step maximises the number of requests that attain all of their targets.

Decodes run. Of the waiting prompts, those come first that let most requests be in time. If memory
is short, the request whose next late token costs least is paused, and its cache goes to the host.
The rest of a step goes to late requests, and requests that have waited for too long come first.
docs/goodput.md explains it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES
from jaxserve.sched.cache.cache_kinds import HIDDEN, KV
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.plan import BatchPlan, Operation, Restore
from jaxserve.sched.policies.goodput.batch import GoodputBatch, GoodputWork
from jaxserve.sched.policies.goodput.fairness import Patience
from jaxserve.sched.policies.goodput.filling import STEPS, GoodputFilling
from jaxserve.sched.policies.goodput.giving_up import given_up, late_starts
from jaxserve.sched.policies.goodput.outlook import (
    Deadlines,
    Lengths,
    Outlook,
    Standard,
    jobs_due,
)
from jaxserve.sched.policies.goodput.pausing import Memory, Returns
from jaxserve.sched.policies.goodput.prices import Prices
from jaxserve.sched.policies.goodput.programs import Programs
from jaxserve.sched.policies.goodput.tenants import Tenants
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import register
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import MISSED, RUNNING, WAITING

LOOK = 128  # waiting requests that a plan considers: this many due next, and the oldest
PACE = 0.1  # weight of the last step in the moving average
_FAR = 1e12  # seconds: sorts behind all that are not late


class _Pace:
    """Recent seconds of a step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note(self, seconds: float) -> None:
        """Adds a step."""
        self.seconds += PACE * (seconds - self.seconds)


@register(
    "goodput",
    summary="most requests within all targets; pauses those that lose least; none waits forever",
    source="docs/goodput.md",
)
@dataclass(frozen=True)
class Goodput(Policy):
    """ttft, tbt: targets, in seconds, of real-time requests without their own. patience: seconds
    without service after which a request comes first. share: share of memory and rows for requests
    that have waited that long. hidden_above: share of the pool in use above which new requests get
    hidden caches, if the engine has them; 1 for never. swaps: whether caches of paused requests go
    to the host.

    Raises ValueError for a value out of range.
    """

    ttft: float = 2.0
    tbt: float = 0.2
    patience: float = 30.0
    share: float = 0.1
    hidden_above: float = 0.7
    swaps: bool = True
    _lengths: Lengths = field(init=False, repr=False, compare=False)
    _patience: Patience = field(init=False, repr=False, compare=False)
    _prices: Prices = field(init=False, repr=False, compare=False)
    _tenants: Tenants = field(init=False, repr=False, compare=False)
    _programs: Programs = field(init=False, repr=False, compare=False)
    _pace: _Pace = field(init=False, repr=False, compare=False)
    _returns: Returns = field(init=False, repr=False, compare=False)
    full_prefill = True
    hybrid_cache = True
    moves_cache = True
    adapts = True
    counts_blocks = True

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        for name in ("share", "hidden_above"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        object.__setattr__(self, "_lengths", Lengths())
        object.__setattr__(self, "_patience", Patience(self.patience, self.share))
        object.__setattr__(self, "_prices", Prices())
        object.__setattr__(self, "_tenants", Tenants(self.patience))
        object.__setattr__(self, "_pace", _Pace())
        object.__setattr__(self, "_returns", Returns())
        object.__setattr__(self, "_programs", Programs())

    def plan(self, view: View, now: float) -> BatchPlan:
        """Decodes, prompts that will be in time, and the others."""
        table, clock, standard = view.table, view.step_end(now), Standard(self.ttft, self.tbt)
        running, waiting = table.in_state(RUNNING), table.in_state(WAITING)
        self._lengths.read(view)
        rows = np.concatenate([running, waiting]) if len(waiting) else running
        kept, pace = self._patience.read(view, rows, clock), self._pace.seconds
        worth = self._worth(view, waiting)
        self._prices.read(view, waiting, worth, clock)
        pausing = self._programs.pausing(view, running, waiting, clock, pace) & ~kept[waiting]
        if pausing.any():
            waiting, worth = waiting[~pausing], worth[~pausing]
            rows = np.concatenate([running, waiting])
        if len(waiting) > 2 * LOOK:
            dear = ~self._prices.affordable(waiting, worth)
            looked_at = _looked_at(view, waiting, kept, dear, clock, standard, pace)
            rows = np.concatenate([running, looked_at])
        deadlines = Deadlines.of_rows(view, rows, standard, clock)
        headroom = _headroom(view, deadlines)
        if self._none_starts(view, rows, deadlines, kept, clock):
            ours = deadlines.leading(len(running))
            calm = self._calm(view, rows[: len(running)], ours, headroom, clock)
            if calm is not None:
                return calm
        outlook = Outlook.of_rows(
            view, rows, deadlines, self._worth(view, rows), clock, self._lengths, pace
        )
        kind = _kind_of_starts(view, running, self.hidden_above)
        work, first = GoodputWork.of_rows(view, rows, outlook, kind), kept[rows]
        batch = GoodputBatch(view, work)
        self._returns.read(view, clock)
        memory = Memory(view, work, batch, first, pace, self._returns, swaps=self.swaps)
        filling = GoodputFilling(*(view, work, batch, memory, clock, headroom, first, self._prices))
        filling.fill(self._patience.starved(view, rows, clock))
        self._note(view, filling, work, batch, memory, clock)
        done = batch.chosen()
        operations: tuple[Operation, ...] = memory.operations()
        back = work.rows[done[work.loaded[done] > 0]]
        if len(back):
            operations = (*operations, Restore(back, np.zeros_like(back)))
        lost = given_up(view, table.in_state(WAITING), work, work.rows[done], clock)
        return BatchPlan(
            rows=work.rows[done],
            num_tokens=work.tokens[done],
            reserve=work.reserve[done],
            kinds=work.kinds[done],
            operations=operations,
            missed=lost[0],
            relegated=lost[1],
        )

    def _worth(self, view: View, rows: np.ndarray) -> np.ndarray:
        """What it is worth that each request is in time, float64 [n]. A program is worth as much as
        a request, so that each of the calls that are left to it has a part."""
        table = view.table
        worth = self._tenants.worth(table.tenant[rows], table.weight[rows]) * table.value[rows]
        whole = table.program_deadline[rows] < np.inf
        if not whole.any():
            return worth
        return np.where(whole, worth / (1.0 + table.calls_after[rows]), worth)

    def _note(
        self,
        view: View,
        filling: GoodputFilling,
        work: GoodputWork,
        batch: GoodputBatch,
        memory: Memory,
        clock: float,
    ) -> None:
        """Remembers what a plan does.

        Args:
            view: What the policy sees.
            filling, work, batch, memory: The plan.
            clock: When its step begins, seconds.
        """
        done = batch.chosen()
        rows, table = work.rows[done], view.table
        writes = work.start[done] + work.tokens[done] == work.reserve[done]
        self._prices.spend(batch.seconds - filling.base)
        self._patience.spend(filling.patient)
        self._patience.note_batch(rows, writes, clock)
        self._patience.note_paused(memory.preempted)
        paused = memory.out & (work.attains > 0) & (work.longest < np.inf)
        self._returns.note(view, work.rows[paused], work.gap_due[paused])
        first = writes & (table.generated[rows] == 0) & (work.attains[done] > 0)
        self._tenants.note(table.tenant[rows[first]], clock)
        if len(done):
            self._pace.note(batch.seconds)

    def _none_starts(
        self, view: View, rows: np.ndarray, deadlines: Deadlines, kept: np.ndarray, clock: float
    ) -> bool:
        """Whether it is plain that no request starts, and that none of those that wait is given up:
        none waits, or all rows are taken and nobody is paused.

        Args:
            view: What the policy sees.
            rows: Those that run, then those that wait.
            deadlines: Of these rows.
            kept: By row, which come first.
            clock: When the step begins, seconds.
        """
        table = view.table
        waiting, some = table.in_state(WAITING), len(table.in_state(RUNNING))
        if not len(waiting):
            return True
        if some < view.limits.max_rows or kept[waiting].any():
            return False
        seen = rows[some:]
        if (deadlines.missed[some:] & (table.generated[seen] > 0)).any():
            return False
        if len(late_starts(view, waiting, clock)):
            return False
        if (np.minimum(deadlines.due, deadlines.jct)[some:] == np.inf).all():
            return True  # others are paused for requests with a deadline alone
        outlook = Outlook.of_rows(
            view,
            rows[:some],
            deadlines.leading(some),
            np.ones(some),
            clock,
            self._lengths,
            self._pace.seconds,
        )
        return bool((outlook.loss > 0).all())

    def _calm(
        self, view: View, rows: np.ndarray, deadlines: Deadlines, headroom: float, clock: float
    ) -> BatchPlan | None:
        """The plan if there is nothing to decide: no request starts, and all others decode, find
        blocks, and either can attain their targets or keep no other request from doing so. Most
        steps at light load, and with all rows taken, are of this kind.

        Args:
            view: What the policy sees.
            rows: Those that run.
            deadlines: Of these rows.
            headroom: See `GoodputFilling`.
            clock: When the step begins, seconds.

        Returns:
            The plan; None if there is more to decide.
        """
        table, pool, count = view.table, view.pool, len(rows)
        if not count or count > view.limits.max_batch_tokens:
            return None
        missed, lost = deadlines.missed, rows[deadlines.missed]
        if len(lost) and (table.has_targets(lost) & (table.outlook[lost] < MISSED)).any():
            return None  # its client has to be told
        known = table.prompt_len[rows] + table.generated[rows]
        ready = (table.computed[rows] + 1 == known) & ~deadlines.first
        if not ready.all():
            return None
        kinds = pool.kind[rows].astype(np.int64)
        if int(pool.needed(rows, known, kinds).sum()) > pool.num_free:
            return None
        read, hidden = int(known.sum()), int(known[kinds == HIDDEN].sum())
        batch = BatchFeatures(count, count, read - hidden, count, 0, 0, 0, hidden_tokens=hidden)
        seconds = float(view.step_time(batch))
        if missed.any():
            due = np.minimum(deadlines.due, jobs_due(view, rows, deadlines.jct, self._pace.seconds))
            slack = (due[~missed] - clock).min(initial=np.inf) / view.device.overrun
            if seconds > min(slack, headroom):
                return None
        self._pace.note(seconds)
        self._patience.note_batch(rows, ready, clock)
        return BatchPlan(rows, np.ones(count, np.int64), known, kinds)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """By the first token's deadline; late waiting requests come behind the others."""
        bare = np.isinf(requests.ttft) & np.isinf(requests.tbt) & np.isinf(requests.jct)
        own = np.where(bare & np.equal(requests.tier, Tier.REALTIME), self.ttft, requests.ttft)
        due = requests.arrival + np.minimum(own, requests.jct)
        return np.where(requests.waiting & (due < now), due + _FAR, due)

    def makes_room(self, running: Any, request: Any, now: float) -> Any:
        """Best-effort requests without targets, for all others. Which others do depends on when
        paused requests can come back."""
        return running.bare & ~request.bare


def _looked_at(
    view: View,
    waiting: np.ndarray,
    kept: np.ndarray,
    dear: np.ndarray,
    clock: float,
    standard: Standard,
    pace: float,
) -> np.ndarray:
    """The waiting requests that a plan considers, in order of arrival: those that come first, the
    oldest, and those due next of those worth their time, paused ones by their longest gap."""
    table = view.table
    ttft, _, jct, longest = standard.targets_of(view, waiting)
    due = table.arrival[waiting] + ttft
    jobs = (jct < np.inf).nonzero()[0]
    if len(jobs):
        due[jobs] = np.minimum(due[jobs], jobs_due(view, waiting[jobs], jct[jobs], pace))
    paused = table.generated[waiting] > 0
    if paused.any():
        gap_due = np.minimum(table.last_token[waiting] + longest, table.arrival[waiting] + jct)
        due = np.where(paused, gap_due, due)
    due[(due < clock) | (dear & ~paused)] = np.inf
    look = kept[waiting]
    look[:LOOK] = True
    look[np.argpartition(due, LOOK)[:LOOK]] = True
    return waiting[look]


def _kind_of_starts(view: View, running: np.ndarray, above: float) -> int:
    """The kind of new caches: hidden ones, half as large, if the pool is expected to fill and they
    pay off: twice as many requests share the fixed cost of a step, but each is read more slowly.

    Args:
        view: What the policy sees.
        running: Rows that hold a cache; half of their expected further output counts.
        above: Share of the pool in use above which caches are hidden.
    """
    if view.rho is None or above >= 1:
        return KV
    read = view.rho * view.pool.num_blocks * view.pool.block_size  # a pool full of them, seconds
    if read > view.step_time(BatchFeatures(1, 1, 0, 0, 1, 1, 0)):  # a prompt of one token
        return KV
    pool, ahead = view.pool, view.table.tokens_ahead(running) / 2
    growth = float((ahead * PLANES[pool.kind[running]]).sum()) / pool.block_size
    return HIDDEN if pool.num_used + growth > above * pool.num_blocks else KV


def _headroom(view: View, deadlines: Deadlines) -> float:
    """How long a step may be, in seconds, so that requests that come during it can have a first
    token in time, by the median TTFT of those that can attain their targets, or of all if none can;
    inf without any. At least twice what the shortest prompt takes: otherwise late requests would
    start one at a time."""
    return max(_share_of_ttft(deadlines), 2 * float(view.refill_time(np.ones(1, np.int64))[0]))


def _share_of_ttft(deadlines: Deadlines) -> float:
    """The median TTFT over STEPS."""
    asked = deadlines.ttft < np.inf
    hopeful = asked & ~deadlines.missed
    ttft = deadlines.ttft[hopeful if hopeful.any() else asked]
    half = len(ttft) // 2  # `np.median` is much slower
    if not half:
        return float(ttft[0]) / STEPS if len(ttft) else np.inf
    ttft.partition((half - 1, half))
    return float(ttft[half] if len(ttft) % 2 else (ttft[half - 1] + ttft[half]) / 2) / STEPS
