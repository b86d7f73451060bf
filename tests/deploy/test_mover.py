"""Answers that move while their replicas are well, as a router decides."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.deploy import replica as replica_module
from jaxserve.deploy.moves import mover as module
from jaxserve.deploy.moves import transport as transport_module
from jaxserve.deploy.moves.mover import Mover
from jaxserve.deploy.moves.relay import Relay, Unserved
from jaxserve.deploy.moves.transport import Transport
from jaxserve.deploy.replica import EngineReplica
from jaxserve.sched.routing.behind import Sent
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.server.moves.resume_point import Begun, Handle, ResumePoint
from tests.deploy.engine import Engine
from tests.deploy.test_moves import (
    FINGERPRINT,
    NOTHING,
    SCOPE,
    Fleet,
    Paced,
    events,
    point,
    served,
    unmarked,
)

LONG = 200
ASK = RoutingRequest(2, ttft=1.0, tbt=0.1)


class Decides:
    """A router that has one thing to say."""

    def __init__(
        self, to: str | None = None, late: Sequence[tuple[int, str]] = (), *, ahead: bool = False
    ) -> None:
        self.to, self.late, self.silent = to, list(late), frozenset[str]()
        self.at: dict[str, list[str]] = {}
        self.moves, self.ahead = True, ahead
        self.asked: list[tuple[str, RoutingRequest]] = []
        self.there: list[tuple[str, list[Sent]]] = []

    def goes_on_at(self, here: str, ask: RoutingRequest, now: float) -> str | None:
        self.asked.append((here, ask))
        return None if here == self.to else self.to

    def sends_ahead(self, here: str, ask: RoutingRequest, now: float) -> bool:
        return self.ahead

    def behind(self, here: str, there: Sequence[Sent], now: float) -> list[tuple[int, str]]:
        self.there.append((here, list(there)))
        late, self.late = self.late, []
        return late


class Asks:
    """What the ingress asks of replicas."""

    def __init__(self, replicas: dict[str, EngineReplica]) -> None:
        self.replicas = replicas

    async def offer(self, name: str, key: str) -> Handle | None:
        return await self.replicas[name].offer(key)

    async def bring(self, name: str, key: str, handle: Handle) -> bool:
        return await self.replicas[name].bring(key, handle)

    async def hand_over(self, name: str, key: str, ahead: bool) -> bool:
        return await self.replicas[name].hand_over(key, ahead)


Talk = Callable[[Mover, Fleet, Relay], AsyncGenerator[Any, None]]


async def whole(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
    async for piece in relay.pieces():
        yield piece


def said(
    decides: Decides,
    engines: Sequence[Engine],
    talk: Talk = whole,
    asks: type[Asks] = Asks,
    lost_after: Sequence[int] = (),
    **body: Any,
) -> tuple[str, Fleet]:
    """The text of an answer, and who said it. lost_after: as of `Fleet`."""
    fleets: list[Fleet] = []

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        fleet = Fleet(replicas, *lost_after)
        fleets.append(fleet)
        asked = asks({f"r{i}": replica for i, replica in enumerate(replicas)})
        mover = Mover(lambda: decides, asked)  # type: ignore[arg-type, return-value]
        fleet.watch = mover
        call = {"prompt": "Hi", "max_tokens": LONG, "stream": True, **body}
        relay = fleet.http("/v1/completions", call)
        mover.add(relay, ASK)
        async for piece in talk(mover, fleet, relay):
            yield piece
        mover.discard(relay)
        await asyncio.gather(*mover._tasks)
        assert not (mover._tasks or mover._calls or mover._there or decides.at)

    told = events(served(call, engines))
    texts = [choice["text"] for each in told for choice in each["choices"]]
    return "".join(texts), fleets[0]


NEVER = 10**9
TEXT = "".join(f" w{k}" for k in range(LONG))


@pytest.mark.promise(48)
def test_an_answer_goes_on_elsewhere_behind_its_prompt() -> None:
    """With what is cached of it, and nobody reads another word for that."""
    first, second, decides = Paced().run(), Paced().run(), Decides("r1")
    first.cache = {b"k" * 16: np.arange(8.0)}
    text, fleet = said(decides, [first, second])
    assert text == TEXT
    (point,) = fleet.points[1:]
    assert (point.why, len(point.moved), fleet.wheres[1].to) == ("prefilled", 1, "r1")
    ((here, ask),) = decides.asked
    assert here == "r0" and ask == ASK.after(1, FINGERPRINT)
    (request,) = second.requests
    assert [*request.pages] == [b"k" * 16] and len(first.cancelled) == 1


def test_it_stays_where_the_router_leaves_it() -> None:
    first, decides = Paced().run(), Decides(None)
    text, fleet = said(decides, [first])
    assert text == TEXT and len(fleet.points) == 1 and len(decides.asked) == 1


def test_continuations_move_once_all_have_begun() -> None:
    first, second, decides = Paced().run(), Paced().run(), Decides("r1")
    tokens: list[list[int]] = []

    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        relay._sequences = 2
        prefilled = mover.prefilled

        def noted(one: Relay) -> None:
            tokens.append([len(each.tokens) for each in one.point.outputs])
            prefilled(one)

        mover.prefilled = noted  # type: ignore[method-assign]
        async for piece in relay.pieces():
            yield piece

    _, fleet = said(decides, [first, second], talk, n=2)
    assert len(fleet.points) == 2
    assert len(tokens) == 1 and len(tokens[0]) == 2 and all(tokens[0])


@pytest.mark.parametrize("begun", [True, False])
def test_one_that_is_late_goes_elsewhere(begun: bool) -> None:
    """One that waits has nothing to take along."""
    first = Paced() if begun else Engine()
    second, decides = Paced().run(), Decides(late=[(0, "r1")])
    if begun:
        first.run()

    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        if not begun:

            async def later() -> None:
                while not relay.replica:  # until it says that it has the call
                    await asyncio.sleep(0)
                mover.heard(["r1"], False)
                mover.heard(["r0"], False)

            waiting = asyncio.create_task(later())
        async for piece in relay.pieces():
            yield piece
            if begun and not decides.there:
                mover.heard(["r0"], False)
        if not begun:
            await waiting
        await asyncio.to_thread(first.wait, lambda: not first.live)

    text, fleet = said(decides, [first, second], talk)
    assert text == TEXT and len(first.cancelled) == 1
    assert fleet.wheres[1].to == "r1" and bool(fleet.points[1].outputs) == begun
    assert fleet.points[1].why == ("late" if begun else "")
    ((here, (sent,)),) = decides.there
    assert here == "r0" and sent.begun == begun and sent.sent >= sent.arrived


def test_others_have_their_turn_while_it_looks_at_hundreds_of_replicas() -> None:
    decides, names = Decides(), [f"r{number}" for number in range(300)]
    mover = Mover(lambda: decides, lambda *_: None)  # type: ignore[arg-type, return-value]
    seen = list[int]()

    async def look() -> None:
        for name in names:
            relay = Relay(lambda *_: None, bool, ResumePoint(arrived=0.0), watch=mover)  # type: ignore[arg-type, return-value]
            mover.add(relay, ASK)
            relay._take([Begun(FINGERPRINT, name)])
        mover.heard([*names, "gone"], False)
        mover.heard(names[:1], False)
        while mover._tasks:
            seen.append(len(decides.there))
            await asyncio.sleep(0)

    asyncio.run(look())
    assert [here for here, _ in decides.there] == names, "each once"
    assert all(more - fewer <= 1 for fewer, more in itertools.pairwise(seen))


@pytest.mark.parametrize("begun", [True, False])
def test_one_whose_replica_is_out_of_reach_goes_elsewhere(begun: bool) -> None:
    """Though nobody knows whether it has died, and with what the client has."""
    first, second, decides = Paced(), Paced().run(), Decides()
    decides.silent = frozenset({"r0"})
    first.run() if begun else None

    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        async def later() -> None:
            while not relay.replica or (begun and not relay.point.outputs):
                await asyncio.sleep(0)
            decides.at[relay.point.key][:] = ["r0"]
            mover.heard(["r1"], False)

        waiting = asyncio.create_task(later())
        async for piece in relay.pieces():
            yield piece
        await waiting

    text, fleet = said(decides, [first, second], talk)
    assert text == TEXT and bool(fleet.points[1].outputs) == begun
    assert fleet.points[1].why == ("lost" if begun else "")


class _Another(Asks):
    async def hand_over(self, name: str, key: str, ahead: bool) -> bool:
        return await super().hand_over(name, "00" * 16, ahead)


class _Raises(Asks):
    async def hand_over(self, name: str, key: str, ahead: bool) -> bool:
        raise ConnectionError("it has died")


@pytest.mark.parametrize("asks", [_Another, _Raises])
def test_what_its_replica_does_not_leave_stays(asks: type[Asks]) -> None:
    text, fleet = said(Decides("r1"), [Paced().run()], asks=asks)
    assert text == TEXT and len(fleet.points) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_replica_that_does_not_answer_is_left(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_S", 0.01)

    class Silent(Asks):
        async def hand_over(self, name: str, key: str, ahead: bool) -> bool:
            await asyncio.Event().wait()
            return True

        async def offer(self, name: str, key: str) -> Handle | None:
            await asyncio.Event().wait()
            return None

    first = Paced()
    held = threading.Event()
    step = first.step

    def stalls() -> None:  # behind its first token
        if first.told:
            held.wait(60)
        step()

    first.step = stalls  # type: ignore[method-assign]
    try:
        text, fleet = said(
            Decides("r1", ahead=ahead),
            [first.run(), Paced().run()],
            whole_then(held.set),
            asks=Silent,
        )
    finally:
        held.set()
    assert text == TEXT and fleet.pages[1] is None and fleet.wheres[1].to == "r1"


ONE, TWO = b"1" * 16, b"2" * 16  # keys of blocks


def _cached(*engines: Engine) -> None:
    for engine in engines:
        engine.cache = {ONE: np.arange(8.0)}


class _GoesOn(Asks):
    """The answer goes on, and more of it is cached, while some of that is under way."""

    first: Engine
    told: int

    async def bring(self, name: str, key: str, handle: Handle) -> bool:
        before = self.first.told
        await asyncio.to_thread(self.first.wait, lambda: self.first.told >= before + 3)
        there = await super().bring(name, key, handle)
        self.first.cache[TWO] = np.arange(8.0, 16.0)
        type(self).told = before + 3
        return there


@pytest.mark.promise(48)
def test_what_is_cached_is_sent_while_the_answer_goes_on() -> None:
    """The rest comes with it, and nothing twice."""
    first, second, put = Paced().run(), Paced().run(), list[tuple[bytes, ...]]()
    _cached(first)
    _GoesOn.first = first

    class Counts(Transport):
        def put(self, pages: Any) -> Handle:
            put.append(tuple(pages))
            return super().put(pages)

    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        for replica in fleet._replicas:
            replica._transport = Counts()
        async for piece in relay.pieces():
            yield piece

    text, fleet = said(Decides("r1", ahead=True), [first, second], talk, _GoesOn)
    assert text == TEXT and put == [(ONE,), (TWO,)]
    (output,) = fleet.points[1].outputs
    assert len(output.tokens) >= _GoesOn.told
    assert {*second.requests[0].pages} == {ONE, TWO}


@pytest.mark.parametrize("lost", ["got", "there"])
def test_what_cannot_be_sent_ahead_comes_along_or_the_answer_stays(lost: str) -> None:
    first, second = Paced().run(), Paced().run()
    _cached(first)

    class Fails(Asks):
        async def bring(self, name: str, key: str, handle: Handle) -> bool:
            if lost == "there":
                raise ConnectionError("the other replica has died")
            handle.refs[:] = []  # they cannot be had
            handle.refs.append(None)
            self.replicas[name]._transport = Tampers("not got")
            there = await super().bring(name, key, handle)
            self.replicas[name]._transport = Transport()
            return there

    text, fleet = said(Decides("r1", ahead=True), [first, second], asks=Fails)
    assert text == TEXT
    if lost == "there":
        assert len(fleet.points) == 1
    else:
        assert {*second.requests[0].pages} == {ONE}


def test_what_was_brought_is_there_when_the_answer_comes_again() -> None:
    """Nobody sends it twice, and the first try may be refused."""
    engine, resumed = Paced().run(), point()

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        (replica,) = replicas
        assert await replica.bring(resumed.key, replica._transport.put({ONE: np.arange(8.0)}))
        scope = {**SCOPE, "path": "/v1/completions", "raw_path": b"/v1/completions"}
        body = json.dumps({"prompt": "Hi", "max_tokens": 4, "stream": True}).encode()
        given = scope, body, resumed.model_dump_json().encode()
        engine.max_requests = 0
        with pytest.raises(Unserved):
            async for _ in replica.http(*given, routing_request=NOTHING):
                pass
        engine.max_requests = 1
        async for piece in replica.http(*given, routing_request=NOTHING):
            yield piece

    assert b'"text":" w3"' in b"".join(part["body"] for part in unmarked(served(call, [engine])))
    assert {*engine.requests[0].pages} == {ONE}


@pytest.mark.parametrize("why", ["cached", "slow"])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_computed_as_soon_is_not_waited_for(why: str, ahead: bool) -> None:
    first, second = Paced().run(), Paced().run()
    _cached(first)
    if why == "cached":
        second.known = {ONE}
    else:
        second.recompute_s = 1e-3

    waited = list[float]()

    class Slow(Transport):
        def get(self, handle: Any, seconds: float) -> Any:
            waited.append(seconds)
            return super().get(handle, seconds)

    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        slow = fleet._replicas[1]._transport = Slow()
        for _ in range(4 * (why == "slow")):
            slow._came[""].append((time.monotonic(), 1 << 20, 1000.0))
        async for piece in relay.pieces():
            yield piece

    text, fleet = said(Decides("r1", ahead=ahead), [first, second], talk)
    assert text == TEXT and len(fleet.points) == 2 and not second.requests[0].pages
    assert not waited


def test_what_was_sent_ahead_in_vain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "_BROUGHT_S", 0.01)

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        handle = replicas[0]._transport.put({ONE: np.arange(8.0)})
        assert await replicas[0].bring("00" * 16, handle) and not handle.refs
        assert replicas[0]._brought
        async with asyncio.timeout(60):
            while replicas[0]._brought:
                await asyncio.sleep(0)
        yield []

    served(call, [Paced().run()])


def test_a_transport_knows_how_fast_it_was_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(transport_module.time, "monotonic", lambda: now)

    class Takes(Transport):
        def _fetch(self, refs: Any, seconds: float) -> Any:
            nonlocal now
            now += refs[0]
            return {}

    transport, large = Takes(), 64 << 20
    first = Handle([8.0], (), large, "there")
    assert transport.seconds(first) == 0
    transport.get(first, 60)
    assert (
        6 < transport.seconds(first) < 8
        and 3 < transport.seconds(first._replace(num_bytes=large // 2)) < 4
    )
    assert transport.seconds(first._replace(source="elsewhere")) == 0
    # That one small piece was late says little.
    transport.get(Handle([1.0], (), 1000, "elsewhere"), 60)
    assert transport.seconds(Handle([], (), 1000, "elsewhere")) < 0.001
    now += 61
    assert transport.seconds(first) == 0

    class Late(Takes):
        def _fetch(self, refs: Any, seconds: float) -> Any:
            super()._fetch([seconds], seconds)
            raise TimeoutError

    late, handle = Late(), Handle([], (), large)
    with pytest.raises(TimeoutError):
        late.get(handle, 0.5)
    assert late.seconds(handle) > 0.5, "nothing came in that time"


def whole_then(end: Callable[[], None]) -> Talk:
    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        async for piece in relay.pieces():
            yield piece
        end()

    return talk


def test_a_client_that_goes_in_the_middle_ends_it_everywhere() -> None:
    """The replica that has left it, too."""
    first, second = Paced().run(), Paced().run()
    engines = [first, second]

    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        pieces, count = relay.pieces(), 0
        async for piece in pieces:
            yield piece
            count += len(fleet.points) > 1
            if count == 2:
                break
        await pieces.aclose()
        for engine in engines:
            await asyncio.to_thread(engine.wait, lambda engine=engine: not engine.live)

    text, _ = said(Decides("r1"), engines, talk)
    assert TEXT.startswith(text) and [len(one.cancelled) for one in engines] == [1, 1]


class Tampers(Transport):
    """What is put comes late, not at all, or as something else."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def put(self, pages: Any) -> Any:
        if self._fault == "not put":
            raise MemoryError("the object store is full")
        return super().put(pages)

    def get(self, handle: Any, seconds: float) -> Any:
        if self._fault == "not got":
            raise ConnectionError("its owner has died")
        pages = super().get(handle, seconds)
        return {} if self._fault == "empty" else pages


