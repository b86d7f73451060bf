"""Which waiting requests start in a step of Apt-Serve, and with which kind of cache.

Rows are rows of the table, in order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sched.cache.block_sizes import tokens_in
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.parallel_arrays import ParallelArrays
from jaxserve.sched.policies.apt.knapsack import Choice, Offers, choose, fit
from jaxserve.sched.policies.apt.value import Value, Weighed
from jaxserve.sched.policy import View

_KV, _HIDDEN = int(CacheKind.KV), int(CacheKind.HIDDEN)


@dataclass(frozen=True)
class StartBudget:
    """What is left for requests that start.

    Attributes:
        blocks: Free blocks.
        tokens: Tokens of the batch.
        slots: Most requests.
        spare: Blocks that late requests leave free.
        chunked: Whether the last prompt may be cut.
        hidden: Whether hidden caches are available.
    """

    blocks: int
    tokens: int
    slots: int
    spare: int = 0
    chunked: bool = False
    hidden: bool = False

    def most(self, block_size: int) -> int:
        """Tokens of the longest request that could start alone; 0 if none."""
        if min(self.blocks, self.tokens, self.slots) <= 0:
            return 0
        most = tokens_in(self.blocks, block_size, CacheKind.HIDDEN if self.hidden else CacheKind.KV)
        return most if self.chunked else min(most, self.tokens)


@dataclass(frozen=True)
class Starts(ParallelArrays):
    """Requests to start, most valuable first: arrays [n].

    Attributes:
        rows: Table rows.
        tokens: Tokens that each computes now.
        kinds: `CacheKind` of each.
    """

    rows: np.ndarray
    tokens: np.ndarray
    kinds: np.ndarray


def start(view: View, queue: Weighed, budget: StartBudget) -> Starts:
    """Chooses waiting requests to start within the budget, by value. Requests that have missed
    their target come last and leave `budget.spare` blocks to those that arrive next; otherwise the
    fallback would come too late for these (section 6.6)."""
    fits = queue.tokens <= budget.most(view.pool.block_size)
    if np.count_nonzero(fits) < len(queue):
        queue = queue.of_chosen(fits)  # may be few of a long queue, or none
    if not len(queue):
        return Starts(queue.rows, queue.rows, queue.rows)
    rows, values = queue.rows, queue.values
    if not budget.spare or not np.count_nonzero(values.late):
        return _start(view, rows, values, budget)
    fresh = np.flatnonzero(~values.late)
    first = _start(view, rows[fresh], values[fresh], budget)
    known = view.table.prompt_len[first.rows] + view.table.generated[first.rows]
    used = view.pool.needed(first.rows, known, first.kinds)
    left = replace(
        budget,
        blocks=budget.blocks - int(used.sum()) - budget.spare,
        tokens=budget.tokens - int(first.tokens.sum()),
        slots=budget.slots - len(first),
        spare=0,
    )
    late = np.flatnonzero(values.late)
    late = late[values.tokens[late] <= left.most(view.pool.block_size)]
    return Starts.joined([first, _start(view, rows[late], values[late], left)])


def _start(view: View, rows: np.ndarray, values: Value, budget: StartBudget) -> Starts:
    """`start` for requests that could start alone."""
    if not len(rows):
        return Starts(rows, rows, rows)
    choice = _choose(view, rows, values, budget.blocks)
    order = choice.served
    tokens = view.table.pending(rows[order])
    before = np.cumsum(tokens) - tokens
    if len(order) > budget.slots or int(tokens.sum()) > budget.tokens:
        # Not for all of them: these get the memory that the others leave.
        if budget.chunked:
            keep = np.flatnonzero(before < budget.tokens)
        else:
            keep = fit(np.arange(len(order)), tokens, budget.tokens)
        kept = np.sort(order[keep[: budget.slots]])
        rows, values = rows[kept], values[kept]
        choice = _choose(view, rows, values, budget.blocks)
        order = choice.served
        tokens = view.table.pending(rows[order])
        before = np.cumsum(tokens) - tokens
    # The order may have changed, and another request may be cut last; one without tokens waits.
    tokens = np.minimum(tokens, budget.tokens - before)
    order, tokens = order[tokens > 0], tokens[tokens > 0]
    rows = rows[order]
    return Starts(rows, tokens, _kinds(view, rows, choice.kinds[order]))


def _fixed(view: View, rows: np.ndarray) -> np.ndarray:
    """Which of these waiting rows have no choice of caches, bool [n]: those that find cached
    prefixes start with a cache of the same kind, those with an adapter with KV."""
    return np.asarray((view.table.computed[rows] > 0) | (view.table.adapter[rows] > 0))


def _kinds(view: View, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Kinds of the caches with which these waiting rows start; `chosen` applies to the others."""
    kinds = np.where(_fixed(view, rows), view.pool.kind[rows], chosen)
    return np.where(view.table.adapter[rows] > 0, _KV, kinds)


def _choose(view: View, rows: np.ndarray, values: Value, free: int) -> Choice:
    kv = view.pool.needed(rows, values.tokens, _kinds(view, rows, np.full(len(rows), _KV)))
    if values.penalty is None:
        return choose(Offers(values.value, kv), free)
    hidden = np.where(_fixed(view, rows), kv, view.pool.blocks_for(values.tokens, _HIDDEN))
    return choose(Offers(values.value, kv, hidden, values.penalty), free)


def start_in_turn(view: View, queue: Weighed, budget: StartBudget) -> Starts:
    """First come, first served, without overtaking. Hidden caches let more requests start;
    remaining memory turns those of the first ones into K and V."""
    rows, tokens = queue.rows, view.table.pending(queue.rows)
    kinds = _kinds(view, rows, np.full(len(rows), _KV))
    most = least = view.pool.needed(rows, queue.tokens, kinds)
    fixed = _fixed(view, rows)
    if budget.hidden:
        least = np.where(fixed, most, view.pool.blocks_for(queue.tokens, _HIDDEN))
    before = np.cumsum(tokens) - tokens
    fits = (np.cumsum(least) <= budget.blocks) & (np.arange(len(rows)) < budget.slots)
    fits &= (before < budget.tokens) if budget.chunked else (before + tokens <= budget.tokens)
    count = len(rows) if fits.all() else int(np.argmin(fits))
    kinds = kinds[:count]
    penalty = queue.of_chosen(slice(count)).values.penalty if budget.hidden and count else None
    if penalty is not None:
        left = budget.blocks - int(least[:count].sum())
        more = most[:count] - least[:count]
        kv = (np.cumsum(more) <= left) & (penalty > 0)
        kinds = np.where(kv | fixed[:count], kinds, _HIDDEN)
    return Starts(rows[:count], np.minimum(tokens, budget.tokens - before)[:count], kinds)
