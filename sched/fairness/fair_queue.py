"""Which waiting requests a policy sees if several tenants have some: as many as the next step may
take, in weighted fair order. The policy decides which of these it serves."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.fairness.fair_share import FairShares
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import HELD, RUNNING, WAITING
from jaxserve.sched.unified.policy_spec import Columns


def hold_back(
    policy: Policy, view: View, shares: FairShares, now: float, apart: np.ndarray
) -> None:
    """Moves requests between WAITING and HELD, so that the policy sees those of the next tenants.

    Preempted requests are never held, nor any request if only one tenant waits. Tiers are handled
        separately, since the policy decides between them: at least one request of each tier is
        visible.

    Args:
        policy: Ranks the requests of one tenant.
        view: What the policy sees.
        shares: The tenants' counters.
        now: Seconds.
        apart: int64 [k], rows that stay held in any case.
    """
    table = view.table
    waiting = (table.state == WAITING) | (table.state == HELD)
    waiting[apart] = False
    fresh = np.flatnonzero(waiting & (table.preemptions == 0))
    tenants = table.tenant[fresh]
    if not len(fresh) or (tenants == tenants[0]).all():
        seen = fresh
    else:
        fresh = fresh[_in_order(policy, view, fresh, now)]
        lanes = [fresh[table.tier[fresh] == tier] for tier in Tier]
        parts = [_next(policy, view, shares, lane, now) for lane in lanes if len(lane)]
        seen = np.concatenate(parts)
    wanted = np.full(len(table.state), HELD)
    wanted[seen] = WAITING
    for state in (HELD, WAITING):
        table.move(fresh[(wanted[fresh] == state) & (table.state[fresh] != state)], state)


def waiting_tenants(view: View) -> np.ndarray:
    """Tenants of the waiting requests, held back or not."""
    state = view.table.state
    return np.asarray(view.table.tenant[(state == WAITING) | (state == HELD)])


def _in_order(policy: Policy, view: View, rows: np.ndarray, now: float) -> np.ndarray:
    """The rows in the policy's order if it has one, otherwise by arrival."""
    seq = view.table.seq[rows]
    with np.errstate(all="ignore"):
        standing = policy.queue_priority(Columns(view, rows, 0.0), now)
    if standing is None:
        return np.argsort(seq)
    return np.lexsort((seq, np.broadcast_to(np.asarray(standing, np.float64), rows.shape)))


def _next(
    policy: Policy, view: View, shares: FairShares, lane: np.ndarray, now: float
) -> np.ndarray:
    """The visible rows of this tier, at least one, until tokens, blocks or places are used up."""
    table, pool = view.table, view.pool
    running = table.in_state(RUNNING)
    decodes = table.decoding(running)
    tokens = policy.prefill_limit(view.limits) - int(table.pending(running[~decodes]).sum())
    if policy.mixed_batches:
        tokens -= int(np.count_nonzero(decodes))
    lower = table.tier[running] > table.tier[lane[0]]
    with np.errstate(all="ignore"):
        first, others = (Columns(view, rows, 0.0) for rows in (lane[:1], running))
        losers = running[lower & policy.makes_room(others, first, now)]
    places = policy.row_limit(view.limits) - len(running) + len(losers)
    blocks = pool.num_free + int(pool.private(losers).sum())
    length = table.pending(lane)  # cached prefixes are neither computed nor charged
    needed = pool.needed(lane, table.prompt_len[lane], np.zeros(len(lane), np.int64))
    taken = list[int]()
    for index in shares.in_turn(table.tenant[lane], length):
        taken.append(index)
        tokens, blocks = tokens - int(length[index]), blocks - int(needed[index])
        if tokens <= 0 or blocks <= 0 or len(taken) >= places:
            break
    return lane[taken]
