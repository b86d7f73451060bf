"""How many calls may be open at once, whatever each waits for."""

from __future__ import annotations

import asyncio
import random

RETRY_S = 1.0
_STUCK_SHARE = 4  # calls whose reader has been given up on, for each that may be open


class Overloaded(RuntimeError):
    """More calls are open than the server takes; try again later."""


def retry_s() -> float:
    """When a refused call may come again, in seconds from now: not all of them at once."""
    return RETRY_S * random.uniform(0.5, 1.5)


class Admission:
    """Counts open calls, on the event loop's thread. A call is open from its first byte until its
    last has been taken, so one whose reader is slow counts after the engine is done with it, too.

    limit: calls open at once; 0 is any number. what: who says so, for those who are refused.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self.open = 0
        self.stuck = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once none is open."""
        await self._idle.wait()

    def enter(self) -> None:
        """One more is open. Raises Overloaded."""
        if not self._limit:
            pass
        elif self.open >= self._limit:
            problem = f"{self.open} calls are open, as many as {self._what}; try again later"
            raise Overloaded(problem)
        elif self.stuck >= _STUCK_SHARE * self._limit:
            raise Overloaded(f"{self.stuck} calls have readers that do not read; try again later")
        self.open += 1
        self._idle.clear()

    def leave(self) -> None:
        """One has ended."""
        self.open -= 1
        if not self.open:
            self._idle.set()

    def give_up(self) -> None:
        """An open one has been given up on: it keeps what the transport holds, not its place."""
        self.leave()
        self.stuck += 1

    def unstick(self) -> None:
        """One of those has gone."""
        self.stuck -= 1
