"""Threads that serve tenants by turns: one's long queue does not make another wait."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class TenantThreads:
    """A few threads. The next that is free goes to the tenant who waits and whose last turn is
    longest ago, and to the work of one in the order in which it came. `run` is called on the event
    loop on which this is made.

    Args:
        threads: how many.
        name: the threads' names begin with it.
        each: the most of them that one tenant has at a time; 0 allows all.
        keyless: likewise for "", the only tenant where no keys are needed; 0 is as `each`.
    """

    def __init__(self, threads: int, name: str, each: int = 0, keyless: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._loop = asyncio.get_running_loop()
        self._free, self._each = threads, each or threads
        self._keyless = keyless or self._each
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns: dict[str, int] = {}  # of who waits or has a thread: number of the last turn
        self._count = 0

    async def run(self, tenant: str, work: Callable[..., T], *arguments: Any) -> T:
        """Returns work(*arguments), run on a thread when it is the tenant's turn. A caller that is
        cancelled before the turn leaves the queue; one that is cancelled later keeps the thread
        until the work ends, as no thread can be stopped.

        Args:
            tenant: name of the API key, "" for none.
            work: any thread may call it.
            arguments: of the work.
        """
        await self._turn(tenant)
        try:
            future = self._pool.submit(work, *arguments)
        except BaseException:
            self._give_back(tenant)
            raise
        future.add_done_callback(lambda _: self._ended(tenant))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Cancels who waits. Threads end with the work that they have."""
        for queue in self._waiting.values():
            for turn in queue:
                turn.cancel()
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        # Whoever waits while a thread is free has as many as one may have.
        if self._free and self._may_have_more(tenant):
            self._take(tenant)
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self._give_back(tenant)
            elif turn in queue:
                queue.remove(turn)
                self._forget(tenant)
            raise

    def _may_have_more(self, tenant: str) -> bool:
        return self._held[tenant] < (self._each if tenant else self._keyless)

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1
        self._count += 1
        self._turns[tenant] = self._count

    def _ended(self, tenant: str) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._give_back, tenant)

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
            self._forget(tenant)
        for following in sorted(self._waiting, key=lambda name: self._turns.get(name, 0)):
            if not self._free:
                break
            if self._may_have_more(following):
                self._serve(following)

    def _serve(self, tenant: str) -> None:
        """The first of its queue has a turn, if any still waits there."""
        queue = self._waiting[tenant]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                self._take(tenant)
                turn.set_result(None)
                break
        self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if not self._waiting.get(tenant):
            self._waiting.pop(tenant, None)
            if tenant not in self._held:
                self._turns.pop(tenant, None)
