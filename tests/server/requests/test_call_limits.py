"""What bounds calls: how many may be open, how long an engine may do nothing, and a client read
nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable

import pytest

from jaxserve.server.access.api_keys import Caller
from jaxserve.server.requests.admission import Admission, Overloaded
from jaxserve.server.requests.output_streams import SlowReader
from jaxserve.server.requests.watchdog import watch_for_stalls
from jaxserve.server.requests.write_timeout import WriteTimeout
from tests.server.access.test_keys import key
from tests.server.fake_engine import FakeEngine

STALL_S = 8.0


class Scripted(FakeEngine):
    """What `stats` says at each look: (steps so far, running, waiting). Then it ends."""

    def __init__(self, script: Iterable[tuple[int, int, int]]) -> None:
        super().__init__()
        self.script = iter(script)

    def stats(self):
        try:
            steps, running, waiting = next(self.script)
        except StopIteration:
            raise asyncio.CancelledError from None
        return dataclasses.replace(super().stats(), steps=steps, running=running, waiting=waiting)


def told(
    *script: tuple[int, int, int], held_up: Iterable[float] = ()
) -> list[tuple[float, str | None]]:
    """When it was told of what, the first look being at 0 s and one each second. held_up: by how
    much later the first looks are."""
    now, news, late = 0.0, [], iter(held_up)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + next(late, 0.0)

    async def tell(why: str | None) -> None:
        news.append((now, why))

    async def play() -> None:
        try:
            await watch_for_stalls(Scripted(script), STALL_S, tell, clock=lambda: now, sleep=sleep)
        except asyncio.CancelledError:
            return

    asyncio.run(play())
    return news


def test_no_step_for_so_long_with_work_in_flight_is_a_stall() -> None:
    why = "the engine has finished no step for 8 s, with {} in flight"
    assert told((5, 1, 0), *[(5, 1, 0)] * 20) == [(8.0, why.format("1 request"))]
    assert told((0, 0, 0), *[(0, 2, 3)] * 20) == [(8.0, why.format("5 requests"))]
    assert told((0, 0, 0), *[(0, 0, 0)] * 50, *[(0, 0, 1)] * 7) == []
    assert [at for at, _ in told((0, 0, 0), *[(0, 0, 0)] * 50, *[(0, 0, 1)] * 8)] == [58.0]


def test_steps_however_rare_are_no_stall() -> None:
    assert told((0, 1, 0), *[(look // 7, 1, 0) for look in range(100)]) == []


def test_it_is_told_once_and_again_when_the_engine_goes_on() -> None:
    script = [(5, 1, 0)] * 12 + [(6, 1, 0)] * 3 + [(6, 1, 0)] * 20
    news = told((5, 1, 0), *script)
    assert [(at, why is None) for at, why in news] == [(8.0, False), (13.0, True), (21.0, False)]
    gone = told((5, 1, 0), *[(5, 1, 0)] * 9, (5, 0, 0), (5, 0, 0))
    assert [(at, why is None) for at, why in gone] == [(8.0, False), (10.0, True)]


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    assert told((5, 1, 0), (5, 1, 0), (5, 1, 0), (6, 1, 0), held_up=[0, 1000]) == []
    news = told((5, 1, 0), *[(5, 1, 0)] * 9, held_up=[1000])
    assert [at for at, _ in news] == [1007.0]


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


ALICE, BOB = Caller(key("alice")), Caller(key("bob"))


def filled(admission: Admission, caller: Caller) -> int:
    """How many calls more of theirs are let in."""
    for count in range(1000):
        try:
            admission.enter(caller)
        except Overloaded:
            return count
    return 1000


def test_one_key_may_have_all_and_several_leave_places_for_each_other() -> None:
    admission = Admission(64, "server.max_calls")
    assert filled(admission, ALICE) == 64
    with pytest.raises(Overloaded, match=r"^64 calls are open, as many as server\.max_calls; try"):
        admission.enter(BOB)
    for _ in range(64):
        admission.leave(ALICE)
    assert filled(admission, ALICE) == 56
    with pytest.raises(Overloaded, match="key alice: 56 calls are open, its share of 64"):
        admission.enter(ALICE)
    assert filled(admission, BOB) == 7
    assert filled(admission, Caller(key("carol"))) == 1  # who has none may always have one


def test_weights_count() -> None:
    heavy = Caller(key("heavy", weight=8))
    admission = Admission(64, "server.max_calls")
    admission.enter(BOB)
    assert filled(admission, ALICE) == 56
    for _ in range(56):
        admission.leave(ALICE)
    assert filled(admission, heavy) == 62


def test_where_there_is_no_limit_or_no_key_there_are_no_shares() -> None:
    assert filled(Admission(0, "server.max_calls"), ALICE) == 1000
    assert filled(Admission(64, "server.max_calls"), Caller()) == 64
