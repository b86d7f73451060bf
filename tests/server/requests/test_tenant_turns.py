"""Whose turn it is: on a few threads that many tenants share, at the grammars' compiler and at the
encoder."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from jaxserve.sched.request import Grammar, InvalidRequest, PoolingParams, Request, Thinking
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.requests import engine_requests
from jaxserve.server.requests.engine_requests import (
    LONG_LENGTH,
    PREDICTED_CHARACTERS,
    EngineRequests,
    RequestFields,
)
from jaxserve.server.requests.pooling.scoring import NO_TOKENS, pair_prompts
from jaxserve.server.requests.tenant_turns import TenantThreads
from tests.server.fake_engine import PATIENCE, FakeEngine


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


class Compiler(FakeEngine):
    """Compiles what has "slow" in it only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.begun = threading.Event(), list[str]()

    def knows_grammar(self, grammar: Grammar) -> bool:
        return grammar.text.startswith("known")

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        self.begun.append(grammar.text)
        if "slow" in grammar.text:
            assert self.may.wait(60)
        super().check_grammar(grammar, thinking)


def waiting(requests: EngineRequests, tenant: str) -> Callable[[Grammar], None]:
    return partial(requests.wait_for_grammar, thinking=None, tenant=tenant)


@pytest.mark.promise(31)
def test_one_tenants_slow_grammars_hold_up_no_other() -> None:
    async def scene() -> None:
        engine = Compiler()
        requests = EngineRequests(engine)
        crowd = [
            asyncio.create_task(requests.check_grammar(Grammar.regex(f"slow{n}"), tenant="crowd"))
            for n in range(3)
        ]
        while not engine.begun:
            await asyncio.sleep(0)
        # The second is from a thread, as the lines of batches are checked.
        await requests.check_grammar(Grammar.regex("a"), tenant="quiet")
        await requests.read_lines("quiet", waiting(requests, "quiet"), [Grammar.regex("b")])
        assert engine.begun == ["slow0", "a", "b"]
        engine.may.set()
        await asyncio.gather(*crowd)
        assert engine.begun[3:] == ["slow1", "slow2"]
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("tenant", ["", "crowd"])
def test_a_known_grammar_waits_for_no_turn(tenant: str) -> None:
    async def scene() -> None:
        engine = Compiler()
        requests = EngineRequests(engine)
        crowd = [
            asyncio.create_task(requests.check_grammar(Grammar.regex(f"slow{n}"), tenant=tenant))
            for n in range(3)
        ]
        while not engine.begun:
            await asyncio.sleep(0)
        await requests.check_grammar(Grammar.regex("known"), tenant=tenant)
        thinking = Thinking(("<think>",), ("</think>",))
        await requests.check_grammar(Grammar.regex("known2"), thinking, tenant)
        with pytest.raises(InvalidRequest, match="is bad"):
            await requests.check_grammar(Grammar.regex("known, and bad"), tenant=tenant)
        assert not any(each.done() for each in crowd)
        engine.may.set()
        await asyncio.gather(*crowd)
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_without_keys_one_slow_grammar_leaves_a_compiler() -> None:
    async def scene() -> None:
        engine = Compiler()
        requests = EngineRequests(engine)
        slow = asyncio.create_task(requests.check_grammar(Grammar.regex("slow")))
        while not engine.begun:
            await asyncio.sleep(0)
        await requests.check_grammar(Grammar.regex("a"))
        assert not slow.done()
        engine.may.set()
        await slow
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_closing_ends_the_waiting_of_threads() -> None:
    async def scene() -> None:
        engine = Compiler()
        requests = EngineRequests(engine)
        asyncio.create_task(
            requests.check_grammar(Grammar.regex("slow"), tenant="a")
        ).add_done_callback(lambda task: task.exception())
        while not engine.begun:
            await asyncio.sleep(0)
        reading = asyncio.create_task(
            requests.read_lines("a", waiting(requests, "a"), [Grammar.regex("a")])
        )
        while not requests._grammars._waiting:
            await asyncio.sleep(0)
        requests.close()
        with pytest.raises(asyncio.CancelledError):
            await reading
        engine.may.set()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_no_line_is_read_once_nobody_waits_for_them() -> None:
    async def scene() -> None:
        engine = Compiler()
        requests = EngineRequests(engine)
        lines = [Grammar.regex(text) for text in ("a", "slow", "b", "c")]
        reading = asyncio.create_task(
            requests.read_lines("crowd", waiting(requests, "crowd"), lines)
        )
        while "slow" not in engine.begun:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        engine.may.set()
        # Its turn comes when that thread has ended.
        (number,) = await requests.read_lines("crowd", len, ["four"])
        assert (number, engine.begun) == (4, ["a", "slow"])
        requests.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


