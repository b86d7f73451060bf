"""How long tools take: from the end of the call that asks for one to the program's next call.

Such times have heavy tails, so means are taken without the extremes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

ENOUGH = 4
"""Least times of a tool for them to be used."""
KEPT = 128
"""Times kept of each tool, the latest."""
MOST_TOOLS, MOST_TENANTS = 64, 1024
"""Tools kept of each tenant, and tenants, those last used."""
EXTREME = 0.05
"""Share of the times at either end that count as the next ones do."""


class ToolTimes:
    """Times of tools in seconds, by tenant and the tool's name. The name "" stands for answers that
    ask for no tool, so for the time in which a person reads and writes."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, deque[float]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def add(self, tenant: str, tool: str, seconds: float) -> None:
        """Learns from one time of a tool."""
        tools = self._tenants.setdefault(tenant, OrderedDict())
        tools.setdefault(tool, deque(maxlen=KEPT)).append(seconds)
        tools.move_to_end(tool)
        self._tenants.move_to_end(tenant)
        if len(tools) > MOST_TOOLS:
            tools.popitem(last=False)
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)

    def quantile(self, tenant: str, tools: Iterable[str], share: float) -> float | None:
        """The time that the slowest of these tools, which run at once, takes at most in this share
        of cases, in seconds; None if none of them is known well enough."""
        known = self._known(tenant, tools)
        return max((_quantile(times, share) for times in known), default=None)

    def mean(self, tenant: str, tools: Iterable[str]) -> float | None:
        """The mean time of the slowest of these tools without extremes, in seconds; None if none of
        them is known well enough."""
        return max(map(_mean, self._known(tenant, tools)), default=None)

    def overall(self, tenant: str) -> float:
        """The mean time of a tenant's tools, each as often as it is known to run, without extremes,
        in seconds; 0 if nothing is known."""
        mine: Mapping[str, Sequence[float]] = self._tenants.get(tenant, {})
        known = [(len(times), _mean(sorted(times))) for times in mine.values()]
        return sum(n * mean for n, mean in known) / sum(n for n, _ in known) if known else 0.0

    def times(self, tenant: str, tools: Iterable[str]) -> np.ndarray:
        """Times that these tools, which run at once, may take, each as likely as the others, in
        ascending order, float64 [n]. Those of all of the tenant's tools if too few are known of
        these."""
        known = self._known(tenant, tools)
        if not known:
            mine: Mapping[str, Sequence[float]] = self._tenants.get(tenant, {})
            every = [time for tool, times in mine.items() if tool for time in times]
            return np.array(sorted(every))
        if len(known) == 1:
            return np.array(known[0])
        shares = (np.arange(KEPT) + 0.5) / KEPT
        slowest = [np.quantile(times, shares, method="inverted_cdf") for times in known]
        return np.asarray(np.max(slowest, axis=0))

    def _known(self, tenant: str, tools: Iterable[str]) -> list[list[float]]:
        mine = self._tenants.get(tenant)
        if mine is None:
            return []
        found = (mine.get(tool, ()) for tool in tools)
        return [sorted(times) for times in found if len(times) >= ENOUGH]


def _quantile(times: Sequence[float], share: float) -> float:
    return times[max(math.ceil(share * len(times)) - 1, 0)]


def _mean(times: Sequence[float]) -> float:
    least, most = _quantile(times, EXTREME), _quantile(times, 1 - EXTREME)
    return sum(min(max(time, least), most) for time in times) / len(times)
