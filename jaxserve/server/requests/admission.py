"""Limits how many calls may be open at once, whatever they wait for."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from jaxserve.sched.fairness.fair_share import may_have
from jaxserve.server.access.api_keys import Caller

RETRY_S = 1.0
NOBODY = Caller()
_STUCK_SHARE = 4  # most calls with stuck readers, for each that may be open


class Overloaded(RuntimeError):
    """More calls are open than the server takes; try again later."""


def retry_s() -> float:
    """Seconds after which a refused call may come again; random, so that they do not all come at
    once."""
    return RETRY_S * random.uniform(0.5, 1.5)


class Admission:
    """Counts open calls, on the event loop's thread. A call is open from its first byte until its
    last one has been read, so a slow reader's call counts even when the engine is done with it. If
    several API keys call, none gets more than its share.

    Args:
        limit: most open at once; 0 is any number.
        what: who has the limit, for errors: "as many as {what}".
        unit: what is counted, for errors.

    Attributes:
        open: number open now.
        stuck: number of calls that were given up on and still hold their connection.
    """

    def __init__(self, limit: int, what: str, unit: str = "calls are open") -> None:
        self._limit, self._what, self._unit = limit, what, unit
        self.open = 0
        self.stuck = 0
        self._mine: Counter[str] = Counter()  # by key
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once nothing is open."""
        await self._idle.wait()

    def enter(self, caller: Caller = NOBODY, count: int = 1) -> None:
        """Counts `count` more for the caller. Raises Overloaded."""
        self._mine.setdefault(caller.name, 0)
        if self._limit:
            self._check(caller, count)
        self.open += count
        self._mine[caller.name] += count
        self._idle.clear()

    def leave(self, caller: Caller = NOBODY, count: int = 1) -> None:
        """Stops counting `count` of the caller's."""
        self.open -= count
        self._mine[caller.name] -= count
        if not self.open:
            self._idle.set()

    def give_up(self, caller: Caller = NOBODY) -> None:
        """Moves a call of the caller from `open` to `stuck`, since its reader does not read."""
        self.leave(caller)
        self.stuck += 1

    def unstick(self) -> None:
        """Stops counting a stuck call."""
        self.stuck -= 1

    def _check(self, caller: Caller, count: int) -> None:
        mine, again = self._mine[caller.name], "try again later"
        if self.open + count > self._limit:
            raise Overloaded(f"{self.open:,} {self._unit}, as many as {self._what}; {again}")
        if self.stuck >= _STUCK_SHARE * self._limit:
            raise Overloaded(f"{self.stuck} calls have readers that do not read; {again}")
        share = may_have(self.open, self._limit, caller.weight)
        if len(self._mine) > 1 and mine and mine + count > share:
            of = f"its share of {self._limit:,} ({self._what})"
            raise Overloaded(f"key {caller.name}: {mine:,} {self._unit}, {of}; {again}")
