"""Batches of responses and of vectors, with OpenAI's client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve.sched.request import PoolingParams, PoolingType, Tier
from jaxserve.server.batches.batch_lines import Line, Result
from jaxserve.server.server import Server
from tests.server.batches.serving import serving
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.conftest import SETTINGS
from tests.server.http.openai.test_batches import create, ended, results
from tests.server.http.openai.test_tools import CALL, CITY, pieces, says

RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
ITEMS = [
    {"role": "user", "content": "Hi"},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "Sunny."},
]
TOOL = {"type": "function", "name": "weather", "parameters": CITY}


@pytest.fixture
def server(engine: FakeEngine, tmp_path: Path) -> Iterator[Server]:
    with serving(engine, tmp_path, http=SETTINGS) as server:
        yield server


def line(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def bodies(client: openai.OpenAI, server: Server, url: str, *lines: Any) -> dict[str, Any]:
    """The body of each line's answer, whole or in error."""
    made = create(client, [line(name, url, **body) for name, body in lines], url)
    batch = ended(client, server, made.id)
    found: dict[str, Any] = {}
    for file in filter(None, (batch.output_file_id, batch.error_file_id)):
        again = results(client, file)
        assert again == results(client, file), "ids are the same whenever they are read"
        found |= again
    return {name: each["body"] for name, each in found.items()}


def test_responses(client: openai.OpenAI, running: FakeEngine, server: Server) -> None:
    says(running, *pieces(f"Let me see. {CALL}"))
    found = bodies(
        client,
        server,
        RESPONSES,
        ("text", {"input": "Hi", "instructions": "Be brief.", "metadata": {"a": "b"}}),
        ("items", {"input": ITEMS, "tools": [TOOL], "max_output_tokens": 99}),
        ("cut", {"input": "Hi", "max_output_tokens": 2}),
    )
    text, said = found["text"], f"Let me see. {CALL}"
    assert (text["object"], text["status"], text["store"]) == ("response", "completed", False)
    (message,) = text["output"]
    assert message["content"][0]["text"] == said and message["id"].startswith("msg_")
    assert (text["instructions"], text["metadata"]) == ("Be brief.", {"a": "b"})
    assert (text["model"], text["service_tier"]) == (INFO.model, "flex")
    assert text["usage"]["output_tokens"] == len(pieces(said))
    message, call = found["items"]["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
    assert found["items"]["tools"][0]["strict"] is True
    assert found["cut"]["status"] == "incomplete"
    assert found["cut"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert {request.tier for request in running.requests} == {Tier.BEST_EFFORT}
    prompts = ["".join(map(chr, request.prompt)) for request in running.requests]
    assert prompts[0] == "system: Be brief.\nuser: Hi\nassistant:" and "Sunny." in prompts[1]


def test_vectors(client: openai.OpenAI, running: FakeEngine, server: Server) -> None:
    found = bodies(
        client,
        server,
        EMBEDDINGS,
        ("text", {"input": "abc"}),
        ("ids", {"input": [5, 6], "encoding_format": "base64", "pooling": "mean"}),
        ("short", {"input": "abc", "dimensions": 2, "normalize": False}),
    )
    answer = openai.types.CreateEmbeddingResponse.model_validate(found["text"])
    assert len(answer.data[0].embedding) == INFO.d_model and answer.usage.prompt_tokens == 3
    assert np.linalg.norm(answer.data[0].embedding) == pytest.approx(1)
    raw = base64.b64decode(found["ids"]["data"][0]["embedding"])
    assert len(np.frombuffer(raw, "<f4")) == INFO.d_model
    assert len(found["short"]["data"][0]["embedding"]) == 2
    asked = {request.pooling for request in running.requests}
    assert PoolingParams(PoolingType.MEAN) in asked
    assert PoolingParams(normalize=False, dimensions=2) in asked


@pytest.mark.promise(16)
def test_mistakes_are_named(client: openai.OpenAI, running: FakeEngine, server: Server) -> None:
    wrong: dict[str, list[tuple[dict[str, Any], str]]] = {
        RESPONSES: [
            ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id: a line"),
            ({"input": "a", "store": True}, "store: responses of a batch are not stored"),
            ({"input": "a", "include": ["message.output_text.logprobs"]}, "include: a batch's"),
            ({"input": [ITEMS[2]]}, "input.0.call_id: there is no function_call 'c' before"),
            ({"input": "a" * 5000}, "input: has 50"),
            ({"input": "a", "max_output_tokens": 0}, "max_output_tokens: must be at least 1"),
            ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a",
              "schema": {"type": "bad"}}}}, "text.format.schema: is bad"),
            ({"input": "a", "stream": True}, "stream: a batch has no streams"),
            ({"prompt": "a"}, "prompt: this server has no such field"),
        ],
        EMBEDDINGS: [
            ({"input": ["a", "b"]}, "input: a line has one input"),
            ({"input": "a" * 5000}, "input: has 5000 tokens"),
            ({"input": ""}, "input: is empty"),
            ({"input": "a", "dimensions": 9}, "dimensions: "),
            ({"input": "a", "slo": {"ttft_ms": 5}}, "slo: a batch is best-effort"),
        ],
    }  # fmt: skip
    for url, cases in wrong.items():
        lines = [(str(n), body) for n, (body, _) in enumerate(cases)]
        found = bodies(client, server, url, *lines)
        for name, (_, words) in enumerate(cases):
            assert found[str(name)]["error"]["message"].startswith(words), found[str(name)]
    assert not running.requests


def test_a_journal_keeps_vectors_and_is_read_by_servers_without_them() -> None:
    asked = Line("a", {}, "n", pooling=PoolingParams(PoolingType.MEAN, False, 7))
    assert Line.from_json(asked.to_json()) == asked
    assert "pooling" not in Line("a", {}).to_json()
    usage = {"prompt_tokens": 1, "output_tokens": 1}
    timings = {"queue": 0.0, "ttft": 0.0, "total": 0.0, "preempted": []}
    text = {"index": 0, "text": "a", "token_ids": [1], "finish_reason": "stop"}
    told = {**text, "usage": usage, "timings": timings}
    for more in ({}, {"pooled": "AACAPw=="}):
        stored = {"name": "n", "error": None, "completions": [{**told, **more}]}
        result = Result.from_json(json.dumps(stored))
        assert result.completions[0].pooled == more.get("pooled", "")
        (again,) = json.loads(result.to_json())["completions"]
        assert ("pooled" in again) == bool(more)
