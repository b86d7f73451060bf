"""OpenAI's files and batches, with OpenAI's client."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.client import Client
from jaxserve.sched.request import Grammar, Tier
from jaxserve.server.batches.journal import Journal
from jaxserve.server.http.openai import files
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.server import Server
from tests.server.batches.serving import journal_of, serving
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS, Plain


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"max_tokens": 2, **body}}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return client.files.create(file=io.BytesIO(text.encode()), purpose="batch").id


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = client.files.content(file_id).text
    return {each["custom_id"]: each["response"] for each in map(json.loads, text.splitlines())}


@pytest.fixture
def server(engine: FakeEngine, tmp_path: Path) -> Iterator[Server]:
    with serving(engine, tmp_path, http=SETTINGS, max_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def journal(server: Server) -> Journal:
    return journal_of(server)


def ended(client: openai.OpenAI, server: Server, name: str) -> Any:
    with Client(server.address) as grpc:
        list(grpc.get_batch(name, follow=True))
    return client.batches.retrieve(name)


def create(client: openai.OpenAI, lines: list[Any], endpoint: Any = "/v1/completions") -> Any:
    name = upload(client, lines)
    return client.batches.create(
        input_file_id=name, endpoint=endpoint, completion_window="24h", metadata={"who": "me"}
    )


def test_grammars_that_take_long_hold_up_no_other_route(
    client: openai.OpenAI, running: FakeEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were as many of them as asyncio has threads for files, metrics and the rest."""
    begun, may = threading.Event(), threading.Event()

    def check(grammar: Any, thinking: Any = None) -> None:
        begun.set()
        assert may.wait(60)

    monkeypatch.setattr(running, "check_grammar", check)
    files = [upload(client, [line("a", prompt="ab", structured_outputs={"regex": "a"})])]
    with ThreadPoolExecutor(40) as threads:
        made = [
            threads.submit(
                client.batches.create,
                input_file_id=files[0],
                endpoint="/v1/completions",
                completion_window="24h",
            )
            for _ in range(40)
        ]
        assert begun.wait(60)
        assert [each.id for each in client.files.list()] == files
        may.set()
        assert {each.result(60).request_counts.total for each in made} == {1}


def test_a_line_of_which_not_all_can_be_enforced_fails(
    client: openai.OpenAI, running: FakeEngine, server: Server
) -> None:
    """Its result has no header that would say so."""
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    batch = create(client, [line("a", prompt="ab", response_format=form), line("b", prompt="ab")])
    batch = ended(client, server, batch.id)
    problem = results(client, batch.error_file_id)["a"]["body"]["error"]["message"]
    assert "response_format.json_schema.schema.uniqueItems: cannot be enforced" in problem
    assert set(results(client, batch.output_file_id)) == {"b"}


def test_every_line_gets_its_answer(
    client: openai.OpenAI, running: FakeEngine, server: Server
) -> None:
    running.cached_tokens = 1
    lines = [
        line(f"line {k}", prompt="ab", n=2, cache_salt="me", prompt_cache_key="k")
        for k in range(20)
    ]
    batch = create(client, lines)
    assert batch.request_counts.total == 20
    batch = ended(client, server, batch.id)
    assert batch.status == "completed"
    assert batch.metadata == {"who": "me"}
    assert batch.error_file_id is None
    found = results(client, batch.output_file_id)
    assert set(found) == {f"line {k}" for k in range(20)}
    for response in found.values():
        assert response["status_code"] == 200
        assert [choice["text"] for choice in response["body"]["choices"]] == [" w0 w1"] * 2
        assert response["body"]["usage"]["total_tokens"] == 2 + 4
        assert response["body"]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert {request.cache_salt for request in running.requests} == {"me"}
    assert {request.tier for request in running.requests} == {Tier.BEST_EFFORT}


