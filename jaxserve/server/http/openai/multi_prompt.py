"""Several prompts of one call, served concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import Request as HttpRequest

from jaxserve.engine.output import FinishReason
from jaxserve.server.requests.engine_requests import CallStreams
from jaxserve.server.requests.output_streams import Delta

T = TypeVar("T")
_LARGE = 8 << 10  # bytes of a delta


class ClientGone(Exception):
    """The client has hung up."""


class Generating(CallStreams):
    """The requests of one call, all with the same n. Continuation j of prompt i has the number
    i * n + j in the answer."""

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields (number, delta) as they come, until all continuations have ended. By the time the
        next one is asked for, all that a delta stands for has been sent. Raises the error of a
        stream that fails."""
        async with aclosing(self._deltas()) as deltas:
            async for number, delta in deltas:
                with self.passing(number, delta):
                    yield number, delta
        self.passed()

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        if len(self.streams) == 1:
            async for only in self._of(0):
                yield only
            return
        # One place: a slow reader gets fewer and larger pieces.
        news: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(1)

        async def read(place: int) -> None:
            async for numbered in self._of(place):
                await news.put(numbered)

        async def read_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for place in range(len(self.streams)):
                        group.create_task(read(place))
            except BaseExceptionGroup as errors:
                await news.put(errors.exceptions[0])
            else:
                await news.put(None)

        reading = asyncio.create_task(read_all())
        try:
            while (item := await news.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            reading.cancel()
            with suppress(BaseException):
                await reading

    async def _of(self, place: int) -> AsyncGenerator[tuple[int, Delta], None]:
        stream, n = self.streams[place], self.wanted[place].sampling.n
        while (delta := await stream.next()) is not None:
            if delta.last is not None and delta.last.finish_reason is FinishReason.CANCELLED:
                raise self._requests.cancelled_error()
            yield place * n + delta.index, delta
            if delta.size > _LARGE:
                await asyncio.sleep(0)  # more may be waiting, and each takes milliseconds


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T:
    """Returns the work's result. If the client hangs up, cancels the work and raises ClientGone."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
