"""Whether an engine that hangs is told from one that is idle, or slow, on a clock of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable

from jaxserve.server.requests.watchdog import watch_for_stalls
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
