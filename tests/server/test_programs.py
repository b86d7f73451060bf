"""What calls say of their programs, and what they continue: the same at every door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from jaxserve.client import Client, make_request
from jaxserve.offline.llm import LLM
from jaxserve.sched.programs.verdict import ProgramEnd, ProgramVerdict
from jaxserve.sched.request import SLO, InvalidRequest, Program, Request, SamplingParams, Tier
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.openai import batch_file_lines
from jaxserve.server.http.openai.schema import CompletionRequest
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.slo_classes import ServiceLevel, slo_classes
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.http.openai.test_tools import ASK, CALL, TOOLS, pieces, says

CLASSES = {
    "agent": ServiceLevel(SLO(ttft=9.0), Tier.REALTIME, "agent", program_deadline=60.0),
}
SAID = {
    "program": "run 1",
    "program_deadline_ms": 1500,
    "expected_calls": 0,
    "program_over": True,
}
MOST_MS = "above 0 and at most 1,000,000,000"
PROGRAM = Program("run 1", 1.5, 0, over=True)
DOORS = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": ASK, "max_tokens": 2},
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Server]:
    with Server(engine.run(), grace_s=0.0, http=SETTINGS, slo_classes=CLASSES) as server:
        yield server


@pytest.fixture
def plain(server: Server) -> Plain:
    return Plain(server)


@pytest.fixture(autouse=True)
def forgets(engine: FakeEngine) -> None:
    engine.requests.clear()
    engine.tools.clear()
    engine.text, engine.ends_at = (lambda k: f" w{k}"), None


def asked(plain: Plain, engine: FakeEngine, path: str, **fields: Any) -> list[Request]:
    """The requests that a call makes."""
    before = len(engine.requests)
    status, answer, _ = plain.call("POST", path, {**DOORS[path], **fields})
    assert status == 200, answer
    return engine.requests[before:]


@pytest.mark.parametrize("path", DOORS)
def test_all_doors_say_the_same(
    plain: Plain, engine: FakeEngine, server: Server, path: str
) -> None:
    (silent,) = asked(plain, engine, path)
    (said,) = asked(plain, engine, path, **SAID)
    assert silent.program is None and said.program == PROGRAM
    with Client(server.address) as client:
        given = {"id": "run 1", "deadline_ms": 1500, "expected_calls": 0, "over": True}
        client.complete("hi", max_tokens=2, program=given)
        assert engine.requests[-1].program == PROGRAM
        client.complete("hi", max_tokens=2, program={"id": "a"})
        assert engine.requests[-1].program == Program("a")
        with pytest.raises(ValueError, match="unknown field of program 'deadline'"):
            client.complete("hi", program={"id": "a", "deadline": 1})
    llm = LLM.over(engine, ChatTemplate())  # type: ignore[arg-type]
    try:
        few = SamplingParams(max_tokens=2)
        llm.generate(["a", "b"], few, program=PROGRAM, progress=False)
        assert [one.program for one in engine.requests[-2:]] == [PROGRAM.going_on(), PROGRAM]
        list(llm.stream("a", few, program=PROGRAM))
        assert engine.requests[-1].program == PROGRAM
    finally:
        llm._loop.close()


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"program": ""}, "program", "has 0 characters; 1 to 128 are allowed"),
        ({"program": "x" * 129}, "program", "has 129 characters"),
        ({"program": "x" * (8 << 20)}, None, ""),
        ({"program": "a\0b"}, "program", "characters that cannot be printed"),
        ({"program": "a\u200b"}, "program", "characters that cannot be printed"),
        ({"program": 7}, "program", "string"),
        ({"program": "a", "program_deadline_ms": 0}, "program_deadline_ms", "above 0"),
        ({"program": "a", "program_deadline_ms": -5}, "program_deadline_ms", "above 0"),
        ({"program": "a", "program_deadline_ms": 1e-322}, "program_deadline_ms", "above 0"),
        ({"program": "a", "program_deadline_ms": "1"}, "program_deadline_ms", "number"),
        ({"program": "a", "program_deadline_ms": 10**400}, "program_deadline_ms", MOST_MS),
        ({"program": "a", "program_deadline_ms": 1e9 + 1}, "program_deadline_ms", MOST_MS),
        ({"program": "a", "expected_calls": -1}, "expected_calls", "at least 0"),
        ({"program": "a", "expected_calls": 10_001}, "expected_calls", "at most 10000"),
        ({"program": "a", "expected_calls": 10**400}, "expected_calls", "at most 10000"),
        ({"program": "a", "expected_calls": 1.5}, "expected_calls", ""),
        (
            {"program": "a", "expected_calls": 1, "program_over": True},
            "expected_calls",
            "must be 0 in a program's last call",
        ),
        ({"program_deadline_ms": 5}, "program_deadline_ms", "program has to name it"),
        ({"expected_calls": 0}, "expected_calls", "program has to name it"),
        ({"program_over": True}, "program_over", "program has to name it"),
        ({"program": "a", "program_over": 1}, "program_over", "true or false"),
    ],
)
@pytest.mark.parametrize("path", DOORS)
def test_mistakes_are_refused_by_name(
    plain: Plain,
    engine: FakeEngine,
    path: str,
    fields: dict[str, Any],
    name: str | None,
    words: str,
) -> None:
    status, answer, _ = plain.call("POST", path, {**DOORS[path], **fields})
    assert status in (400, 413) and not engine.requests
    if name is not None:
        assert answer["error"].get("param", name) == name
        assert words in answer["error"]["message"]


def test_half_a_surrogate_pair_is_no_id(plain: Plain, engine: FakeEngine) -> None:
    body = b'{"prompt": "hi", "program": "\\ud800"}'
    status, answer, _ = plain.call("POST", "/v1/completions", body)
    assert status == 400 and "program" in answer["error"]["message"] and not engine.requests


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ({}, "program.id: has 0 characters; 1 to 128 are allowed"),
        ({"id": "x" * 129}, "program.id: has 129 characters"),
        ({"id": "a\0"}, "program.id: has characters that cannot be printed"),
        ({"id": "a", "deadline_ms": float("nan")}, "program.deadline_ms: must be a number"),
        ({"id": "a", "deadline_ms": 1e-322}, "program.deadline_ms: must be a number"),
        ({"id": "a", "deadline_ms": 1e300}, "program.deadline_ms: must be a number"),
        ({"id": "a", "expected_calls": -1}, "program.expected_calls: must be at least 0"),
        ({"id": "a", "expected_calls": 3, "over": True}, "program.expected_calls: must be 0"),
    ],
)
def test_mistakes_are_refused_over_grpc(
    server: Server, engine: FakeEngine, program: dict[str, Any], words: str
) -> None:
    message = make_request("hi", program=program)
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Generate(message, timeout=20))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details().startswith(words)
        message.program.Clear()
        message.program.MergeFromString(b"\x0a\x01a\x98\x06\x01")
        with pytest.raises(grpc.RpcError, match=r"program.*99.*unknown|unknown.*99"):
            list(stub.Generate(message, timeout=20))
    assert not engine.requests


def test_several_prompts_are_calls_of_which_the_last_is_the_last(
    plain: Plain, engine: FakeEngine
) -> None:
    made = asked(plain, engine, "/v1/completions", prompt=["a", "b", "c"], **SAID)
    assert [one.program for one in made] == [PROGRAM.going_on()] * 2 + [PROGRAM]


def test_a_classs_deadline_is_for_programs_that_give_none(
    plain: Plain, engine: FakeEngine, server: Server
) -> None:
    path = "/v1/completions"
    (named,) = asked(plain, engine, path, program="a", slo_class="agent")
    (own,) = asked(plain, engine, path, program="a", slo_class="agent", program_deadline_ms=5000)
    (silent,) = asked(plain, engine, path, slo_class="agent")
    assert named.program == Program("a", usual_deadline=60.0)
    assert own.program == Program("a", 5.0, usual_deadline=60.0)
    assert silent.program is None
    assert slo_classes({"agent": "ttft=9s:program=60s"}) == CLASSES
    with Client(server.address) as client:
        (told,) = client.info().slo_classes
    assert told.program_deadline_ms == 60_000


@pytest.mark.parametrize("name", SAID)
def test_lines_of_batches_are_calls_of_no_program(server: Server, name: str) -> None:
    body = CompletionRequest(prompt="a", **{name: SAID[name]})
    with pytest.raises(InvalidRequest, match=f"{name}: lines of a batch are calls of no program"):
        batch_file_lines._check_best_effort(SimpleNamespace(model="fake"), body)  # type: ignore[arg-type]


# What calls continue.


def test_tool_calls_are_told_to_the_engine_before_anybody_can_answer(
    plain: Plain, engine: FakeEngine
) -> None:
    says(engine, *pieces(f"Let me see.\n{CALL}\n{CALL}"))
    body = {"messages": ASK, "tools": TOOLS}
    _, answer, _ = plain.call("POST", "/v1/chat/completions", body)
    ids = [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
    ((request, tools),) = engine.tools
    assert request == engine.requests[-1].id and tools == dict.fromkeys(ids, "weather")
    turn = answer["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": name, "content": "fine"} for name in ids]
    long = {"role": "tool", "tool_call_id": "x" * 257, "content": "?"}
    chat = [*ASK, turn, *results, long]
    says(engine, "It is fine.")
    _, _, _ = plain.call("POST", "/v1/chat/completions", {"messages": chat, "tools": TOOLS})
    assert engine.requests[-1].continues == tuple(("tool", name) for name in reversed(ids))
    said = {"role": "assistant", "content": "It is fine."}
    for more in ([said], [said, ASK[0]]):
        plain.call("POST", "/v1/chat/completions", {"messages": [*chat, *more], "tools": TOOLS})
        assert engine.requests[-1].continues == (), "they are answered"


def test_tool_calls_of_streams_are_told_as_they_begin(plain: Plain, engine: FakeEngine) -> None:
    says(engine, *pieces(f"{CALL}\n{CALL}"))
    connection = plain.connect()
    body = {"messages": ASK, "tools": TOOLS, "stream": True}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    text = connection.getresponse().read().decode()
    connection.close()
    told = [name for _, tools in engine.tools for name in tools]
    assert len(told) == 2 and all(f'"id":"{name}"' in text for name in told)


def test_responses_say_what_they_continue(plain: Plain, engine: FakeEngine) -> None:
    says(engine, *pieces(CALL))
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    body: dict[str, Any] = {"input": "Rome?", "tools": [tool], "prompt_cache_key": "k"}
    _, first, _ = plain.call("POST", "/v1/responses", body)
    request = engine.requests[-1]
    assert request.continues == (("key", "k"),)
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    assert engine.tools == [(request.id, {call["call_id"]: "weather"})]
    says(engine, "fine")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}
    body = {**body, "input": [output], "previous_response_id": first["id"]}
    plain.call("POST", "/v1/responses", body)
    assert engine.requests[-1].continues == (
        ("tool", call["call_id"]),
        ("request", request.id),
        ("key", "k"),
    )


def test_many_answered_calls_are_not_all_looked_at(plain: Plain, engine: FakeEngine) -> None:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        for n in range(40)
    ]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "1"} for n in range(40)]
    body = {"messages": [*ASK, turn, *results], "tools": TOOLS, "max_tokens": 1}
    status, answer, _ = plain.call("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    assert len(engine.requests[-1].continues) == 16


def test_a_cache_key_over_grpc(engine: FakeEngine, server: Server) -> None:
    with Client(server.address) as client:
        client.complete("hi", max_tokens=1, prompt_cache_key="k")
    assert engine.requests[-1].continues == (("key", "k"),)


# What is told of them.


def verdict(**fields: Any) -> ProgramVerdict:
    known: dict[str, Any] = {
        **{"tenant": "", "id": "a", "slo_class": "agent", "end": ProgramEnd.OVER, "calls": 3},
        **{"took": 2.0, "deadline": 5.0, "given_up": False},
    }
    return ProgramVerdict(**{**known, **fields})


def test_the_console_counts_programs(engine: FakeEngine) -> None:
    feed = LiveFeed(engine, SETTINGS.limits)  # type: ignore[arg-type]
    for one in (verdict(), verdict(took=9.0), verdict(deadline=None), verdict(given_up=True)):
        feed.on_program(one)
    shown = feed.snapshot()["programs"]
    assert shown["ended"] == {"met": 1, "missed": 1, "ended": 1, "given_up": 1}
    assert (shown["running"], shown["waiting"]) == (2, 5)
