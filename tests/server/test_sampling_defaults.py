"""Requests that do not say how they are sampled have the checkpoint's defaults, whichever way they
come; what a request says wins."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.client import Client, make_line
from jaxserve.client import chat as chat_command
from jaxserve.client import cli as commands
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from jaxserve.server.startup import launch
from tests.server.batches.serving import serving
from tests.server.fake_engine import INFO, PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS
from tests.server.http.openai.test_batches import line, upload

OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
SAID = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
NONE = SAID | {"temperature": 1.0}  # as OpenAI
NULLS = dict.fromkeys(OWN)
CHAT: Any = [{"role": "user", "content": "Hi"}]


def engine_with(defaults: dict[str, float]) -> FakeEngine:
    engine = FakeEngine()
    engine.served = dataclasses.replace(INFO, sampling_defaults=defaults)
    return engine.run()


@pytest.fixture(params=[{}, OWN], ids=["none", "own"])
def engine(request: pytest.FixtureRequest) -> FakeEngine:
    return engine_with(request.param)


@pytest.fixture
def server(engine: FakeEngine, tmp_path: Path) -> Iterator[Server]:
    with serving(engine, tmp_path, http=SETTINGS) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    address = f"http://{server.http_address}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def sampled(engine: FakeEngine) -> list[dict[str, Any]]:
    """What the requests have come with, in no order."""
    found = [each.sampling for each in engine.requests]
    return [{name: getattr(each, name) for name in OWN} for each in found]


def expected(engine: FakeEngine, without: dict[str, Any]) -> dict[str, Any]:
    return {**without, **engine.served.sampling_defaults}


@pytest.mark.promise(35)
def test_http(client: openai.OpenAI, engine: FakeEngine) -> None:
    for more in ({}, {"extra_body": NULLS}):
        client.completions.create(model="fake", prompt="a", max_tokens=1, **more)
        client.chat.completions.create(model="fake", messages=CHAT, max_tokens=1, **more)
        made = client.responses.create(model="fake", input="Hi", max_output_tokens=16, **more)
        assert made.temperature == expected(engine, NONE)["temperature"]
    assert sampled(engine) == [expected(engine, NONE)] * 6


def test_what_is_said_over_http_wins(client: openai.OpenAI, engine: FakeEngine) -> None:
    more: Any = {"extra_body": SAID}
    client.completions.create(model="fake", prompt="a", max_tokens=1, **more)
    client.chat.completions.create(model="fake", messages=CHAT, max_tokens=1, **more)
    client.responses.create(model="fake", input="Hi", max_output_tokens=16, **more)
    assert sampled(engine) == [SAID] * 3
    client.completions.create(model="fake", prompt="a", max_tokens=1, temperature=0)
    assert sampled(engine)[-1] == expected(engine, NONE) | {"temperature": 0.0}


@pytest.mark.promise(35)
def test_grpc(server: Server, engine: FakeEngine) -> None:
    with Client(server.address) as client:
        list(client.generate("a", max_tokens=1))
        list(client.generate("a", max_tokens=1, **SAID))
    assert sampled(engine) == [expected(engine, SAID), SAID]


@pytest.mark.promise(35)
def test_batches(client: openai.OpenAI, server: Server, engine: FakeEngine) -> None:
    file = upload(client, [line("a", prompt="a"), line("b", prompt="b", **SAID)])
    batch = client.batches.create(
        input_file_id=file, endpoint="/v1/completions", completion_window="24h"
    )
    with Client(server.address) as grpc:
        list(grpc.get_batch(batch.id, follow=True))
        other = grpc.submit_batch("", [make_line("a")])
        list(grpc.get_batch(other.batch_id, follow=True))
    found = sampled(engine)
    assert len(found) == 3 and found[-1] == expected(engine, SAID)
    assert SAID in found[:2] and expected(engine, NONE) in found[:2]


@pytest.mark.promise(35)
def test_llm(engine: FakeEngine) -> None:
    """There it is the object that says it, as with vLLM: all of it, or nothing."""
    with LLM.over(engine, ChatTemplate()) as llm:  # type: ignore[arg-type]
        llm.generate("a", progress=False)
        list(llm.stream("a"))
        llm.chat(CHAT, progress=False)
        llm.generate("a", SamplingParams(max_tokens=1), progress=False)
    assert sampled(engine) == [expected(engine, SAID)] * 3 + [SAID]


@pytest.mark.promise(35)
def test_commands(server: Server, engine: FakeEngine, tmp_path: Path) -> None:
    """They send what they are told, and no more."""
    grpc, http = f"--address={server.address}", f"--address={server.http_address}"
    said = [f"--{name}={value}" for name, value in SAID.items()]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('{"prompt": "a"}\n')
    for more in ([], said):
        assert commands.complete(["a", grpc, *more]) == 0
        assert commands.complete([f"--file={prompts}", grpc, *more]) == 0
        out = f"--out={tmp_path / f'results-{len(more)}.jsonl'}"
        assert commands.batch([str(prompts), grpc, out, *more]) == 0
    assert sampled(engine) == [expected(engine, SAID)] * 3 + [SAID] * 3
    assert chat_command.main(["a", http]) == 0
    assert chat_command.main(["a", http, "--temperature=0", "--top_p=1"]) == 0
    greedy = {"temperature": 0.0, "top_p": 1.0}
    assert sampled(engine)[6:] == [expected(engine, NONE), expected(engine, NONE) | greedy]


def test_the_server_tells_them(server: Server, engine: FakeEngine) -> None:
    with Client(server.address) as client:
        assert dict(client.info().sampling_defaults) == engine.served.sampling_defaults
    told = json.loads(_get(server, "/v1/models/fake"))
    assert told["sampling_defaults"] == engine.served.sampling_defaults
    shown = json.loads(_get(server, "/console/info"))["defaults"]
    usual = {"temperature": 1.0, "top_p": 1.0, **engine.served.sampling_defaults}
    assert shown == {"temperature": usual["temperature"], "top_p": usual["top_p"], "max_tokens": 16}


def _get(server: Server, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=PATIENCE) as answer:
        found: bytes = answer.read()
    return found


def test_the_start_shows_them(server: Server, engine: FakeEngine) -> None:
    text = launch.ready_text(engine.info(), server, 1.0)
    told = "sampling temperature 0.6, top_k 20, top_p 0.95, min_p 0.05, repetition_penalty 1.05, "
    assert (told in text) == bool(engine.served.sampling_defaults)
    assert ("(off: --config.model.generation_config=none)" in text) == bool(
        engine.served.sampling_defaults
    )
