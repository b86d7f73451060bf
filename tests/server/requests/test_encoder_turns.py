"""Who waits for the encoder: nobody for another's crowd, and nobody for another's long prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve.sched.request import InvalidRequest, PoolingParams, Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.requests import engine_requests
from jaxserve.server.requests.engine_requests import (
    LONG_LENGTH,
    PREDICTED_CHARACTERS,
    EngineRequests,
    RequestFields,
)
from jaxserve.server.requests.pooling.scoring import NO_TOKENS, pair_prompts
from tests.server.fake_engine import PATIENCE, FakeEngine


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


def play(scene: Callable[[Encoder, EngineRequests], Coroutine[Any, Any, None]]) -> None:
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


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0)


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

    play(scene)


@pytest.mark.usefixtures("one_thread")
def test_nobody_waits_for_anothers_long_prompt_but_with_one() -> None:
    async def scene(engine: Encoder, requests: EngineRequests) -> None:
        long = asked(requests, "loud", "L", LONG_LENGTH + 1)
        await until(lambda: engine.begun == ["L"])
        engine.gates["Q"].set()
        assert (await asked(requests, "quiet", "Q")).prompt == (ord("Q"),)
        text = await requests.encode("Q" * 3000, "quiet")
        assert text == [ord("Q")] and not long.done()

    play(scene)


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

    play(scene)


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
