"""Answers that go on at another replica: nobody who reads them can tell, at any door."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import pickle
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from jaxserve.client import make_request
from jaxserve.deploy import replica as replica_module
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.moves import relay as relay_module
from jaxserve.deploy.moves.relay import Pieces, Relay, ReplicaLost, Unserved, Watch
from jaxserve.deploy.moves.roster import Roster
from jaxserve.deploy.moves.transport import Transport
from jaxserve.deploy.replica import EngineReplica
from jaxserve.deploy.replicas import NOTHING, Where
from jaxserve.deploy.response_kind import grpc_response_kind, http_response_kind
from jaxserve.engine.errors import HostLost
from jaxserve.engine.startup import build
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.server.moves import passage as passage_module
from jaxserve.server.moves import resume_point
from jaxserve.server.moves.passage import CannotResume, Passage
from jaxserve.server.moves.resume_point import (
    Answered,
    Begun,
    Cache,
    Handle,
    Passed,
    ResumePoint,
    unmarked,
)
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.output_streams import Delta
from tests.deploy.engine import Engine
from tests.deploy.test_replica import SCOPE, serving
from tests.server.logging_kept import logging_kept

KEY, ARRIVED = "ab" * 16, 1_700_000_000.25
HI = [{"role": "user", "content": "Hi"}]
LENGTH, FINGERPRINT = 8, "fp_0123456789abcdef"
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (
        "/v1/completions",
        {"prompt": "Hi", "logprobs": 1, "stream_options": {"include_usage": True}},
    ),
    "prompts": ("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2, "temperature": 1.0}),
    "chat": ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    "messages": ("/v1/messages", {"messages": HI, "model": "fake"}),
    "ollama": ("/api/chat", {"messages": HI, "model": "fake"}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
}
LIMITS = {"responses": "max_output_tokens"}
VARYING = {
    *("timings", "moved", "created_at", "completed_at", "total_duration", "slo"),
    *("prompt_eval_duration", "eval_duration", "system_fingerprint"),
}


class Paced(Engine):
    """Steps once all that it has said was passed on: every piece has a token."""

    def __init__(self, max_requests: int = 64) -> None:
        super().__init__(max_requests)
        self.told = 0

    def run(self) -> Paced:
        def loop() -> None:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.live or self.stopped)
                    if self.stopped:
                        return
                    due = self.told + sum(len(each.produced) for each in self.live.values())
                self.step()
                self._wait_for(due)

        self._thread = threading.Thread(target=loop, daemon=True)
        self._thread.start()
        return self

    def _wait_for(self, due: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.told >= due or not self.live or self.stopped)

    def passed(self) -> None:
        with self.changed:
            self.told += 1
            self.changed.notify_all()


class Fleet:
    """Replicas of engines, one of which is lost after each of the numbers of pieces."""

    def __init__(self, replicas: Sequence[EngineReplica], *lost_after: int) -> None:
        self._replicas, self._lost_after = list(replicas), list(lost_after)
        self.points: list[ResumePoint] = []
        self.wheres: list[Where] = []
        self.watch: Watch | None = None
        self.leaving: set[str] = set()
        self.pages: list[Any] = []

    def http(self, path: str, body: dict[str, Any]) -> Relay:
        scope = {**SCOPE, "path": path, "raw_path": path.encode()}

        def send(replica: EngineReplica, resume: bytes, pages: Any) -> Pieces:
            said = json.dumps(body).encode()
            return replica.http(scope, said, resume, routing_request=NOTHING, pages=pages)

        return self._relay(send, http_response_kind)

    def grpc(self, message: pb.GenerateRequest) -> Relay:
        def send(replica: EngineReplica, resume: bytes, pages: Any) -> Pieces:
            given = ("/jaxserve.v1.Generation/Generate", message.SerializeToString(), (), "ipv4:1")
            return replica.grpc(*given, resume, routing_request=NOTHING, pages=pages)

        return self._relay(send, grpc_response_kind)

    def _relay(self, send: Callable[[EngineReplica, bytes, Any], Pieces], tells: Any) -> Relay:
        async def pieces(where: Where, point: ResumePoint, pages: Any) -> Pieces:
            self.pages.append(pages)
            self.wheres.append(where)
            self.points.append(point.model_copy(deep=True))
            replica = self._replicas.pop(0)
            left = self._lost_after.pop(0) if self._lost_after else 10**9
            try:
                answer = send(replica, await point.record(), pages)
                async with contextlib.aclosing(answer) as told:
                    async for piece in told:
                        if unmarked(piece) or not isinstance(piece[0], Begun):
                            if not left:
                                raise ReplicaLost("it was killed", dead=True)
                            left -= 1
                        yield piece
            except Unserved as error:
                raise ReplicaLost(error.reason, dead=True, replica=error.replica) from None

        def leaves(name: str, fingerprint: str) -> bool:
            return name in self.leaving and fingerprint == FINGERPRINT

        point = ResumePoint(arrived=ARRIVED, key=KEY)
        return Relay(pieces, tells, point, leaves, watch=self.watch)


def paced(replica: EngineReplica) -> None:
    """Tells the replica's engine, if it wants to know, what its frontends have said."""
    engine, passage_of = replica._engine, replica._passage

    def passage(resume: bytes, pages: Any = None) -> Passage | None:
        made = passage_of(resume, pages)
        if made is not None and isinstance(engine, Paced):
            passing = made.passing

            @contextlib.contextmanager
            def told(number: int, delta: Any) -> Iterator[None]:
                with passing(number, delta):
                    yield
                if not delta.replayed:
                    engine.passed()

            made.passing = told  # type: ignore[method-assign]
        return made

    replica._passage = passage  # type: ignore[method-assign]


