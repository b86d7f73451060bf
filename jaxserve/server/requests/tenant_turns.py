"""Threads that serve tenants in turn, so that a tenant's long queue does not delay other
tenants."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class TenantThreads:
    """A few threads. A free thread goes to the waiting tenant whose last turn is longest ago. A
    tenant's work runs in the order in which it came. Create this and call `run` on the same event
    loop.

    Args:
        threads: number of threads.
        name: prefix of the threads' names.
        each: most threads that one tenant has at a time; 0 allows all.
        keyless: likewise for "", the only tenant if no keys are needed; 0 is as `each`.
    """

    def __init__(self, threads: int, name: str, each: int = 0, keyless: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._loop = asyncio.get_running_loop()
        self._free, self._each = threads, each or threads
        self._keyless = keyless or self._each
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns: dict[str, int] = {}  # last turn's number of tenants with work
        self._count = 0

    async def run(self, tenant: str, work: Callable[..., T], *arguments: Any) -> T:
        """Returns work(*arguments), run on a thread when it is the tenant's turn. A caller that is
        cancelled before the turn leaves the queue; one that is cancelled later keeps the thread
        until the work ends, as no thread can be stopped.

        Args:
            tenant: name of the API key, "" for none.
            work: a function that any thread may call.
            arguments: arguments of the work.
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
        """Cancels all waiting work. Threads end after their current work."""
        for queue in self._waiting.values():
            for turn in queue:
                turn.cancel()
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        # If a thread is free, every waiting tenant already has its most threads.
        if self._free and self._may_have_more(tenant):
            self._take(tenant)
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled as its turn came
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
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
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
        """Gives a turn to the first in the tenant's queue that still waits."""
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
