"""Which programs pause as a whole while the caches of all do not fit.

The next call of a program finds its cache only if nothing has taken its place, so if too many
programs take turns each computes its context again and again (ThunderAgent, arXiv 2602.13692). Then
the calls of some wait. Tenants have memory by their weights; of a tenant's programs, those that can
still be in time go on first, in order of the time left beyond what they need (HexAGenT, arXiv
2605.16637, ranks by a ratio of the two).
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING

TOOL = 2.0
"""Seconds for which the cache of a program whose tool runs counts as in use."""


class Programs:
    """The programs with deadlines whose calls run, or have just ended."""

    def __init__(self) -> None:
        # By number: tokens of the context, tenant, and its weight.
        self._contexts: dict[int, tuple[float, int, float]] = {}

    def pausing(
        self, view: View, running: np.ndarray, waiting: np.ndarray, clock: float, pace: float
    ) -> np.ndarray:
        """Which of the waiting rows are calls of programs that pause, bool [m].

        Args:
            view: What the policy sees.
            running: int64 [n], rows that hold caches.
            waiting: int64 [m], rows that hold none.
            clock: When the planned step begins, seconds.
            pace: Recent seconds of a step.
        """
        table, found = view.table, np.zeros(len(waiting), bool)
        rows = np.concatenate([running, waiting])
        rows = rows[table.program_deadline[rows] < np.inf]
        if not len(rows):
            return found
        numbers, first, which = np.unique(
            table.program[rows], return_index=True, return_inverse=True
        )
        known = table.prompt_len[rows] + table.generated[rows]
        tokens = np.bincount(which, weights=known)
        goes_on = np.bincount(which[table.state[rows] == RUNNING], minlength=len(numbers)) > 0
        others = running[table.program_deadline[running] == np.inf]
        used = float(view.pool.private(others).sum()) * view.pool.block_size
        used += float(tokens[goes_on].sum())
        room = view.pool.pool_tokens + view.host.capacity / slots_for(1)
        shares = dict(zip(table.tenant[rows].tolist(), table.weight[rows].tolist(), strict=True))
        room -= used + self._just_ended(view, numbers, clock, room, shares)
        slack = np.full(len(numbers), np.inf)
        np.minimum.at(slack, which, _slack(view, rows, clock, pace))
        order = _in_turns(view, rows[first], tokens, slack, goes_on)
        goes_on[order[tokens[order].cumsum() <= room]] = True
        if not (goes_on.any() or len(running)):
            goes_on[order[0]] = True
        calls = rows[first[goes_on]]
        columns = (numbers[goes_on], tokens[goes_on], table.tenant[calls], table.weight[calls])
        for number, held, tenant, weight in zip(*(c.tolist() for c in columns), strict=True):
            self._contexts[number] = held, tenant, weight
        own = table.program_deadline[waiting] < np.inf
        at = np.searchsorted(numbers, table.program[waiting[own]])
        found[own] = ~goes_on[at]
        return found

    def _just_ended(
        self, view: View, numbers: np.ndarray, clock: float, room: float, shares: dict[int, float]
    ) -> float:
        """Tokens of the programs, other than these, that were let on and whose tools run for a
        short time yet; of a tenant's no more than its share. Forgets those whose tools take longer.

        Args:
            view: What the policy sees.
            numbers: int64 [n], the programs with calls.
            clock: When the planned step begins, seconds.
            room: Tokens that all may have.
            shares: By tenant, the weights of those with calls.
        """
        there, owed = set(numbers.tolist()), dict[int, float]()
        for number, (tokens, tenant, weight) in [*self._contexts.items()]:
            since = None if number in there else view.programs.silent_since(number)
            if since is None or clock - since > TOOL:
                del self._contexts[number]
            else:
                owed[tenant] = owed.get(tenant, 0.0) + tokens
                shares = {tenant: weight, **shares}
        total = sum(shares.values())
        return sum(min(owed[tenant], room * shares[tenant] / total) for tenant in owed)


def _in_turns(
    view: View, rows: np.ndarray, tokens: np.ndarray, slack: np.ndarray, goes_on: np.ndarray
) -> np.ndarray:
    """The programs that wait in the order in which they go on, int64 [m]: those that can be in time
    first; tenants have memory by their weights, whatever their deadlines say; of one tenant, those
    with the least slack.

    Args:
        view: What the policy sees.
        rows: int64 [n], a call of each program.
        tokens: float64 [n], of its context.
        slack: float64 [n], seconds.
        goes_on: bool [n], whose calls run.
    """
    table, late = view.table, slack < 0
    order = np.lexsort((slack, late, ~goes_on))
    tenant, taken = table.tenant[rows[order]], tokens[order]
    turn = np.zeros(len(order))  # what the tenant has with it, for its weight
    for one in np.unique(tenant):
        own = tenant == one
        turn[own] = taken[own].cumsum()
    turn /= table.weight[rows[order]]
    order = order[np.lexsort((turn, late[order]))]
    return order[~goes_on[order]]


def _slack(view: View, rows: np.ndarray, clock: float, pace: float) -> np.ndarray:
    """Seconds that each row's program has beyond what it still needs: this call's tokens, the calls
    expected after it, each like this one, and their tools; float64 [n]."""
    table = view.table
    calls = table.tokens_ahead(rows) * pace * (1.0 + table.calls_after[rows])
    return np.asarray(table.program_deadline[rows] - clock - calls - table.tool_time_after[rows])