def served(
    call: Callable[[list[EngineReplica]], AsyncGenerator[Any, None]],
    engines: Sequence[Engine],
    *flags: str,
) -> list[Any]:
    """The parts of what the call yields, with a replica for each engine."""

    async def whole() -> list[Any]:
        given = ["--config.engine.stall_s=0", *flags]
        replicas = [
            EngineReplica(given, 1, lambda _, engine=one: serving(engine), lambda i=i: f"r{i}")
            for i, one in enumerate(engines)
        ]
        for replica in replicas:
            paced(replica)
        try:
            async with asyncio.timeout(60):
                return [part async for piece in call(replicas) for part in piece]
        finally:
            for engine, replica in zip(engines, replicas, strict=True):
                engine.stop()
                await replica.stop()

    return asyncio.run(whole())


def told(name: str, lost_after: Sequence[int], *, stream: bool = True) -> tuple[Fleet, list[Any]]:
    """What the client of a call gets whose replicas are lost one after the other."""
    path, body = CALLS[name]
    asked = {**body, LIMITS.get(name, "max_tokens"): LENGTH, "stream": stream}
    if name == "ollama":
        asked = {**body, "options": {"num_predict": LENGTH}, "stream": stream}
    return relayed(lost_after, lambda fleet: fleet.http(path, asked))


def relayed(
    lost_after: Sequence[int],
    ask: Callable[[Fleet], Relay],
    *flags: str,
    text: Callable[[int], str] | None = None,
) -> tuple[Fleet, list[Any]]:
    """What the client gets, and from whom. text: of each token; None for the usual."""
    fleets: list[Fleet] = []

    def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        fleets.append(Fleet(replicas, *lost_after))
        return ask(fleets[0]).pieces()

    engines = [Paced() for _ in range(1 + len(lost_after))]
    for engine in engines:
        engine.text = text or engine.text
    parts = served(call, [engine.run() for engine in engines], *flags)
    assert not any(isinstance(part, Begun | Passed) for part in parts)
    return fleets[0], parts


