"""Who takes too long to read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jaxserve.server.requests.output_streams import SlowReader
from jaxserve.server.requests.write_timeout import WriteTimeout

LIMIT_S = 0.05


async def never() -> None:
    await asyncio.Event().wait()


def in_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def test_each_write_that_takes_too_long_ends_and_no_other() -> None:
    async def body() -> None:
        writes, go_on = WriteTimeout(LIMIT_S), asyncio.Event()

        async def quick() -> str:
            for _ in range(100):
                await writes.wait(asyncio.sleep(0))
            await go_on.wait()  # longer than the limit, between two writes
            await writes.wait(asyncio.sleep(0))
            return "read"

        async def slow() -> str:
            await writes.wait(asyncio.sleep(0))
            try:
                await writes.wait(never())
            except SlowReader as error:
                return str(error)
            return "read"

        reading, *stuck = (asyncio.create_task(each()) for each in (quick, slow, slow))
        for task in stuck:
            assert await task == "the call is read too slowly: server.write_timeout_s is 0.05"
            assert not task.cancelling()
        first = asyncio.create_task(slow())  # once nobody is left to look at
        await asyncio.sleep(LIMIT_S / 2)
        second = asyncio.create_task(slow())  # whose time is not up with the first one's
        for task in (first, second):
            assert "too slowly" in await task
        go_on.set()
        assert await reading == "read"

    in_loop(body)


def test_a_write_that_fails_or_is_cancelled_says_so() -> None:
    async def body() -> None:
        writes = WriteTimeout(LIMIT_S)

        async def lost() -> None:
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await writes.wait(lost())
        task = asyncio.create_task(writes.wait(never()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(body)


def test_who_is_cancelled_while_late_is_cancelled() -> None:
    async def body() -> None:
        writes = WriteTimeout(LIMIT_S)
        begun = asyncio.Event()

        async def stubborn() -> None:
            try:
                await never()
            finally:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                begun.set()

        task = asyncio.create_task(writes.wait(stubborn()))
        await begun.wait()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(body)
