"""What the HTTP frontend refuses, and how it says so."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from jaxserve.server.http.openai.responses.schema import ResponseRequest
from jaxserve.server.http.openai.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Int32,
    Int64,
    Number,
    Whole,
)
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import Plain

USER = {"role": "user", "content": "a"}
CHAT = {"messages": [USER]}
FORMAT = "response_format.json_schema"
BAD = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "bad"}}}
COMPLETION = {"prompt": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def calls(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "c", "function": {"name": "f", "arguments": arguments}}]


IMAGE = {"type": "image_url", "image_url": {}}
COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "foo", "no such field"),
    ({"suffix": "x"}, "suffix", "must be ''"),
    ({"store": 1}, "store", "true or false"),
    ({"use_beam_search": True}, "use_beam_search", "False"),
    ({"prompt": None}, "prompt", "required"),
    ({"slo": {"ttft": 1}}, "slo.ttft", "no such field"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"prompt": []}, "prompt", "1 to 128 prompts"),
    ({"prompt": ["a"] * 129}, "prompt", "1 to 128 prompts"),
    ({"prompt": [[1], []]}, "prompt.1", "empty"),
    ({"prompt": [[1, -2]]}, "prompt", "token id -2 is outside 0..99999"),
    ({"best_of": 3}, "best_of", "as many as n"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"stream_options": {"x": 1}}, "stream_options.x", "no such field"),
    ({"stream_options": {}}, "stream_options", "stream: true"),
    ({"slo": {"max_tbt_ms": 1e-322}}, "slo.max_tbt_ms", "positive"),
    ({"slo": "gold"}, "slo_class", "this server has offline"),
    ({"slo": "gold", "slo_class": "offline"}, "slo", "contradicts"),
    ({"tier": "gold"}, "tier", "realtime"),
    ({"tier": "realtime", "service_tier": "flex"}, "tier", "contradicts"),
    ({"guided_regex": ""}, "guided_regex", "is empty"),
    ({"guided_json": {"a": "bad"}}, "guided_json", "is bad"),
    ({"guided_json": 5}, "guided_json", "must be an object"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": ["bad"]}, "guided_choice", "is bad"),
    ({"guided_regex": "a", "guided_json": "{}"}, "guided_regex", "contradicts"),
    ({"structured_outputs": {}}, "structured_outputs", "needs json"),
    ({"structured_outputs": {"regex": "bad"}}, "structured_outputs.regex", "is bad"),
    ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar", "no such field"),
    ({"cache_salt": "x" * 257}, "cache_salt", "257 characters; at most 256"),
    ({"cache_salt": "x" * 99_999}, "cache_salt", "more than 65536"),
    ({"cache_salt": 7}, "cache_salt", "string"),
    ({"prompt_cache_key": "x" * 257}, "prompt_cache_key", "more than 256"),
    ({"prediction": {"type": "content", "content": "a"}}, "prediction", ""),
]
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {**BAD, "type": "text"}}, FORMAT, "is not for type text"),
    ({"response_format": BAD}, f"{FORMAT}.schema", "is bad"),
    ({"prediction": "a"}, "prediction", "object"),
    ({"prediction": {"type": "tokens", "content": "a"}}, "", "'content'"),
    ({"prediction": {"type": "content"}}, "prediction.content", "required"),
    ({"prediction": {"type": "content", "content": [IMAGE]}}, "", "only text"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "x", "content": "a"}]}, "", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages.0", "is required"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0", "only text"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0", "only an assistant"),
    ({"max_tokens": 1.5}, "max_tokens", "whole number"),
    ({"seed": 2.0**63}, "seed", ""),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradicts"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"max_completion_tokens": 9999}, "max_completion_tokens", "in all"),
    ({"max_tokens": 9999}, "max_tokens", "in all"),
    ({"messages": [{"role": "user", "content": "b" * 5000}]}, "messages", "tokens; at most"),
]


@pytest.mark.promise(16)
@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        *(("completions", *each) for each in COMPLETIONS),
        *(("chat/completions", *each) for each in CHATS),
    ],
)
def test_a_field_that_is_wrong_is_named(
    refusing: tuple[Plain, FakeEngine], path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    """What is wrong at every door alike is in ../test_one_path.py."""
    plain, engine = refusing
    body = {**(CHAT if path.startswith("chat") else COMPLETION), **fields}
    status, answer, _ = plain.call("POST", f"/v1/{path}", body)
    assert status == 400
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert param in ("", error["param"]) and error["message"].startswith(param)
    assert not engine.requests and not engine.live


OWN = {
    "n": "at most 16, got",
    "logprobs": "at most 20, got",
    "top_logprobs": "at most 20, got",
    "expected_calls": "at most 10000, got",
    "program_deadline_ms": "at most 1,000,000,000, got inf",
    "slo.ttft_ms": "must be a positive, finite time, got inf",
    "temperature": "at most 100, got inf",
    "min_p": "at most 1, got inf",
    "stop_token_ids": "is outside 0..99999",
    "best_of": "only as many as n",
}
"""What is said of fields whose own limit is below that of 32 or 64 bits."""
BODIES: dict[str, tuple[type[Generation], dict[str, Any]]] = {
    "completions": (CompletionRequest, COMPLETION),
    "chat/completions": (ChatRequest, {**CHAT, "logprobs": True}),
    "responses": (ResponseRequest, {"input": "a", "include": ["message.output_text.logprobs"]}),
}


def numbers(kind: type[BaseModel]) -> dict[str, Any]:
    """The fields of a body that are numbers, or have numbers, each with one of 400 digits."""
    huge = 10**399
    found: dict[str, Any] = {"logit_bias": {"1": huge}, "slo": {"ttft_ms": huge}}
    for name, field in kind.model_fields.items():
        of = get_args(field.annotation)
        if {Number, Whole, Int32, Int64} & set(of):
            found[name] = huge
        elif any(Whole in get_args(get_args(each)[0]) for each in of if get_args(each)):
            found[name] = [huge]
    return found


@pytest.mark.promise(16)
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(path, *each) for path, (kind, _) in BODIES.items() for each in numbers(kind).items()],
    ids=lambda each: each if isinstance(each, str) else "huge",
)
def test_a_number_of_400_digits_is_told_the_limit_of_its_field(
    refusing: tuple[Plain, FakeEngine], path: str, name: str, value: Any
) -> None:
    plain, engine = refusing
    body = {**BODIES[path][1], "program": "a", name: value}
    status, answer, _ = plain.call("POST", f"/v1/{path}", body)
    assert status == 400 and not engine.requests
    error = answer["error"]
    assert error["param"].startswith(name) and error["message"].startswith(name)
    assert OWN.get(error["param"], "at most") in error["message"]
    assert "0" * 40 not in error["message"]


def test_one_bad_prompt_of_many_submits_none(plain: Plain, engine: FakeEngine) -> None:
    status, answer, _ = plain.call("POST", "/v1/completions", {"prompt": ["a", "b" * 5000]})
    assert status == 400
    assert "5000 tokens" in answer["error"]["message"]
    assert not engine.requests


def test_a_call_that_does_not_fit_the_queue_leaves_nothing(
    plain: Plain, engine: FakeEngine
) -> None:
    engine.max_requests = 2
    status, answer, headers = plain.call("POST", "/v1/completions", {"prompt": ["a", "b", "c"]})
    assert status == 429
    assert answer["error"]["type"] == "rate_limit_error"
    assert int(headers["retry-after"]) >= 1
    engine.wait(lambda: not engine.live)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/v1/completions", b"{", 400, "not JSON"),
        ("POST", "/v1/completions", b"[]", 400, "an object"),
        ("POST", "/v1/completions", b'{"prompt": "\xff"}', 400, ""),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("GET", "/v1/nothing", None, 404, "there is no GET /v1/nothing"),
        ("GET", "/v1/models/other", None, 404, "no model 'other'"),
        ("POST", "/tokenize", {}, 400, "either prompt or messages"),
        ("POST", "/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
        ("POST", "/detokenize", {"tokens": [100_000]}, 400, "outside 0..99999"),
    ],
)
def test_other_calls_that_are_wrong(
    shared: Plain, method: str, path: str, body: Any, status: int, says: str
) -> None:
    got, answer, _ = shared.call(method, path, body)
    assert got == status
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 200) for path in ("/health", "/ready", "/version", "/v1/models", "/", "/metrics")),
        ("/console/events", 200),  # which has no end
        ("/v1/models/other", 404),
        ("/v1/completions", 405),
    ],
)
def test_head_is_get_without_its_body(shared: Plain, path: str, status: int) -> None:
    connection, told = shared.connect(), {}
    for method in ("HEAD", "GET"):
        if (method, path) == ("GET", "/console/events"):
            break
        connection.request(method, path)
        response = connection.getresponse()
        told[method] = response.status, response.getheader("content-type")
        assert bool(response.read()) == (method == "GET")
        if method == "GET":
            assert told["GET"] == told["HEAD"]
    assert told["HEAD"][0] == status
    connection.close()


def test_a_request_id_in_use_is_refused(plain: Plain, engine: FakeEngine) -> None:
    first = plain.connect()
    body = b'{"prompt": "a", "request_id": "mine"}'
    first.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    engine.wait(lambda: "mine" in engine.live)
    status, answer, _ = plain.call("POST", "/v1/completions", body)
    assert status == 409
    assert "already running" in answer["error"]["message"]
    engine.step(16)
    assert first.getresponse().status == 200


def test_tokens_there_and_back(shared: Plain) -> None:
    status, answer, _ = shared.call("POST", "/tokenize", {"prompt": "Hey"})
    assert (status, answer["tokens"], answer["count"]) == (200, [72, 101, 121], 3)
    _, back, _ = shared.call("POST", "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "Hey"}
    _, chat, _ = shared.call("POST", "/tokenize", CHAT)
    assert "".join(map(chr, chat["tokens"])) == "user: a\nassistant:"


TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"user": "u", "store": False, "metadata": {"a": "b"}, "suffix": ""}),
    ("completions", {"skip_special_tokens": True, "include_stop_str_in_output": False}),
    ("completions", {"best_of": 1, "stop": None, "no_such_field": None}),
    ("completions", {"stream": True, "stream_options": {"include_usage": None}}),
    ("completions", {"stream": True, "stream_options": {"include_obfuscation": False}}),
    ("completions", {"top_p": 0, "seed": -5, "stop": [], "logit_bias": {}, "max_tokens": 1.0}),
    ("chat/completions", {"tools": [], "tool_choice": "none", "modalities": ["text"]}),
    ("chat/completions", {"safety_identifier": "s", "prompt_cache_key": "p"}),
    ("chat/completions", {"store": True, "parallel_tool_calls": True, "verbosity": "low"}),
    ("chat/completions", {"reasoning_effort": "high", "service_tier": "priority"}),
    ("chat/completions", {"prediction": {"type": "content", "content": "a"}}),
    ("chat/completions", {"prompt_cache_retention": "24h"}),
    ("chat/completions", {"tools": [], "tool_choice": "auto", "parallel_tool_calls": None}),
    ("chat/completions", {"max_tokens": 1.0, "n": 1.0, "top_k": -1.0, "seed": -5.0}),
    ("chat/completions", {"top_p": 0, "seed": -(2**63), "top_logprobs": 0}),
    ("chat/completions", {"stop": [], "logit_bias": {}, "metadata": {}, "functions": None}),
    ("responses", {"tools": [], "tool_choice": "auto", "max_output_tokens": 1.0, "seed": -5}),
]


def test_what_changes_nothing_is_taken_and_null_is_absent(
    plain: Plain, running: FakeEngine
) -> None:
    usual = {"responses": {"input": "a"}, "completions": {**COMPLETION, "max_tokens": 1}}
    for path, fields in TAKEN:
        body = {**usual.get(path, {**CHAT, "max_tokens": 1}), **fields}
        connection = plain.connect()
        kind = {"Content-Type": "application/json"}
        connection.request("POST", f"/v1/{path}", json.dumps(body), kind)
        assert connection.getresponse().status == 200, (path, fields)
        connection.close()


def test_an_assistants_turn_may_have_calls_instead_of_content(shared: Plain) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    status, chat, _ = shared.call("POST", "/tokenize", {"messages": turns})
    assert status == 200
    text = "".join(map(chr, chat["tokens"]))
    assert text == 'user: a\nassistant: f({"x": 1})\ntool: 2\nassistant:'


TURNS: list[tuple[str, dict[str, Any]]] = [
    ("", {"content": None}),
    ("", {}),
    ("", {"content": None, "refusal": None, "tool_calls": None, "function_call": None}),
    ("b", {"content": "b", "annotations": [], "tool_calls": [], "audio": None}),
    ("b", {"content": "b", "phase": "final_answer"}),
    ("No.", {"content": None, "refusal": "No.", "annotations": []}),
    ("No.", {"content": [{"type": "refusal", "refusal": "No."}]}),
    ("b", {"content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]}),
    ("b", {"content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]}),
    ("b", {"content": "b", "provider_specific_fields": {"refusal": None}}),
    ('f({"x": 1})', {"content": None, "tool_calls": [{**CALL, "extra_content": {}, "index": 0}]}),
    ('f({"x": 1})', {"tool_calls": calls({"x": 1})}),
    ("f({})", {"tool_calls": calls(None)}),
    ("f({})", {"tool_calls": calls("")}),
    ('f({"x": 1})', {"content": None, "function_call": CALL["function"]}),
]


@pytest.mark.parametrize(("says", "turn"), TURNS)
def test_what_clients_send_back_is_taken(shared: Plain, says: str, turn: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", **turn}]
    status, chat, _ = shared.call("POST", "/tokenize", {"messages": turns})
    assert status == 200, chat
    text = "".join(map(chr, chat["tokens"]))
    assert text == f"user: a\nassistant: {says}\nassistant:"


def test_functions_of_old_clients_are_tools(shared: Plain) -> None:
    turns = [
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}], "name": "Ann"},
    ]
    status, chat, _ = shared.call("POST", "/tokenize", {"messages": turns})
    assert status == 200, chat
    text = "".join(map(chr, chat["tokens"]))
    assert text == 'assistant: f({"x": 1})\ntool: 2\nuser: a\nassistant:'


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"role": "user", "content": None}, "content is required"),
        ({"role": "user", "content": "a", "refusal": "no"}, "only an assistant has refusal"),
        ({"role": "tool", "content": "a", "function_call": {"name": "f"}}, "only an assistant"),
        ({"role": "user", "content": "a", "tool_call_id": "c"}, "only a tool has a tool_call_id"),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "refusal": "a"}]},
            "no refusal",
        ),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, "has refusal"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}, "function"),
    ],
)
def test_turns_that_are_none(shared: Plain, turn: dict[str, Any], says: str) -> None:
    status, answer, _ = shared.call("POST", "/v1/chat/completions", {"messages": [turn]})
    assert status == 400
    assert says in answer["error"]["message"]


def test_arguments_may_be_as_long_as_a_prompt(shared: Plain) -> None:
    told = json.dumps({"text": "x" * 100_000})
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": told}}
    turns = [{"role": "assistant", "tool_calls": [call]}]
    status, chat, _ = shared.call("POST", "/tokenize", {"messages": turns})
    assert status == 200 and chat["count"] > len(told)
    item = {"type": "function_call", "call_id": "c", "name": "write", "arguments": told}
    status, answer, _ = shared.call("POST", "/v1/responses", {"input": [item]})
    assert (status, answer["error"]["param"]) == (400, "input")  # more than the model takes