def plain(value: Any) -> Any:
    """Without times, and what else need not be the same."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in VARYING}
    return list(map(plain, value)) if isinstance(value, list) else value


def events(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """The objects in the body of a stream, one for each token."""
    start, *rest = parts
    assert start["type"] == "http.response.start" and start["status"] == 200
    assert not any(part["type"] == "http.response.start" for part in rest)
    lines = b"".join(part.get("body", b"") for part in rest).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return list(map(json.loads, data))


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[str], list[dict[str, Any]]]:
    known: dict[str, list[dict[str, Any]]] = {}

    def found(name: str) -> list[dict[str, Any]]:
        if name not in known:
            with logging_kept():
                known[name] = events(told(name, ())[1])
        return known[name]

    return found


def joined(said: list[dict[str, Any]]) -> list[Any]:
    """The same for all ways to cut a text into events: tokens may come together. Texts and
    log-probabilities in a row are put together, by continuation."""
    texts: dict[Any, list[Any]] = {}
    others: list[Any] = []
    for each in map(plain, said):
        for choice in each.get("choices", ()):
            more = texts.setdefault(choice["index"], ["", []])
            more[0] += choice.pop("text", "") or choice.get("delta", {}).pop("content", "") or ""
            logprobs = choice.pop("logprobs", None) or {}
            more[1] += logprobs.get("content") or logprobs.get("text_offset") or []
        delta, number = each.get("delta"), each.pop("sequence_number", None)
        if number is not None:
            numbers = texts.setdefault("numbers", ["", []])
            assert number == len(numbers[1])
            numbers[1].append(number)
        if isinstance(delta, str):
            texts.setdefault(each["item_id"], ["", []])[0] += each.pop("delta")
        elif isinstance(delta, dict) and "text" in delta:
            texts.setdefault(each["index"], ["", []])[0] += delta.pop("text")
        elif "message" in each and "content" in each["message"] and not each.get("done"):
            texts.setdefault("", ["", []])[0] += str(each["message"].pop("content"))
        if each not in others:
            others.append(each)
    texts.pop("numbers", None)
    return [texts, sorted(map(json.dumps, others))]


@pytest.mark.promise(48)
@pytest.mark.parametrize("name", CALLS)
def test_a_stream_goes_on_where_it_was(
    undisturbed: Callable[[str], list[dict[str, Any]]], name: str
) -> None:
    whole = joined(undisturbed(name))
    for lost_after in ((0,), (1,), (5,), (2, 1)):
        fleet, parts = told(name, lost_after)
        assert joined(events(parts)) == whole, lost_after
        assert len(fleet.points) == 1 + len(lost_after)
        tokens = [sum(len(one.tokens) for one in point.outputs) for point in fleet.points]
        assert tokens == sorted(tokens) and (not lost_after[0] or tokens[-1] > 0)
        if tokens[-1]:
            assert [each["moved"] for each in moved_fields(events(parts))]


CALLING = ["So", ": <tool_", 'call>\n{"na', 'me": "look", "argu', 'ments": {"at": "the', ' sky"}}']
CALLING += [
    "\n</tool",
    '_call>\n<tool_call>\n{"name": "look',
    '", "arguments": {"at": "it',
    '"}}',
    "\n",
]
CALLING += ["</tool_call>"]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "messages": [{"name": "look", "input_schema": SCHEMA}],
    "ollama": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
}


def called(said: Sequence[dict[str, Any]]) -> tuple[set[str], str, str]:
    """Ids, the arguments of all calls, and the text beside them, at any door."""
    ids, arguments, text = set[str](), "", ""
    for each in said:
        words = json.dumps(plain(each)).split('"')
        ids |= {word for word in words if word.startswith(("call_", "msg_", "fc_"))}
        for choice in each.get("choices", ()):
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                arguments += call["function"].get("arguments", "")
        delta = each.get("delta")
        if isinstance(delta, dict):
            text, arguments = (
                text + delta.get("text", ""),
                arguments + delta.get("partial_json", ""),
            )
        elif each.get("type") == "response.function_call_arguments.delta":
            arguments += each["delta"]
        elif each.get("type") == "response.output_text.delta":
            text += each["delta"]
        if "role" in each.get("message", {}) and "done" in each:
            text += each["message"]["content"]
            for call in each["message"].get("tool_calls", ()):
                arguments += json.dumps(call["function"]["arguments"])
    return ids, arguments.replace(" ", ""), text


@pytest.mark.promise(48)
@pytest.mark.parametrize("name", TOOLS)
def test_calls_of_tools_go_on_too(name: str) -> None:
    """Wherever they are cut, with the ids that they began with."""
    path, body = CALLS[name]
    length = {LIMITS.get(name, "max_tokens"): len(CALLING)}
    asked = {**body, **({"options": {"num_predict": len(CALLING)}} if name == "ollama" else length)}
    asked = {key: each for key, each in asked.items() if "logprobs" not in key}
    asked |= {"tools": TOOLS[name], "stream": True}

    def ask(fleet: Fleet) -> Relay:
        return fleet.http(path, asked)

    found = []
    for lost_after in ((), (2,), (5,), (8,)):
        flag = "--config.server.tool_format=hermes"
        _, parts = relayed(lost_after, ask, flag, text=CALLING.__getitem__)
        found.append(called(events(parts)))
    assert all(one == found[0] for one in found)
    ids, arguments, text = found[0]
    assert ids and (arguments, text.strip()) == ('{"at":"thesky"}{"at":"it"}', "So:")


def moved_fields(said: Any) -> Iterator[dict[str, Any]]:
    """Objects that say how often it moved."""
    if isinstance(said, dict):
        if "moved" in said:
            yield said
        said = list(said.values())
    for each in said if isinstance(said, list) else ():
        yield from moved_fields(each)


@pytest.mark.parametrize("name", CALLS)
def test_so_does_an_answer_that_comes_whole(name: str) -> None:
    """Its tokens are told as they come, and its header says that it has moved."""
    path, body = CALLS[name]
    length = {LIMITS.get(name, "max_tokens"): 100}
    asked = {**body, **(length if name != "ollama" else {"options": {"num_predict": 100}})}
    asked = {name: each for name, each in asked.items() if name != "stream_options"}
    whole, answers, moved = {**asked, "stream": False}, [], []
    for lost_after in ((), (1,)):
        fleet, (start, *rest) = relayed(lost_after, lambda fleet: fleet.http(path, whole))
        assert start["status"] == 200
        answers.append(plain(json.loads(b"".join(part.get("body", b"") for part in rest))))
        moved.append(dict(start["headers"]).get(b"x-jaxserve-moved"))
        resumed = [one.tokens for point in fleet.points[1:] for one in point.outputs]
        assert all(resumed) and len(resumed) >= len(lost_after)
    assert answers[0] == answers[1] and moved == [None, b"1"]


@pytest.mark.promise(48)
def test_an_rpc_goes_on_where_it_was() -> None:
    message = make_request("Hi", max_tokens=LENGTH, n=2, temperature=1.0, logprobs=2)
    found = []
    for lost_after in ((), (1,), (2, 3)):
        _, (*raw, status) = relayed(lost_after, lambda fleet: fleet.grpc(message))
        moves = dict(status.trailing).get("x-jaxserve-moved")
        assert moves == (str(len(lost_after)) if any(lost_after) else None)
        answers = list(map(pb.GenerateResponse.FromString, raw))
        texts: dict[int, list[Any]] = {0: ["", [], [], []], 1: ["", [], [], []]}
        for each in answers:
            texts[each.index][0] += each.text
            texts[each.index][1] += each.token_ids
            texts[each.index][2] += [one.logprob for one in each.logprobs]
            if each.HasField("finish"):
                texts[each.index][3].append(each.finish.usage.output_tokens)
        found.append([{each.request_id for each in answers}, texts])
    assert all(one == found[0] for one in found) and found[0][1][1][3] == [LENGTH]


def test_draws_are_the_same_wherever_it_goes_on() -> None:
    """The seed, the ids of requests, and those of whatever else is random."""
    path, body = CALLS["prompts"]
    engines = [Paced().run() for _ in range(3)]

    def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        asked = {**body, "max_tokens": LENGTH, "stream": True}
        return Fleet(replicas, 1, 1).http(path, asked).pieces()

    served(call, engines)
    asked = [[(one.id, one.sampling.seed) for one in engine.requests] for engine in engines]
    assert asked[0] == asked[1] == asked[2] and None not in [seed for _, seed in asked[0]]
    assert len(set(asked[0])) == 2, "each prompt has its own"
    assert all(one.generated and one.moved for one in engines[2].requests)


def test_an_engine_that_fails_hands_its_answers_on() -> None:
    first, second = Engine(), Paced().run()

    async def failing() -> None:
        await asyncio.to_thread(first.wait, lambda: first.live)
        first.step(3)
        await asyncio.to_thread(first.wait, lambda: passed.is_set())
        first.fail(RuntimeError("no memory"))

    passed = asyncio.Event()

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        failed = asyncio.create_task(failing())
        body = {"prompt": "Hi", "max_tokens": LENGTH, "stream": True}
        async for piece in Fleet(replicas).http("/v1/completions", body).pieces():
            yield piece
            passed.set()
            with first.changed:
                first.changed.notify_all()
        await failed

    said = events(served(call, [first, second]))
    texts = "".join(choice["text"] for each in said for choice in each["choices"])
    assert texts == "".join(f" w{k}" for k in range(LENGTH)) and "error" not in json.dumps(said)
    (request,) = second.requests
    assert [one.tokens for one in request.generated] == [(100, 101, 102)]


@pytest.mark.parametrize("begun", [True, False])
def test_an_answer_leaves_a_replica_that_is_to_go(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """At once, whatever it waits for; and the replica is rid of it."""
    monkeypatch.setattr(relay_module, "LEAVE_S", 0.0)
    first, second = Paced() if begun else Engine(), Paced().run()
    if begun:
        first.run()
    fleets: list[Fleet] = []

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        fleet = Fleet(replicas)
        fleets.append(fleet)
        relay = fleet.http("/v1/completions", {"prompt": "Hi", "max_tokens": 200, "stream": True})
        if not begun:
            fleet.leaving.add("r0")
        async for piece in relay.pieces():
            yield piece
            if not fleet.leaving:
                fleet.leaving.add("r0")
                relay.look()
        await asyncio.to_thread(first.wait, lambda: not first.live)

    said = events(served(call, [first, second]))
    texts = "".join(choice["text"] for each in said for choice in each["choices"])
    assert texts == "".join(f" w{k}" for k in range(200))
    (point,) = fleets[0].points[1:]
    assert len(first.cancelled) == 1 and point.why == ("drained" if begun else "")
    assert bool(point.outputs) == begun


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_replica_that_is_to_go_leaves_its_answers_with_what_it_has_cached(
    monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    monkeypatch.setattr(replica_module, "LEAVE_S", 0.0)
    first, second, roster = Paced().run(), Paced().run(), Roster()
    first.cache = {b"k" * 16: np.arange(8.0)}
    fleets: list[Fleet] = []

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        for replica in replicas:
            replica._watch = lambda: roster
            await replica.record_routing_stats()
        roster.update({"r0": FINGERPRINT, "r1": FINGERPRINT})
        fleet = Fleet(replicas)
        fleets.append(fleet)
        body = {"prompt": "Hi", "max_tokens": 200, "stream": True}
        relay = fleet.http("/v1/completions", body)
        if door == "grpc":
            relay = fleet.grpc(make_request("Hi", max_tokens=200))
        async for piece in relay.pieces():
            yield piece
            roster.update({"r1": FINGERPRINT})
        await asyncio.to_thread(first.wait, lambda: not first.live)

    parts = served(call, [first, second])
    if door == "http":
        texts = [choice["text"] for each in events(parts) for choice in each["choices"]]
    else:
        texts = [pb.GenerateResponse.FromString(part).text for part in parts[:-1]]
    assert "".join(texts) == "".join(f" w{k}" for k in range(200))
    (point,), (_, pages) = fleets[0].points[1:], fleets[0].pages
    assert point.why == "drained" and point.outputs and len(first.cancelled) == 1
    (request,) = second.requests
    assert [*request.pages] == [b"k" * 16] and pages.refs == [], "nobody keeps it any longer"
    assert (request.pages[b"k" * 16] == np.arange(8.0)).all()


def test_a_cache_that_is_too_large_or_late_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer goes all the same."""
    engine, other = Paced().run(), Paced().run()
    engine.cache = {b"k" * 16: np.arange(8.0)}

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        for broken in ("_MOST_BYTES", "_EXPORT_S"):
            with monkeypatch.context() as patch:
                patch.setattr(replica_module, broken, 0)
                fleet = Fleet(replicas)
                body = {"prompt": "Hi", "max_tokens": 100, "stream": True, "request_id": broken}
                left = False
                async for _ in fleet.http("/v1/completions", body).pieces():
                    if not left:
                        left = True
                        await replicas[0].leave()
                assert fleet.pages == [None, None] and fleet.points[1].outputs
                yield []

    assert served(call, [engine, other]) == []


