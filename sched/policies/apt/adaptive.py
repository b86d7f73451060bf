"""Which running requests continue in a step of Apt-Serve, and which hidden caches become K and V.

Rows are rows of the table, in order of arrival.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.policies.apt.knapsack import Offers, choose, fit
from jaxserve.sched.policies.apt.value import NEAR_ZERO, Value, Weighed, steps_ahead
from jaxserve.sched.policy import View

PROJECTED = 1000  # tokens for which the cost model is asked
_HIDDEN = int(CacheKind.HIDDEN)


def go_on(view: View, ran: Weighed, in_turn: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """Decides which running requests keep their cache and grow it. All do while the blocks last.
    Otherwise the greedy over the whole pool decides; as few as possible of the others are
    preempted, and the rest pause.

    Args:
        view: What the policy sees.
        ran: The running requests [n].
        in_turn: Whether the latest arrivals are preempted first, instead of the least valuable.

    Returns:
        A mask [n] of the requests that continue, the rows to preempt, and the blocks left.
    """
    pool, rows = view.pool, ran.rows
    kinds = pool.kind[rows]
    need = pool.needed(rows, ran.tokens, kinds)
    free, wanted = pool.num_free, int(need.sum())
    everybody = np.ones(len(rows), bool)
    if wanted <= free:
        return everybody, rows[:0], free - wanted
    held = pool.private(rows)
    total = free + int(held.sum())
    if in_turn:
        gain = -np.arange(len(rows), dtype=np.float64)
        until = np.searchsorted(np.cumsum(held + need), total, side="right")
        kept = np.arange(int(until))
    else:
        values, value = ran.values, ran.values.value
        if values.penalty is not None:
            hidden = kinds == _HIDDEN
            value = np.where(hidden, np.maximum(value - values.penalty, value * NEAR_ZERO), value)
        choice = choose(Offers(value, held + need), total)
        gain, kept = choice.gain, choice.served
    goes = np.zeros(len(rows), bool)
    goes[kept] = True
    left = free - int(need[kept].sum())
    others = np.flatnonzero(~goes)
    others = others[np.argsort(gain[others], kind="stable")]  # the least valuable first
    preempted = others[:0]
    if left < 0:
        returned = np.cumsum(held[others])
        count = int(np.searchsorted(returned, -left)) + 1
        preempted = others[:count]
        left += int(returned[count - 1])
    more = fit(others[len(preempted) :][::-1], need, left)
    goes[more] = True
    return goes, rows[preempted], left - int(need[more].sum())


def redecide(view: View, rows: np.ndarray, values: Value) -> tuple[np.ndarray, np.ndarray, int]:
    """Like `go_on`, but as in the paper: the greedy decides on every running request again in every
    step. A request that is not chosen, or is chosen with the other kind of cache, loses its cache
    and waits for a step of prefills to compute it again (section 5)."""
    pool, tokens = view.pool, values.tokens
    shared = pool.blocks_held(rows) - pool.private(rows)
    kv, hidden = (
        pool.blocks_for(tokens, kind) - np.where(pool.kind[rows] == kind, shared, 0)
        for kind in (CacheKind.KV, CacheKind.HIDDEN)
    )
    total = pool.num_free + int(pool.private(rows).sum())
    adapted = view.table.adapter[rows] > 0  # they have no choice of caches
    hidden = np.where(adapted, kv, hidden)
    kinds = choose(Offers(values.value, kv, hidden, values.penalty), total).kinds
    kinds = np.where(adapted & (kinds == _HIDDEN), int(CacheKind.KV), kinds)
    goes = kinds == pool.kind[rows]
    if pool.cache is not None:  # otherwise it would find its hidden vectors and start as before
        goes |= (pool.kind[rows] == _HIDDEN) & (kinds == int(CacheKind.KV))
    used = np.where(pool.kind[rows] == _HIDDEN, hidden, kv)
    return goes, rows[~goes], total - int(used[goes].sum())


def to_kv(view: View, ran: Weighed, waiting: Weighed, left: int) -> np.ndarray:
    """Which running requests project their hidden caches to K and V, in order of arrival. Memory
    must suffice for that, for one more block per plane of all running requests, and for K and V of
    all waiting ones.

    Args:
        view: What the policy sees.
        ran: The running requests [n].
        waiting: The waiting requests.
        left: Blocks left after the running requests have grown.

    Returns:
        A mask [n].
    """
    pool, rows = view.pool, ran.rows
    chosen = np.zeros(len(rows), bool)
    hidden = np.flatnonzero((pool.kind[rows] == _HIDDEN) & ~pool.sharing(rows))
    if not len(hidden) or view.rho is None or view.rho <= 0:
        return chosen
    left -= int(pool.blocks_for(1)) * len(rows) + int(pool.blocks_for(waiting.tokens).sum())
    if left > 0:
        hidden = hidden[_pays(view, rows[hidden], view.rho)]
        more = pool.blocks_for(np.maximum(ran.tokens, pool.room(rows)), CacheKind.HIDDEN)
        chosen[fit(hidden, more, left)] = True
    return chosen


def _pays(view: View, rows: np.ndarray, rho: float) -> np.ndarray:
    """Which requests are expected, from the lengths of earlier outputs, to have enough steps ahead
    to make up for the cost of projecting a token, bool [n]."""
    batch = BatchFeatures(0, 0, 0, 0, 0, 0, 0, projected_tokens=np.array([0, PROJECTED]))
    before, after = view.step_time(batch)
    return np.asarray(steps_ahead(view, rows) * rho * PROJECTED >= after - before)
