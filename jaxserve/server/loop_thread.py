"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()


class LoopThread:
    """Runs coroutines for any thread. `close` it in the end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop and returns its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result. It is cancelled if the caller is
        interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Calls a plain function on the loop and returns its result."""

        async def called() -> T:
            return function()

        return self.run(called())

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yields the items of a generator that runs on the loop. Closing the iterator closes the
        generator."""
        queued: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def read() -> None:
            try:
                async with aclosing(items):
                    async for item in items:
                        queued.put(item)
            finally:
                queued.put(_END)

        reading = self.submit(read())
        try:
            while (item := queued.get()) is not _END:
                yield item
            reading.result()
        finally:
            reading.cancel()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
