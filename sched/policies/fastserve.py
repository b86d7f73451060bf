"""FastServe: a multi-level feedback queue that new requests join below the top.

Five queues (as in AccelGen's comparison, section 5), each with a quantum of service twice that of
the one above. A request joins the first queue whose quantum covers its prompt ("skip-join"), falls
by one when it has used up a quantum, and returns to the top when it has had no service for too
long. Higher queues come first, each in order of arrival; a request that lacks memory takes it from
the last. A preempted cache goes to the host and comes back from there, which needs host memory,
`--host_tokens` in simulations and `cache.host_gib` live; caches without room there are recomputed.
FastServe itself also moves caches ahead of time, so that requests do not wait for them.

The unit of service is one decode; the cost model gives the cost of a prompt in that unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.plan import BatchPlan, Checkpoint, Operation, Restore
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register
from jaxserve.sched.row_columns import grow_columns
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.unified.batch_budget import Candidates
from jaxserve.sched.unified.feedback_queues import check_queues
from jaxserve.sched.unified.ranking import Ranking, rank
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy

MOST_QUEUES = 1000


class _Memory:
    """By row: the request that has it (its order of arrival), the cost of its prompt, the queue
    that it last joined, and the service that it had received by then. Also its queue, valid until
    it has generated more or starved, and the `generated` and `starved` for which that was
    computed."""

    def __init__(self) -> None:
        self.seq = np.zeros(0, np.int64)
        self.prompt = np.zeros(0)
        self.joined = np.zeros(0, np.int64)
        self.before = np.zeros(0)
        self.queue = np.zeros(0, np.int16)
        self.generated = np.zeros(0, np.int64)
        self.starved = np.zeros(0, bool)

    def grow(self, rows: int) -> None:
        """Makes the arrays as long as the table."""
        grow_columns(self, rows, **dict.fromkeys(vars(self), 0) | {"seq": NOBODY})


@register(
    "fastserve",
    summary="skip-join multi-level feedback queue; preempted caches go to host memory",
    source="FastServe; AccelGen section 5",
)
@dataclass(frozen=True)
class FastServe(UnifiedPolicy):
    """queues: number of queues, at most MOST_QUEUES. quantum: service in the top queue, in decodes.
    ratio: from one quantum to the next. patience: seconds without a token after which a request
    returns to the top. ValueError for values out of range, and if the last queue's quantum is not a
    number.
    """

    groups: tuple[Group, ...] = field(default=(Group(Phase.ANY, preempts=True),))
    mixed_batches: bool = True
    chunked: bool = False
    full_prefill: bool = True
    queues: int = 5
    quantum: float = 4.0
    ratio: float = 2.0
    patience: float = 10.0
    _memory: _Memory = field(default_factory=_Memory, init=False, repr=False, compare=False)
    moves_cache = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queues(MOST_QUEUES, self.queues, self.quantum, self.ratio, self.patience)

    def plan(self, view: View, now: float) -> BatchPlan:
        """Fills one batch. Preempted requests are swapped out, and returning ones swapped in."""
        plan = super().plan(view, now)
        moved = (*_out(view, plan.preempted), *plan.operations, *_back(view, plan.rows))
        return BatchPlan(plan.rows, plan.num_tokens, plan.reserve, plan.kinds, moved)

    def candidates(self, view: View, rows: np.ndarray) -> Candidates:
        """As in the unified scheduler, without tokens whose cache is on the host."""
        found = super().candidates(view, rows)
        if view.host.num_used:
            found.tokens = found.tokens - _on_host(view, rows)
            found.prefill = (found.tokens != 1) | (view.table.generated[rows] == 0)
        return found

    def ranking(self, view: View, now: float) -> Ranking:
        """By queue, the top one first, then by arrival."""
        return rank(view, lambda rows: self.queue_of(view, rows, now), self.requeue)

    def queue_priority(self, requests: Any, now: float) -> Any:
        """Unknown: it depends on each request's history."""
        return None

    def queue_of(self, view: View, rows: np.ndarray, now: float) -> np.ndarray:
        """The queue of each request, 0 the top, int16 [n]. Records all new requests, and all
        without service for `patience` seconds, which are at the top again."""
        table, memory = view.table, self._memory
        memory.grow(table.capacity)
        # Comparing the whole table is faster than looking up these rows.
        changed = memory.seq != table.seq
        starved = now - table.last_token > self.patience
        there = (table.state == WAITING) | (table.state == RUNNING)
        new = np.flatnonzero(changed & there)
        if len(new):
            memory.seq[new] = table.seq[new]
            memory.prompt[new] = self._prompt_cost(view, table.prompt_len[new])
            memory.joined[new] = self._first_covering(memory.prompt[new])
            memory.before[new] = 0.0
        changed |= (memory.generated != table.generated) | (starved & ~memory.starved)
        found = np.flatnonzero(changed & there)
        if len(found):
            self._requeue(view, found, starved[found])
        return memory.queue[rows]

    def _requeue(self, view: View, rows: np.ndarray, starved: np.ndarray) -> None:
        """Records the queue of these rows."""
        table, memory = view.table, self._memory
        generated = table.generated[rows]
        had = np.where(generated > 0, memory.prompt[rows] + generated - 1, 0.0)
        if np.count_nonzero(starved):
            memory.joined[rows[starved]] = 0
            memory.before[rows[starved]] = had[starved]
        # Quanta from the joined queue on add up to q (r^k - 1) / (r - 1) after k of them.
        first = self.quantum * self.ratio ** memory.joined[rows]
        used = (had - memory.before[rows]) * (self.ratio - 1) / first
        fallen = np.floor(np.log1p(used) / np.log(self.ratio) + 1e-9).astype(np.int64)
        memory.queue[rows] = np.minimum(memory.joined[rows] + fallen, self.queues - 1)
        memory.generated[rows], memory.starved[rows] = generated, starved

    def _prompt_cost(self, view: View, length: np.ndarray) -> np.ndarray:
        prompt = BatchFeatures(length, length, 0, 0, length**2, 1, 0)
        decode = BatchFeatures(1, 1, 1, 1, 0, 0, 0)
        return np.asarray(view.step_time(prompt) / view.step_time(decode), np.float64)

    def _first_covering(self, cost: np.ndarray) -> np.ndarray:
        quanta = self.quantum * self.ratio ** np.arange(self.queues - 1)
        return np.searchsorted(quanta, cost).astype(np.int64)


def _on_host(view: View, rows: np.ndarray) -> np.ndarray:
    """Tokens of each row that come back from the host when it starts, int64 [n]."""
    if not view.host.num_used:
        return np.zeros(len(rows), np.int64)
    return np.asarray(view.host.tokens[rows])


def _out(view: View, rows: np.ndarray) -> list[Operation]:
    """Checkpoints of the preempted caches that fit in host memory, in order, except caches whose
    blocks other rows hold, too."""
    rows = rows[~view.pool.sharing(rows)]
    cached = view.table.computed[rows]
    slots = view.host.slots_for(cached, view.pool.kind[rows])
    count = int(np.searchsorted(np.cumsum(slots), view.host.num_free, side="right"))
    return [Checkpoint(rows[:count], np.zeros(count, np.int64), cached[:count])] if count else []


def _back(view: View, rows: np.ndarray) -> list[Operation]:
    """The caches on the host of rows that start."""
    swapped = rows[_on_host(view, rows) > 0]
    return [Restore(swapped, np.zeros_like(swapped))] if len(swapped) else []
