"""Limits how long a client may take to read a message, at every frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from jaxserve.server.requests.output_streams import SlowReader


class WriteTimeout:
    """Ends writes that take longer than `limit_s` seconds. On the event loop's thread. There is a
    write for every token of every stream, so a single timer watches the oldest of them;
    `asyncio.timeout` would set and cancel one for each."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: dict[asyncio.Task[object], float] = {}  # loop time; the oldest first
        self._late: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, write: Awaitable[None]) -> None:
        """Waits for a write. A task has one write at a time. Raises SlowReader."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        self._since[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self.limit_s, self._look)
        try:
            await write
        except asyncio.CancelledError:
            if task in self._late and task.uncancel() <= cancelled:
                limit = f"server.write_timeout_s is {self.limit_s:g}"
                raise SlowReader(f"the call is read too slowly: {limit}") from None
            raise
        finally:
            del self._since[task]
            self._late.discard(task)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for task, since in self._since.items():
            if task in self._late:
                continue
            if loop.time() < since + self.limit_s:
                self._timer = loop.call_at(since + self.limit_s, self._look)
                return
            self._late.add(task)
            task.cancel()