class Encoder(FakeEngine):
    """Encodes any text as its first letter, once that is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.gates = {letter: threading.Event() for letter in "abcdeQLP"}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if text[0] in self.gates:
            self.begun.append(text[0])
            assert self.gates[text[0]].wait(5)
        return [ord(text[0])]


def encoding(scene: Callable[[Encoder, EngineRequests], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        engine = Encoder()
        requests = EngineRequests(engine)
        try:
            await asyncio.wait_for(scene(engine, requests), PATIENCE)
        finally:
            for gate in engine.gates.values():
                gate.set()
            requests.close()

    asyncio.run(whole())


def asked(
    requests: EngineRequests, key: str, letter: str, length: int = 3000
) -> asyncio.Task[Request]:
    fields = RequestFields(letter * length, {}, caller=Caller(name=key))
    return asyncio.create_task(requests.make_request(fields))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_requests, "_ENCODERS", 1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("length", [3000, LONG_LENGTH + 1])
def test_a_prompt_waits_for_one_of_anothers_crowd(length: int) -> None:
    async def scene(engine: Encoder, requests: EngineRequests) -> None:
        crowd = [asked(requests, "loud", letter, length) for letter in "abcd"]
        await until(lambda: engine.begun == ["a"])
        quiet = asked(requests, "quiet", "Q", length)
        await asyncio.sleep(0)
        engine.gates["a"].set()
        engine.gates["Q"].set()
        assert (await quiet).prompt == (ord("Q"),)
        assert engine.begun[:2] == ["a", "Q"]
        for letter in "bcd":
            engine.gates[letter].set()
        await asyncio.gather(*crowd)
        assert engine.begun == ["a", "Q", "b", "c", "d"]

    encoding(scene)


@pytest.mark.usefixtures("one_thread")
def test_nobody_waits_for_anothers_long_prompt_but_with_one() -> None:
    async def scene(engine: Encoder, requests: EngineRequests) -> None:
        long = asked(requests, "loud", "L", LONG_LENGTH + 1)
        await until(lambda: engine.begun == ["L"])
        engine.gates["Q"].set()
        assert (await asked(requests, "quiet", "Q")).prompt == (ord("Q"),)
        text = await requests.encode("Q" * 3000, "quiet")
        assert text == [ord("Q")] and not long.done()

    encoding(scene)


@pytest.mark.parametrize("speculates", [True, False])
def test_a_prediction_is_bounded_before_anything_is_encoded(speculates: bool) -> None:
    async def scene(engine: Encoder, requests: EngineRequests) -> None:
        engine.served = dataclasses.replace(engine.served, speculates=speculates)
        most = PREDICTED_CHARACTERS * engine.served.max_model_len
        fields = RequestFields("L", {}, prediction="P" * (most + 1))
        problem = f"prediction: has {most + 1:,} characters; at most {most:,} are allowed"
        with pytest.raises(InvalidRequest, match=problem):
            await requests.make_request(fields)
        assert engine.begun == []

    encoding(scene)


def test_a_prediction_with_too_many_tokens_is_refused_by_its_name() -> None:
    class Strict(Encoder):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            if len(text) > 10:
                raise InvalidRequest("prompt", "has too many tokens")
            return super().encode(text, special=special)

    async def scene() -> None:
        engine = Strict()
        engine.served = dataclasses.replace(engine.served, speculates=True)
        requests = EngineRequests(engine)
        with pytest.raises(InvalidRequest, match="prediction: has too many tokens"):
            await requests.make_request(RequestFields("x", {}, prediction="y" * 11))
        with pytest.raises(InvalidRequest, match="prompt: has too many tokens"):
            await requests.make_request(RequestFields("x" * 11, {}, prediction="y"))
        requests.close()

    asyncio.run(scene())


def test_a_token_of_a_score_is_no_long_text() -> None:

    def encode(text: str) -> list[int]:
        raise AssertionError("it is encoded")

    said = ["y" * 5000], "{query} {document}", PoolingParams(), encode
    with pytest.raises(InvalidRequest, match="tokens: one has 5000 characters"):
        pair_prompts([("a", "b")], NO_TOKENS, *said)
