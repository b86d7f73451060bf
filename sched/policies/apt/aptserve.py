"""Apt-Serve: serves the requests that have waited longest for the memory they take, with either
kind of cache.

A step is one of prefills or one of decodes, whichever queue has waited longer in total (section 5).
The greedy of `knapsack.py` picks the waiting requests that start in the free blocks, with K and V
or with a hidden cache. Running requests continue. Only when the pool lacks the blocks into which
they grow does the greedy decide, over the whole pool, which to preempt. The paper also recomputes
caches to change their kind; here a hidden cache becomes KV in place when there is memory to spare,
and is charged for all steps that it lasts (`Penalty`). `aptserve_s` does the same on Sarathi's
batches (section 6.7). docs/aptserve.md lists the differences from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.plan import BatchPlan, Operation, Preempt, ProjectToKV
from jaxserve.sched.policies.apt.adaptive import go_on, redecide, to_kv
from jaxserve.sched.policies.apt.admission import StartBudget, Starts, start, start_in_turn
from jaxserve.sched.policies.apt.value import Moment, Penalty, Weighed, known
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import register
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.unified.making_room import made_for

NOBODY = np.zeros(0, np.int64)


@dataclass
class _Queue:
    """The waiting rows, and the tokens of each; cached while the queue does not change."""

    rows: np.ndarray = field(default_factory=lambda: NOBODY)
    tokens: np.ndarray = field(default_factory=lambda: NOBODY)

    def tokens_of(self, view: View, waiting: np.ndarray) -> np.ndarray:
        """See `Value.tokens`. waiting: the waiting rows of the table."""
        if waiting is not self.rows:
            self.rows, self.tokens = waiting, known(view, waiting)
        return self.tokens


@register(
    "aptserve",
    summary="hybrid cache; prefill or decode by pending time, requests by pending time a block",
    source="Apt-Serve 4, 5",
)
@dataclass(frozen=True)
class AptServe(Policy):
    """hybrid_cache: hidden caches if the view offers them. adaptive: order by value; otherwise
    first come, first served, and prefills first, as in vLLM. chunked: Sarathi's batches, decodes
    first, then chunks of prompts within P, and no types of steps; otherwise whole prompts, P = C.

    slo_decay: share of its value that a request keeps while it misses its target (section 6.6); 0:
        next to nothing, and it starts after requests in time and leaves the headroom free.
        watermark: share of the pool that starts leave free while others run. headroom: additional
        share that must be free before a hidden cache becomes KV. penalty: what a hidden cache is
        charged.
    """

    hybrid_cache: bool = True
    adaptive: bool = True
    chunked: bool = False
    slo_decay: float = 0.0
    watermark: float = 0.01
    headroom: float = 0.1
    penalty: Penalty = Penalty.AUTO
    hypothetical: bool = False
    counts_blocks = True
    steady: bool = field(default=True, init=False)
    _queue: _Queue = field(default_factory=_Queue, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.penalty is not Penalty.AUTO and not (self.hybrid_cache and self.adaptive):
            raise ValueError("penalty is for variants that choose kinds of cache by value")
        if self.penalty is Penalty.REDECIDE:
            if self.chunked:
                raise ValueError("penalty=redecide needs whole prompts, chunked=false")
            object.__setattr__(self, "steady", False)
        for name in ("slo_decay", "watermark", "headroom"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")

    def plan(self, view: View, now: float) -> BatchPlan:
        """A step of prefills if the waiting requests have been without a token for longer in total
        than the running ones (section 5), otherwise one of decodes; if chunked, one batch of
        both."""
        waiting, running = view.table.in_state(WAITING), view.table.in_state(RUNNING)
        moment = self._moment(view, now, waiting, running)
        queue = Weighed(waiting, self._queue.tokens_of(view, waiting), moment.weigh)
        gone = self._way_for(view, queue, running)
        if len(queue) and not self.chunked:
            budget = self._budget(view, view.pool.num_free, gone)
            some = queue.of_chosen(queue.tokens <= budget.most(view.pool.block_size))
            if len(some) and self._prefills(moment, queue, some, running):
                starts = self._start(view, some if self.adaptive else queue, budget)
                if len(starts):
                    return _plan(view, starts, gone)
            gone = gone[:0]
        if len(gone):
            running = running[~np.isin(running, gone)]
        ran = Weighed(running, known(view, running), moment.weigh)
        return self._go_on(view, ran, queue, gone)

    def _moment(self, view: View, now: float, waiting: np.ndarray, running: np.ndarray) -> Moment:
        requests = len(waiting) + len(running)
        return Moment(
            view,
            now,
            running,
            looks_ahead=len(waiting) > 0 and not self.chunked,
            delay=requests * (view.rho or 0.0) if self._hidden(view) else None,
            decay=self.slo_decay,
            lasting=self.penalty.lasts(view),
        )

    def _hidden(self, view: View) -> bool:
        return self.hybrid_cache and view.rho is not None

    def _prefills(self, moment: Moment, queue: Weighed, some: Weighed, running: np.ndarray) -> bool:
        """Whether it is the waiting requests' turn, and any could start. Late requests count with
        their full waiting time: the fallback changes values, not waiting."""
        if not self.adaptive:
            return True
        ran = moment.pending(running).sum()
        if some.values.pending.sum() > 2 * ran:
            return True  # the other terms only add to it
        return bool(moment.pending(queue.rows).sum() >= ran)

    def _way_for(self, view: View, queue: Weighed, running: np.ndarray) -> np.ndarray:
        """Rows that make room for waiting ones that have targets and are in time, for as many as C
        has tokens for."""
        bare = view.table.bare
        if not (self.adaptive and len(queue) and bare(running).any()):
            return NOBODY
        asks = queue.of_chosen(~(queue.values.late | bare(queue.rows)))
        asks = asks.of_chosen(asks.tokens.cumsum() <= view.limits.max_batch_tokens)
        slots = max(view.limits.max_rows - len(running), 0)
        free = view.pool.num_free - int(self.watermark * view.pool.num_blocks)
        return made_for(view, asks.rows, view.pool.blocks_for(asks.tokens), free, slots)

    def _budget(
        self, view: View, left: int, gone: np.ndarray, rows: int = 0, used: int = 0
    ) -> StartBudget:
        """What is left for requests that start. left: free blocks. gone: rows whose blocks and
        places become free. rows, used: rows and tokens that are in the batch already."""
        limits, blocks = view.limits, view.pool.num_blocks
        left += int(view.pool.private(gone).sum())
        holders = len(view.table.in_state(RUNNING)) - len(gone)
        c = limits.max_prefill_tokens if self.chunked else limits.max_batch_tokens
        return StartBudget(
            left - (int(self.watermark * blocks) if holders else 0),
            c - used,
            limits.max_rows - max(holders, rows),
            # With a decay, late requests compete with the others by value alone.
            spare=int(self.headroom * blocks) if holders and not self.slo_decay else 0,
            chunked=self.chunked,
            hidden=self._hidden(view),
        )

    def _start(self, view: View, queue: Weighed, budget: StartBudget) -> Starts:
        return (start if self.adaptive else start_in_turn)(view, queue, budget)

    def _go_on(self, view: View, ran: Weighed, queue: Weighed, gone: np.ndarray) -> BatchPlan:
        """A step of running requests, with starts if batches are mixed. gone: rows that make room
        for waiting ones."""
        anew = self.penalty is Penalty.REDECIDE and self._hidden(view)
        if anew:
            goes, preempt, left = redecide(view, ran.rows, ran.values)
        else:
            goes, preempt, left = go_on(view, ran, in_turn=not self.adaptive)
        if np.count_nonzero(goes) < len(ran):
            ran = ran.of_chosen(goes)
        rows = ran.rows
        tokens = self._share(view, ran)
        kinds = view.pool.kind[rows].astype(np.int64)
        spare = int(self.headroom * view.pool.num_blocks)
        wider = (tokens > 0) & (not anew) & to_kv(view, ran, queue, left - spare)
        kinds[wider] = CacheKind.KV
        here = tokens > 0
        batch = Starts(rows[here], tokens[here], kinds[here])
        project = rows[wider]
        if self.chunked and len(queue) and not len(preempt):
            pool = view.pool
            left -= int(pool.blocks_for(pool.room(project), CacheKind.HIDDEN).sum())
            left -= int(pool.blocks_for(1)) * len(project)
            budget = self._budget(view, left, gone, len(batch), int(tokens.sum()))
            preempt = gone
            batch = Starts.joined([batch, self._start(view, queue, budget)])
        return _plan(view, batch, preempt, project)

    def _share(self, view: View, ran: Weighed) -> np.ndarray:
        """Tokens that each continuing request computes: decodes first, then prompts by value."""
        table, limits, rows = view.table, view.limits, ran.rows
        tokens = table.pending(rows)
        decodes = table.decoding(rows)
        if int(tokens.sum()) <= limits.max_prefill_tokens or (
            decodes.all() and len(rows) <= limits.max_batch_tokens
        ):
            return tokens
        by = -ran.values.value / ran.tokens if self.adaptive else np.arange(len(rows))
        order = np.lexsort((by, ~decodes))
        ordered = tokens[order]
        before = np.cumsum(ordered) - ordered
        p = limits.max_prefill_tokens if self.chunked else limits.max_batch_tokens
        budget = np.where(decodes[order], limits.max_batch_tokens, p)
        shared = np.zeros_like(tokens)
        shared[order] = np.clip(budget - before, 0, ordered)
        return shared


@register(
    "aptserve_s",
    summary="aptserve on chunked prefill and mixed batches, as sarathi",
    source="Apt-Serve 6.7",
)
def aptserve_s() -> AptServe:
    """Values and both kinds of cache, but no steps of prefills alone: chunks of prompts fill the
    batches of decodes (section 6.7)."""
    return AptServe(chunked=True)


@register("aptserve_kv", summary="aptserve with K and V only", source="Apt-Serve 6.5, Table 4")
def aptserve_kv() -> AptServe:
    """Of the two parts of the design, values alone (section 6.5, Table 4)."""
    return AptServe(hybrid_cache=False)


@register(
    "aptserve_fcfs",
    summary="hybrid cache, but first come, first served, and prefill first as vllm",
    source="Apt-Serve 6.5, Table 5",
)
def aptserve_fcfs() -> AptServe:
    """Of the two parts of the design, hidden caches alone (section 6.5, Table 5)."""
    return AptServe(adaptive=False)


def _plan(
    view: View, batch: Starts, preempt: np.ndarray = NOBODY, project: np.ndarray = NOBODY
) -> BatchPlan:
    """A plan with room for all known tokens of each request."""
    reserve = view.table.prompt_len[batch.rows] + view.table.generated[batch.rows]
    operations: list[Operation] = []
    if len(preempt):
        operations.append(Preempt.whole(preempt))
    if len(project):
        operations.append(ProjectToKV(project))
    return BatchPlan(batch.rows, batch.tokens, reserve, batch.kinds, tuple(operations))