@settings(max_examples=8, deadline=None)
@given(
    source=st.one_of(st.just(NEVER), st.integers(2, 8)),
    destination=st.one_of(st.just(NEVER), st.integers(0, 6)),
    pages=st.sampled_from(["", "not put", "not got", "empty"]),
    takes=st.sampled_from(["", "full", "another model"]),
    ahead=st.booleans(),
)
@pytest.mark.promise(48)
def test_either_side_may_fail_at_any_moment_of_a_move(
    source: int, destination: int, pages: str, takes: str, ahead: bool
) -> None:
    """Or be full, or serve another model by now: no token is lost, and none comes twice."""
    engines = [Paced().run() for _ in range(5)]
    for engine in engines:
        engine.cache = {b"k" * 16: np.arange(8.0)}
    if takes == "full":
        engines[1].max_requests = 0
    elif takes:
        engines[1].served = dataclasses.replace(engines[1].served, system_fingerprint="fp_2")

    async def talk(mover: Mover, fleet: Fleet, relay: Relay) -> AsyncGenerator[Any, None]:
        for replica in fleet._replicas:
            replica._transport = Tampers(pages)
        async for piece in relay.pieces():
            yield piece
        for engine in engines:
            await asyncio.to_thread(engine.wait, lambda engine=engine: not engine.live)

    decides = Decides("r1", ahead=ahead)
    text, fleet = said(
        decides, engines, talk, lost_after=[source, destination, NEVER], max_tokens=50
    )
    assert text == "".join(f" w{k}" for k in range(50))
    told = [[token for one in point.outputs for token in one.tokens] for point in fleet.points]
    assert all(one == [*range(100, 100 + len(one))] for one in told)