def test_only_as_much_is_put_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first blocks; the rest is computed."""
    monkeypatch.setattr(replica_module, "_MOST_BYTES", 150)
    engine, other = Paced().run(), Paced().run()
    engine.cache = {bytes([key]) * 16: np.full(8, float(key)) for key in range(3)}

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        left = False
        body = {"prompt": "Hi", "max_tokens": 100, "stream": True}
        async for _ in Fleet(replicas).http("/v1/completions", body).pieces():
            if not left:
                left = True
                await replicas[0].leave()
        yield []

    assert served(call, [engine, other]) == []
    assert [*other.requests[0].pages] == [bytes([0]) * 16, bytes([1]) * 16]


def test_an_answer_leaves_when_its_next_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed twice; but it does not wait for long."""

    async def leaving(tokens: int, seconds: float, *, told: bool) -> list[Any]:
        monkeypatch.setattr(passage_module, "NEXT_S", seconds)
        record = point(outputs=[]).model_dump_json().encode()
        marks, passage = list[Any](), Passage(record, FINGERPRINT, "r")
        passage.tell = marks.append
        passage.begin([Request("a", (1, 2), SamplingParams())])
        delta = Delta(0, list(range(tokens)), times=[passage.began] * tokens)
        with passage.passing(0, delta):
            pass
        passage.leave(Handle(["pages"], (), 0))
        passage.leave(Handle(["others"], (), 0))
        if told:
            with passage.passing(0, delta):
                assert not passage.left
        else:
            while tokens and not passage.left:
                await asyncio.sleep(0)
        assert passage.left
        return [type(mark) for mark in marks]

    both = [Begun, Passed, Passed, Cache]
    assert asyncio.run(leaving(1, 1000.0, told=True)) == both
    assert asyncio.run(leaving(1, 0.0, told=False)) == [Begun, Passed, Cache]
    assert asyncio.run(leaving(0, 1000.0, told=False)) == [Begun, Passed, Cache]


