"""How long tools take: from the end of the call that asks for one to the program's next call.

Such times have heavy tails, so means are taken without the extremes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

import numpy as np

ENOUGH = 4
"""Least times of a tool for them to be used."""
KEPT = 128
"""Times kept of each tool, the latest."""
MOST_TOOLS, MOST_TENANTS = 64, 1024
"""Tools kept of each tenant, and tenants, those last used."""
EXTREME = 0.05
"""Share of the times at either end that count as the next ones do."""


class _Times:
    """The latest times of a tool."""

    __slots__ = ("_latest", "_mean", "ordered")

    def __init__(self) -> None:
        self._latest = deque[float]()
        self.ordered: list[float] = []
        self._mean: float | None = None

    def add(self, seconds: float) -> None:
        """Adds a time, in place of the oldest if there are enough."""
        if len(self._latest) == KEPT:
            del self.ordered[bisect_left(self.ordered, self._latest.popleft())]
        self._latest.append(seconds)
        insort(self.ordered, seconds)
        self._mean = None

    @property
    def mean(self) -> float:
        """The mean without extremes."""
        if self._mean is None:
            least, most = self.quantile(EXTREME), self.quantile(1 - EXTREME)
            self._mean = sum(min(max(t, least), most) for t in self.ordered) / len(self.ordered)
        return self._mean

    def quantile(self, share: float) -> float:
        """The least time that this share of the times do not exceed."""
        return self.ordered[max(math.ceil(share * len(self.ordered)) - 1, 0)]


_NOTHING: Mapping[str, _Times] = {}


class ToolTimes:
    """Times of tools in seconds, by tenant and the tool's name. The name "" stands for answers that
    ask for no tool, so for the time in which a person reads and writes."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, _Times]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def add(self, tenant: str, tool: str, seconds: float) -> None:
        """Learns from one time of a tool."""
        tools = self._tenants.setdefault(tenant, OrderedDict())
        tools.setdefault(tool, _Times()).add(seconds)
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
        return max((times.quantile(share) for times in known), default=None)

    def mean(self, tenant: str, tools: Iterable[str]) -> float | None:
        """The mean time of the slowest of these tools without extremes, in seconds; None if none of
        them is known well enough."""
        return max((times.mean for times in self._known(tenant, tools)), default=None)

    def overall(self, tenant: str) -> float:
        """The mean time of a tenant's tools, each as often as it is known to run, without extremes,
        in seconds; 0 if nothing is known."""
        mine = self._tenants.get(tenant, _NOTHING)
        known = [(len(times.ordered), times.mean) for times in mine.values()]
        return sum(n * mean for n, mean in known) / sum(n for n, _ in known) if known else 0.0

    def times(self, tenant: str, tools: Iterable[str]) -> np.ndarray:
        """Times that these tools, which run at once, may take, each as likely as the others, in
        ascending order, float64 [n]. Those of all of the tenant's tools if too few are known of
        these."""
        known = [times.ordered for times in self._known(tenant, tools)]
        if not known:
            mine = self._tenants.get(tenant, _NOTHING)
            return np.array(sorted(t for tool in mine if tool for t in mine[tool].ordered))
        if len(known) == 1:
            return np.array(known[0])
        shares = (np.arange(KEPT) + 0.5) / KEPT
        slowest = [np.quantile(times, shares, method="inverted_cdf") for times in known]
        return np.asarray(np.max(slowest, axis=0))

    def _known(self, tenant: str, tools: Iterable[str]) -> list[_Times]:
        mine = self._tenants.get(tenant)
        if mine is None:
            return []
        found = (mine.get(tool) for tool in tools)
        return [times for times in found if times is not None and len(times.ordered) >= ENOUGH]
