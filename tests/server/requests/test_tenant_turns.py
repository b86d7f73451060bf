"""Whose turn it is on a few threads that many tenants share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve.server.requests.tenant_turns import TenantThreads


class Work:
    """Pieces of work that end when they are told to, and the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def __call__(self, name: str) -> str:
        self.begun.append(name)
        assert self._gate(name).wait(60)
        return name

    def end(self, *names: str) -> None:
        for name in names:
            self._gate(name).set()

    def _gate(self, name: str) -> threading.Event:
        return self._gates.setdefault(name, threading.Event())


def play(scene: Callable[[Work], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(Work()), 60))


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0)


@pytest.mark.promise(31)
def test_a_tenant_waits_for_one_piece_of_another_however_many_it_has() -> None:
    async def scene(work: Work) -> None:
        threads = TenantThreads(1, "test")
        crowd = [asyncio.create_task(threads.run("crowd", work, f"c{i}")) for i in range(4)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(threads.run(name, work, name)) for name in "ab"]
        await asyncio.sleep(0)
        others.append(asyncio.create_task(threads.run("a", work, "a2")))
        await asyncio.sleep(0)
        work.end("c0", "c1", "c2", "c3", "a", "b", "a2")
        assert await asyncio.gather(*crowd, *others) == ["c0", "c1", "c2", "c3", "a", "b", "a2"]
        assert work.begun == ["c0", "a", "b", "c1", "a2", "c2", "c3"]
        threads.close()

    play(scene)


def test_a_tenant_has_no_more_threads_than_one_may_have() -> None:
    async def scene(work: Work) -> None:
        threads = TenantThreads(3, "test", each=2)
        crowd = [asyncio.create_task(threads.run("crowd", work, f"c{i}")) for i in range(3)]
        await until(lambda: len(work.begun) == 2)
        work.end("a")
        assert await threads.run("a", work, "a") == "a"
        assert sorted(work.begun) == ["a", "c0", "c1"]
        work.end("c0", "c1", "c2")
        assert await asyncio.gather(*crowd) == ["c0", "c1", "c2"]
        threads.close()

    play(scene)


def test_who_has_no_key_may_have_more_threads() -> None:
    async def scene(work: Work) -> None:
        threads = TenantThreads(2, "test", each=1, keyless=2)
        work.end("b")
        crowd = [asyncio.create_task(threads.run("", work, name)) for name in "ab"]
        assert await crowd[1] == "b"
        work.end("a")
        assert await crowd[0] == "a"
        threads.close()

    play(scene)


def test_who_is_cancelled_leaves_the_queue_and_keeps_a_thread_until_its_work_ends() -> None:
    async def scene(work: Work) -> None:
        threads = TenantThreads(1, "test")
        runs = asyncio.create_task(threads.run("a", work, "runs"))
        await until(lambda: work.begun == ["runs"])
        waits = asyncio.create_task(threads.run("a", work, "waits"))
        after = asyncio.create_task(threads.run("b", work, "after"))
        await asyncio.sleep(0)
        for task in (runs, waits):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert work.begun == ["runs"]
        work.end("runs", "after")
        assert await after == "after"
        assert work.begun == ["runs", "after"]
        threads.close()

    play(scene)


def test_a_turn_that_comes_as_its_caller_is_cancelled_goes_to_the_next() -> None:
    class Cancels(TenantThreads):
        def _give_back(self, tenant: str) -> None:
            super()._give_back(tenant)
            second.cancel()  # which has the turn, and has not woken

    async def scene(work: Work) -> None:
        nonlocal second
        threads = Cancels(1, "test")
        first = asyncio.create_task(threads.run("a", work, "first"))
        await until(lambda: work.begun == ["first"])
        second = asyncio.create_task(threads.run("b", work, "second"))
        third = asyncio.create_task(threads.run("c", work, "third"))
        await asyncio.sleep(0)
        work.end("first", "third")
        assert await asyncio.gather(first, third) == ["first", "third"]
        assert second.cancelled()
        assert work.begun == ["first", "third"]
        threads.close()

    second: asyncio.Task[str]
    play(scene)


def test_errors_come_to_the_caller_and_closing_ends_the_waiting() -> None:
    def fails() -> None:
        raise ValueError("no")

    async def scene(work: Work) -> None:
        threads = TenantThreads(1, "test")
        with pytest.raises(ValueError, match="no"):
            await threads.run("a", fails)
        runs = asyncio.create_task(threads.run("a", work, "runs"))
        waits = asyncio.create_task(threads.run("a", work, "waits"))
        await until(lambda: work.begun == ["runs"])
        threads.close()
        with pytest.raises(asyncio.CancelledError):
            await waits
        work.end("runs")
        assert await runs == "runs"
        with pytest.raises(RuntimeError):
            await threads.run("a", work, "late")

    play(scene)