def test_what_was_put_is_held_until_somebody_goes_on() -> None:
    """By nobody who passes the answer on afterwards, but for as long as others may have to."""
    answered, handle = Answered(point()), Handle(["somewhere"], (), 0)
    answered.take([Begun(FINGERPRINT, "r0")])
    answered.take([Cache(handle)])
    assert answered.left and answered.pages is handle and handle.refs == ["somewhere"]
    answered.take([Begun(FINGERPRINT, "r1")])
    assert not answered.left and answered.pages is None and handle.refs == []


@pytest.mark.ray
def test_the_object_store_is_rid_of_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no other answer leaves."""
    from jaxserve.deploy import ray as on_ray

    class Reference:
        pass

    gone: list[weakref.ref[Reference]] = []

    def put(pages: Any) -> Reference:
        made = Reference()
        gone.append(weakref.ref(made))
        return made

    monkeypatch.setattr(on_ray.ray, "put", put)
    monkeypatch.setattr(on_ray, "_HELD_S", 0.1)
    monkeypatch.setattr(on_ray.ObjectStore, "_here", lambda store: "node")
    known = set(threading.enumerate())
    store = pickle.loads(pickle.dumps(on_ray.ObjectStore()))
    for handle in [store.put({}) for _ in range(3)]:
        handle.refs.clear()
    assert all(one() is not None for one in gone), "Ray does not know who has it"
    assert len(set(threading.enumerate()) - known) == 1
    while timers := set(threading.enumerate()) - known:
        timers.pop().join(60)
    gc.collect()
    assert all(one() is None for one in gone)


@pytest.mark.ray
def test_no_collection_goes_through_what_was_there_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would stop every answer for as long as a pause may take."""
    from jaxserve.deploy import followers

    done, engine = list[str](), Engine()
    for name in ("collect", "freeze"):
        monkeypatch.setattr(followers.gc, name, lambda name=name: done.append(name))
    monkeypatch.setattr(engine, "start", lambda: done.append("start"), raising=False)
    monkeypatch.setattr(build, "build_engine", lambda *given, **more: engine)
    monkeypatch.setattr(followers, "find_checkpoint", lambda config: config)
    with followers.running_engine(replica_config([])) as running:
        assert running is engine and done == ["start", "collect", "freeze"]