def test_chats_go_through_the_template(
    client: openai.OpenAI, running: FakeEngine, server: Server
) -> None:
    url = "/v1/chat/completions"
    chat = line("a", url, messages=[{"role": "user", "content": "Hi"}], logprobs=True)
    batch = ended(client, server, create(client, [chat], url).id)
    (response,) = results(client, batch.output_file_id).values()
    (choice,) = response["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": " w0 w1", "refusal": None}
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["d", "e"]
    assert "".join(map(chr, running.requests[0].prompt)) == "user: Hi\nassistant:"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_chats_may_call_tools(client: openai.OpenAI, running: FakeEngine, server: Server) -> None:
    url, ask = "/v1/chat/completions", [{"role": "user", "content": "Hi"}]
    running.text, running.ends_at = lambda k: ("So. ", CALL)[k], 2
    body: dict[str, Any] = {"messages": ask, "tools": [TOOL], "max_tokens": 9}
    lines = [
        line("free", url, **body, n=2),
        line("held", url, **body, tool_choice="required"),
        line("form", url, **body, response_format={"type": "json_object"}),
        line("none", url, **body, tool_choice="none"),
        line("other", url, **body, tool_choice={"type": "function", "function": {"name": "f"}}),
        line("bad", url, **body, guided_json={"bad": 1}),
        line("regex", url, **body, guided_regex="a"),
    ]
    batch = ended(client, server, create(client, lines, url).id)
    found = results(client, batch.output_file_id)
    assert found == results(client, batch.output_file_id), "with the same ids"
    choices = {name: each["body"]["choices"] for name, each in found.items()}
    assert set(choices) == {"free", "held", "form", "none"}
    ids = set()
    for choice in (*choices["free"], *choices["held"]):
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "So."
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function" and call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        ids.add(call["id"])
    assert len(ids) == 3 and all(each.startswith("call_") for each in ids)
    for name in ("form", "none"):  # its calls would be alone
        (choice,) = choices[name]
        assert choice["message"] == {
            "role": "assistant",
            "content": f"So. {CALL}",
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"
    held = [request.sampling.grammar for request in running.requests]
    assert [each is not None for each in held] == [False, True, True, False]
    errors = results(client, batch.error_file_id)
    assert {name: each["body"]["error"]["param"] for name, each in errors.items()} == {
        "other": None,
        "bad": None,
        "regex": None,
    }
    said = {name: each["body"]["error"]["message"] for name, each in errors.items()}
    assert said["other"].startswith("tool_choice.function.name: there is no tool")
    assert said["bad"] == "guided_json: is bad"
    assert said["regex"].startswith("guided_regex: cannot stand beside tools")


def test_a_line_that_is_wrong_fails_by_itself(
    client: openai.OpenAI, running: FakeEngine, server: Server
) -> None:
    wrong = {
        "unknown": line("unknown", prompt="a", foo=1),
        "model": line("model", prompt="a", model="other"),
        "url": line("url", "/v1/embeddings", prompt="a"),
        "stream": line("stream", prompt="a", stream=True),
        "slo": line("slo", prompt="a", slo={"ttft_ms": 1}),
        "class": line("class", prompt="a", slo_class="offline"),
        "many": line("many", prompt=["a", "b"]),
        "salt": line("salt", prompt="a", cache_salt="x" * 257),
        "key": line("key", prompt="a", prompt_cache_key="x" * 257),
        "long": line("long", prompt="a" * 9999),
        "empty": line("empty", prompt=""),
        "huge": line("huge", prompt="a", top_k=10**400),
        "bias": line("bias", prompt="a", logit_bias={"9" * 5000: 1}),
        "number": line("number", prompt="a", temperature=10**400),
        "": "not JSON",
        "cut": json.dumps(line("cut", prompt="a"))[:-1],
        "more": {**line("more", prompt="a"), "more": 1},
        'e\u0301"': '{"custom_id" : "e\\u0301\\"", "body": }',
    }
    batch = create(client, [line("good", prompt="a"), *wrong.values()])
    batch = ended(client, server, batch.id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, len(wrong))
    assert set(results(client, batch.output_file_id)) == {"good"}
    errors = results(client, batch.error_file_id)
    assert set(errors) == set(wrong)
    assert {each["status_code"] for each in errors.values()} == {400}
    assert "no such field" in errors["unknown"]["body"]["error"]["message"]
    assert "9999 tokens" in errors["long"]["body"]["error"]["message"]


def test_a_cancelled_batch_keeps_what_it_has(client: openai.OpenAI, engine: FakeEngine) -> None:
    batch = create(client, [line("a", prompt="a"), line("b", prompt="b")])
    engine.wait(lambda: len(engine.live) == 2)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelled"
    engine.wait(lambda: not engine.live)


def test_batches_and_files_are_listed(
    client: openai.OpenAI, running: FakeEngine, server: Server
) -> None:
    batches = [create(client, [line("a", prompt="a")]).id for _ in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]  # pages by itself
    assert sorted(listed) == sorted(batches)
    files = [file.id for file in client.files.list()]
    assert len(files) == 3
    assert json.loads(client.files.content(files[0]).text)["custom_id"] == "a"
    assert client.files.delete(files[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[0])
    for name in batches:
        ended(client, server, name)


def test_what_is_not_there(client: openai.OpenAI) -> None:
    for name in ("file-x", "../batches", "batch-" + "0" * 32):
        asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        for call in (
            client.files.retrieve,
            client.batches.retrieve,
            lambda name, asked=asked: client.batches.create(input_file_id=name, **asked),
        ):
            with pytest.raises(openai.NotFoundError):
                call(name)


def test_too_much_is_refused_and_leaves_nothing(client: openai.OpenAI, tmp_path: Path) -> None:
    with pytest.raises(openai.APIStatusError, match="takes more than") as error:
        upload(client, ["x" * (1 << 21)])
    assert error.value.status_code == 413
    assert client.files.list().data == []
    with pytest.raises(openai.BadRequestError, match="no lines"):
        create(client, [""])


def test_a_name_is_that_of_one_line(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "LINES_A_PIECE", 2)
    for twice in (line("a", prompt="y"), line("a", prompt=5), '{"custom_id": "a", "body"'):
        lines = [line("a", prompt="x"), line("b", prompt="x"), line("c", prompt="x"), twice]
        with pytest.raises(openai.BadRequestError, match="line 1 and of line 4") as refused:
            create(client, lines)
        assert refused.value.code == "duplicate_custom_id" and refused.value.param == "custom_id"
    assert client.batches.list().data == []  # nothing is left of it
    create(client, [line("a", prompt="x")])  # another batch has names of its own


def test_without_a_directory_there_are_none(engine: FakeEngine) -> None:
    with (
        Server(engine, grace_s=0.0, http=SETTINGS) as server,
        openai.OpenAI(
            base_url=f"http://{server.http_address}/v1", api_key="x", max_retries=0
        ) as client,
        pytest.raises(openai.APIStatusError, match="takes no batches"),
    ):
        client.batches.list()


def test_a_client_that_hangs_up_makes_no_batch(
    client: openai.OpenAI,
    plain: Plain,
    running: FakeEngine,
    server: Server,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lines that come after the one that is being read are read for nobody."""
    monkeypatch.setattr(files, "LINES_A_PIECE", 2)
    begun, may, seen = threading.Event(), threading.Event(), list[str]()

    def check(grammar: Grammar, thinking: Any = None) -> None:
        seen.append(grammar.text)
        if grammar.text == "slow" and not may.is_set():
            begun.set()
            assert may.wait(60)

    monkeypatch.setattr(running, "check_grammar", check)
    name = upload(
        client,
        [
            line(text, prompt="ab", structured_outputs={"regex": text})
            for text in ("a", "b", "slow", "c", "d", "e")
        ],
    )
    asked = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
    ended = threading.Event()
    tell = server._tracker.ended

    def told(record: CallRecord) -> None:
        tell(record)
        if record.method == "http /v1/batches":
            ended.set()

    monkeypatch.setattr(server._tracker, "ended", told)
    body = json.dumps(asked).encode()
    with plain.socket() as gone:
        head = f"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        gone.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        assert begun.wait(60)
        assert journal.noted("", after=None, limit=9), "of its first lines"
    assert ended.wait(60)
    assert journal.noted("", after=None, limit=9) == []
    may.set()
    create(client, [line("last", prompt="ab", structured_outputs={"regex": "last"})])
    assert not {"c", "d", "e"} & set(seen) and "last" in seen