def test_a_cache_that_does_not_come_is_computed_again() -> None:
    class Lost(Transport):
        def get(self, handle: Any, seconds: float) -> Any:
            raise ConnectionError("its owner has died")

    engine, pages = Paced().run(), Handle(["gone"], (b"k" * 16,), 64)

    def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        replicas[0]._transport = Lost()
        scope = {**SCOPE, "path": "/v1/completions", "raw_path": b"/v1/completions"}
        body = json.dumps({"prompt": "Hi", "max_tokens": 4, "stream": True}).encode()
        resume = point().model_dump_json().encode()
        return replicas[0].http(scope, body, resume, routing_request=NOTHING, pages=pages)

    assert b'"text":" w3"' in b"".join(part["body"] for part in unmarked(served(call, [engine])))
    assert not engine.requests[0].pages and engine.requests[0].generated and not pages.refs


def test_a_cache_that_cannot_be_put_keeps_no_answer() -> None:
    class Full(Transport):
        def put(self, pages: Any) -> Any:
            raise MemoryError("the object store is full")

    engine, other = Paced().run(), Paced().run()
    engine.cache = {b"k" * 16: np.arange(8.0)}

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        replicas[0]._transport = Full()
        fleet, left = Fleet(replicas), False
        body = {"prompt": "Hi", "max_tokens": 100, "stream": True}
        async for piece in fleet.http("/v1/completions", body).pieces():
            yield piece
            if not left:
                left = True
                await replicas[0].leave()
        assert fleet.pages == [None, None] and fleet.points[1].outputs

    said = events(served(call, [engine, other]))
    texts = "".join(choice["text"] for each in said for choice in each["choices"])
    assert texts == "".join(f" w{k}" for k in range(100))


def test_an_answer_of_which_too_much_would_have_to_be_kept_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (passage_module, resume_point):
        monkeypatch.setattr(module, "MOST_VALUES", 2)
    engine = Paced().run()

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        body = {"prompt": "Hi", "max_tokens": 8, "stream": True}
        async for piece in Fleet(replicas).http("/v1/completions", body).pieces():
            yield piece
            if engine.told > 3:
                await replicas[0].leave()

    said = events(served(call, [engine]))
    texts = "".join(choice["text"] for each in said for choice in each["choices"])
    assert texts == "".join(f" w{k}" for k in range(8))


def test_what_has_come_along_is_not_kept_for_as_long_as_the_answer_takes() -> None:
    sent = {b"k" * 16: np.arange(8.0)}
    passage = Passage(point().model_dump_json().encode(), FINGERPRINT, "r0")
    passage.pages = sent
    wanted = Request("a", (1, 2), SamplingParams())
    assert passage.begin([wanted])[0].pages == sent and not passage.pages

    engine, records = Paced().run(), list[Any]()

    def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        begun = CallRecord.charge

        def charge(record: CallRecord, requests: Any, *given: Any) -> None:
            records.extend(requests)
            begun(record, requests, *given)

        monkeypatch.setattr(CallRecord, "charge", charge)
        scope = {**SCOPE, "path": "/v1/completions", "raw_path": b"/v1/completions"}
        body = json.dumps({"prompt": "Hi", "max_tokens": 4, "stream": True}).encode()
        resume = point().model_dump_json().encode()
        handle = Transport().put(sent)
        return replicas[0].http(scope, body, resume, routing_request=NOTHING, pages=handle)

    with pytest.MonkeyPatch.context() as monkeypatch:
        served(call, [engine])
    assert engine.requests[0].pages and not any(each.pages for each in records)


def test_what_ends_in_time_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything where nobody else can go on with it."""
    monkeypatch.setattr(relay_module, "LEAVE_S", 1000.0)

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        fleet = Fleet(replicas)
        fleet.leaving.add("r0")
        relay = fleet.http("/v1/completions", {"prompt": "Hi", "max_tokens": 9, "stream": True})
        async for piece in relay.pieces():
            yield piece

    assert events(served(call, [Paced().run()]))
    monkeypatch.setattr(relay_module, "LEAVE_S", 0.0)
    other = Paced()
    other.served = dataclasses.replace(other.served, system_fingerprint="fp_of_another")
    assert events(served(call, [other.run()]))


def resumed(engine: Engine, point: ResumePoint, **body: Any) -> list[Any] | str:
    """The parts that a replica says, or why it does not."""

    def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        scope = {**SCOPE, "path": "/v1/completions", "raw_path": b"/v1/completions"}
        asked = json.dumps({"prompt": "Hi", "max_tokens": 4, "stream": True, **body}).encode()
        resume = point.model_dump_json().encode()
        return replicas[0].http(scope, asked, resume, routing_request=NOTHING)

    try:
        return served(call, [engine])
    except Unserved as error:
        assert not error.replica  # it may take other calls
        assert error.final == (error.reason.startswith(("generated:", "nonsense"))), error.reason
        return error.reason


def point(**fields: Any) -> ResumePoint:
    outputs = [{"number": 0, "tokens": [100, 101], "times": [0.1, 0.2], "logprobs": []}]
    about = {"arrived": ARRIVED, "fingerprint": FINGERPRINT, "moved": [0.3]}
    return ResumePoint.model_validate({**about, "outputs": outputs, "why": "lost", **fields})


def test_whoever_cannot_resume_says_why_and_says_nothing_else() -> None:
    assert FINGERPRINT in str(resumed(Engine(), point(fingerprint="fp_of_another")))
    for body, problem in (
        ({"max_tokens": 1}, "generated: has 2 tokens; max_tokens is 1"),
        ({"logprobs": 1}, "generated: has not a time, or no logprob"),
        ({"nonsense": 1}, "nonsense"),
    ):
        engine = Engine()
        assert problem in str(resumed(engine, point(), **body)) and not engine.requests
    # Those of a host whose clock is behind may have come before.
    engine, outputs = Engine().run(), point().model_dump()["outputs"]
    resumed(engine, point(outputs=[{**outputs[0], "times": [0.2, 0.1]}]))
    first, second = engine.requests[0].generated[0].times
    assert first == second
    full, closed = Engine(max_requests=0), Engine()
    assert "0 requests are queued" in str(resumed(full, point()))
    closed.failure = HostLost("host 1 is gone")
    assert "host 1 is gone" in str(resumed(closed, point()))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (b"\xff", "Invalid JSON"),
        (b'{"arrived": 1, "version": 2}', "version: Input should be 1"),
        (b'{"arrived": 1, "more": 1}', "more: Extra inputs"),
        (b'{"arrived": 1e999}', "arrived: Input should be a finite number"),
        (b'{"arrived": 1, "key": "0"}', "key: String should match"),
        (b'{"arrived": 1, "outputs": [{"number": -1, "tokens": [], "times": []}]}', "number"),
        (b'{"arrived": 1, "outputs": %s}' % (b"[" * 10_000), "Invalid JSON"),
        (b'{"arrived": 1, "messages": %s}' % (b"9" * 400), "messages"),
    ],
)
def test_a_record_is_checked(record: bytes, problem: str) -> None:
    def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        return replicas[0].http(SCOPE, b"{}", record, routing_request=NOTHING)

    with pytest.raises(Unserved, match=problem):
        served(call, [Engine()])


def long_point(tokens: int, top: int) -> ResumePoint:
    """Of two continuations, the second of which has no log-probabilities. The first has also that
    of what cannot be."""
    given = [(each, -1.5 if each else -math.inf) for each in range(top)]
    logprobs = [(-0.5 - one, given) for one in range(tokens)]
    first = {"tokens": list(range(tokens)), "times": [0.5 * one for one in range(tokens)]}
    outputs = [{"number": 3, **first, "logprobs": logprobs, "given_up": True}]
    outputs += [{"number": 1, "tokens": [7], "times": [0.25], "logprobs": []}]
    return point(outputs=outputs)


@pytest.mark.parametrize(("tokens", "top"), [(0, 0), (3, 2), (4096, 0), (5000, 0), (2000, 20)])
def test_a_long_record_says_the_same(tokens: int, top: int) -> None:
    made = long_point(tokens, top)
    record = asyncio.run(made.record())
    assert ResumePoint.read(record) == made
    assert max(map(len, record.split(b"\n"))) < 200_000
    record += b"\n" + json.dumps({"number": 1, "tokens": [1 << 31], "times": []}).encode()
    with pytest.raises(CannotResume, match=r"tokens\.0: Input should be less than"):
        Passage(record, FINGERPRINT, "r0")


def test_a_record_in_lines_is_no_longer_than_one_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_point, "MOST_VALUES", 6000)
    record = asyncio.run(long_point(5000, 0).record())
    with pytest.raises(CannotResume, match="more than 6000 values"):
        Passage(record, FINGERPRINT, "r0")


def test_others_go_on_while_a_long_record_is_made_and_read() -> None:
    """Each in more than one piece of work."""
    made, turns = long_point(40_000, 0), 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def both() -> list[int]:
        counting, found = asyncio.create_task(count()), list[int]()
        record = await made.record()
        found.append(turns)
        await asyncio.to_thread(ResumePoint.read, record)
        found.append(turns - found[0])
        counting.cancel()
        return found

    assert min(asyncio.run(both())) > 3


@pytest.mark.parametrize("name", ["resume", "generated", "outputs", "jaxserve.passage"])
def test_a_client_cannot_say_what_was_generated(name: str) -> None:
    """Neither in the body, which has no such field, nor by a header, which nobody reads."""
    engine, record = Engine().run(), point().model_dump_json()
    headers = [*SCOPE["headers"], (name.encode(), record.encode())]
    scope = {**SCOPE, "path": "/v1/completions", "headers": headers}
    asked = {"prompt": "Hi", "max_tokens": 1}

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        for body in ({**asked, name: json.loads(record)}, asked):
            said = json.dumps(body).encode()
            async for piece in replicas[0].http(scope, said, routing_request=NOTHING):
                yield piece

    refused, _, answered, *_ = served(call, [engine])
    assert (refused["status"], answered["status"]) == (400, 200)
    assert [(one.generated, one.moved) for one in engine.requests] == [((), ())]


def test_moves_are_counted() -> None:
    engine = Paced().run()
    counted: list[float] = []

    async def call(replicas: list[EngineReplica]) -> AsyncGenerator[Any, None]:
        scope = {**SCOPE, "path": "/v1/completions", "raw_path": b"/v1/completions"}
        body = json.dumps({"prompt": "Hi", "max_tokens": 4, "stream": True}).encode()
        resume = point().model_dump_json().encode()
        async for piece in replicas[0].http(scope, body, resume, routing_request=NOTHING):
            yield piece
        _, metrics = await replicas[0].metrics()
        counted.extend(
            sample.value
            for metric in metrics
            for sample in metric.samples
            if sample.name == "jaxserve:moved_calls_total" and sample.labels["why"] == "lost"
        )

    said = b"".join(part["body"] for part in unmarked(served(call, [engine])))
    assert counted == [1.0] and b'"text":" w2"' in said and b" w1" not in said
