"""What a body may hold, and what it costs the server to find that it may not."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import select
import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.grpc.grpc_server import MAX_CALL_BYTES
from jaxserve.server.http.admission_middleware import limited_receive
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai import body_limits, schema
from jaxserve.server.http.openai.body_limits import (
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_PARTS,
    SHOWN_DEEP,
    parse_body,
)
from jaxserve.server.http.openai.schema import (
    MAX_MESSAGES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

SURROGATE = "\ud800"
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = b'{"role":"user","content":"a"}'


def refused(raw: bytes, kind: Any = ChatRequest) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse_body(raw, kind)
    assert error.value.status == 400
    return error.value


WITH_SURROGATES = [
    (COMPLETION, {"prompt": SURROGATE}, "prompt"),
    (COMPLETION, {"prompt": ["a", "a" * 50_000 + SURROGATE]}, "prompt.1"),
    (COMPLETION, {"request_id": SURROGATE}, "request_id"),
    (COMPLETION, {"stop": ["a", SURROGATE]}, "stop.1"),
    (COMPLETION, {"guided_json": {"const": SURROGATE}}, "guided_json.const"),
    (COMPLETION, {"metadata": {SURROGATE: "a"}}, "metadata"),
    (COMPLETION, {"logit_bias": {SURROGATE: 1}}, "logit_bias"),
    (COMPLETION, {"slo": SURROGATE}, "slo"),
    (COMPLETION, {SURROGATE: 1}, None),
    (CHAT, {"messages": [{"role": "user", "content": SURROGATE}]}, "messages.0.content"),
    (CHAT, {"chat_template_kwargs": {"a": [SURROGATE]}}, "chat_template_kwargs.a.0"),
    ("/tokenize", {"prompt": SURROGATE}, "prompt"),
]


def test_half_a_surrogate_pair_is_refused_and_its_field_named(
    plain: Plain, engine: FakeEngine
) -> None:
    right = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, COMPLETION: {"prompt": "a"}}
    for path, fields, param in WITH_SURROGATES:
        status, answer, _ = plain.call("POST", path, {**right.get(path, {}), **fields})
        assert (status, answer["error"]["param"]) == (400, param)
        assert "U+D800, half a surrogate pair" in answer["error"]["message"]
    assert not engine.requests


def test_an_error_shows_only_the_beginning_of_long_names() -> None:
    long = {"a" * 70_000: {"b": SURROGATE}}
    for raw in (json.dumps(long), json.dumps({"a" * 70_000: 1})):
        assert len(str(refused(raw.encode()))) < 200
    deep = '{"a":' * 100 + '"\\ud800"' + "}" * 100
    assert refused(deep.encode()).param == ".".join("a" * SHOWN_DEEP)


def test_whole_pairs_and_all_other_text_are_served(plain: Plain, running: FakeEngine) -> None:
    for text in ("\U00010000", "\x00\x1f\x7f", "e\u0301\u202e\u05d0", "\ufeff\uffff"):
        for body in (json.dumps(text).encode(), json.dumps(text, ensure_ascii=False).encode()):
            raw = b'{"max_tokens":1,"echo":true,"prompt":' + body + b"}"
            status, answer, _ = plain.call("POST", COMPLETION, raw)
            assert (status, answer["choices"][0]["text"]) == (200, text + " w0")


@pytest.mark.parametrize("raw", [b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\xff"'])
def test_what_is_no_utf8_is_refused(raw: bytes) -> None:
    assert "not UTF-8" in str(refused(b'{"prompt":' + raw + b"}", CompletionRequest))


BY_FIELD = {
    "stop_token_ids": b"[%s]",
    "prompt": b"[%s]",
    "logit_bias": b'{"5":%s}',
    "slo": b'{"ttft_ms":%s}',
    "metadata": b'{"a":%s}',
}
NUMBERS = (
    *("n", "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "best_of", "temperature"),
    *("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *BY_FIELD,
)
NO_NUMBERS = (b"1" + b"0" * 400, b"-1" + b"0" * 400, b"1e400", b"NaN", b"-Infinity", b"true")


def test_a_number_that_is_none_of_the_engines_is_refused(plain: Plain, engine: FakeEngine) -> None:
    for field in NUMBERS:
        for number in NO_NUMBERS:
            value = BY_FIELD.get(field, b"%s") % number
            raw = b'{"prompt":"a","%s":%s}' % (field.encode(), value)
            status, answer, _ = plain.call("POST", COMPLETION, raw)
            assert status == 400
            assert answer["error"]["param"].startswith(field)
    assert not engine.requests


# Large ones. 8 MB of anything; the door takes no such chats, these are what `parse` is left with.

MANY = 8 << 20
CHATS = (MESSAGE + b",") * MAX_MESSAGES
PARTS = f"more than {MAX_PARTS:,}"


def unknown(count: int) -> bytes:
    return b"{" + b",".join(b'"a%d":1' % i for i in range(count)) + b"}"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"messages":[' + b"1," * (MANY // 2) + b"1]}", f"more than {MAX_ITEMS:,} entries"),
        (b'{"messages":[' + b"1," * 500_000 + b"1]}", "messages.0: must be an object"),
        (b'{"messages":[' + CHATS * 20 + MESSAGE + b"]}", PARTS),
        (
            b'{"messages":[' + CHATS + MESSAGE + b"]}",
            f"messages: has {MAX_MESSAGES + 1} entries; at most {MAX_MESSAGES} are allowed",
        ),
        (unknown(500_000), PARTS),
        (unknown(60_000), "a0: this server has no"),
        (b'{"a":' + b"[" * MANY, PARTS),
        (b'{"a":' + b"[" * 129 + b"]" * 129 + b"}", f"more than {MAX_DEPTH} deep"),
        (b'{"a":' + b'{"a":' * 900 + b"1" + b"}" * 901, f"more than {MAX_DEPTH} deep"),
        (b'{"n":' + b"1" * MANY + b"}", "more digits than are read"),
        (b'{"temperature":1.' + b"1" * MANY + b"}", "messages: is required"),
        (b'{"messages":[' + b"{}," * (MANY // 3) + b"{}]}", PARTS),
        (b'{"logit_bias":' + unknown(60_000) + b"}", "at most 300"),
        (b'{"stop":[' + b'"",' * 50_000 + b'""]}', "at most 16"),
        (b'{"user":"' + b"a" * MANY + b'"}', "user: has more than 65536 characters"),
        (b'"' + b"a" * MANY + b'"', "must be an object"),
        (b"\\" * MANY, "not JSON"),
    ],
    ids=range(17),
)
def test_a_large_body_is_refused_at_its_first_error(raw: bytes, says: str) -> None:
    assert says in str(refused(raw))


def test_others_have_their_turn_between_the_numbers_of_a_large_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call of the parser took 0.5 s for half a million: it held the interpreter meanwhile."""
    asked = list[str]()
    for name in ("parse_int", "parse_float"):
        monkeypatch.setitem(body_limits._HOOKS, name, lambda text: asked.append(text) or 5)
    raw = b'{"prompt":[' + b"1e-300," * 5000 + b"1]}"
    assert parse_body(raw, CompletionRequest).prompt == [5] * 5001
    assert len(asked) == 5001


def test_of_a_long_schema_no_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = 0

    class Encoder(json.JSONEncoder):
        def iterencode(self, value: Any, _one_shot: bool = False) -> Any:
            nonlocal pieces
            for piece in super().iterencode(value):
                pieces += 1
                yield piece

    monkeypatch.setattr(schema.json, "JSONEncoder", Encoder)
    raw = b'{"prompt":"a","guided_json":{"enum":[' + b"0.5," * 400_000 + b"1]}}"
    assert "guided_json: has more than 65536 characters" in str(refused(raw, CompletionRequest))
    assert pieces < 100_000


def test_arguments_of_functions_are_not_read_here() -> None:
    """What they hold is counted nowhere, and may be twenty times as large."""
    text = '{"a":[' + "[]," * 20_000 + "[]]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    raw = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    (told,) = parse_body(raw, ChatRequest).messages[0].plain()["tool_calls"]
    assert told["function"]["arguments"] == text


def test_a_large_body_that_is_right_is_taken() -> None:
    ids = list(range(100, 100_100))
    for prompt in (ids, [ids, ids], "a,b[]{}" * 1_000_000, ["a"] * 128):
        raw = json.dumps({"prompt": prompt}).encode()
        assert parse_body(raw, CompletionRequest).prompt == prompt
    chat = b'{"messages":[' + (MESSAGE + b",") * (MAX_MESSAGES - 1) + MESSAGE + b"]}"
    assert len(parse_body(chat, ChatRequest).messages) == MAX_MESSAGES
    assert parse_body(b'{"tokens":[1,2]}', DetokenizeRequest).tokens == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([1, -(1 << 31)], "prompt.1: must be a token id"),
        ([1, "a"], "prompt.1: must be a token id"),
        ([1.5], "prompt.0: must be a token id"),
        ([[1], [2, None]], "prompt.1.1: must be a token id"),
        ([[1], 2], "prompt.1: must be as the first prompt, a list of token ids"),
        (["a", [2]], "prompt.1: must be as the first prompt, a string"),
        ([{}], "prompt.0: must be a token id"),
        (5, "prompt: must be a string, or a list"),
        ({}, "prompt: must be a string, or a list"),
    ],
)
def test_what_is_no_prompt_is_said_where_it_is(prompt: Any, says: str) -> None:
    assert str(refused(json.dumps({"prompt": prompt}).encode(), CompletionRequest)).startswith(says)


def json_values() -> st.SearchStrategy[Any]:
    text = st.text(alphabet='a\\"[]{},:\n\u00e9', max_size=6)
    return st.recursive(
        st.none() | st.integers() | text,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=20,
    )


@given(value=json_values(), piece=st.integers(1, 40), ascii_only=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_counted_is_what_is_there(value: Any, piece: int, ascii_only: bool) -> None:
    """Against a walk over the value, whatever its texts hold and wherever pieces end."""

    def walk(value: Any) -> tuple[int, int, int]:
        """Parts, entries but one of each, depth."""
        if isinstance(value, dict):
            inner = [walk(each) for each in value.values()]
            names = len(value)
        elif isinstance(value, list):
            inner, names = [walk(each) for each in value], 0
        else:
            return int(isinstance(value, str)), 0, 0
        parts, items, depths = zip(*inner, strict=True) if inner else ((), (), ())
        return (
            1 + names + sum(parts),
            max(0, len(value) - 1) + sum(items),
            1 + max(depths, default=0),
        )

    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    counted = body_limits.outside_strings(raw, piece)
    assert counted == walk(value)


def test_only_so_many_bytes_are_taken_of_what_holds_no_file(plain: Plain) -> None:
    for path, limit in ((COMPLETION, 1 << 21), (CHAT, 1 << 21), ("/v1/batches", 1 << 17)):
        assert limit < MAX_CALL_BYTES
        connection: http.client.HTTPConnection = plain.connect()
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(limit))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


@pytest.mark.parametrize("length", [b"10", b"9" * 5000, b"1e1", b""])
def test_a_length_that_is_too_long_or_none_is_refused_before_a_byte_is_read(length: bytes) -> None:
    async def read() -> None:
        scope = {"type": "http", "headers": [(b"content-length", length)]}
        await limited_receive(asyncio.Event().wait, scope, 9)()  # type: ignore[arg-type]

    with pytest.raises(HTTPException, match="413: the body: at most 9 bytes are taken"):
        asyncio.run(read())


def test_others_are_answered_while_a_body_is_parsed(
    plain: Plain, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, loads = threading.Event(), threading.Event(), json.loads

    def slowly(text: str, **hooks: Any) -> Any:
        if len(text) > body_limits.INLINE_BYTES:
            asked.set()
            assert go_on.wait(20)
        return loads(text, **hooks)

    monkeypatch.setattr(body_limits.json, "loads", slowly)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "a" * 20_000}).encode()
    connection = plain.connect()
    connection.request("POST", COMPLETION, body, {"Content-Type": "application/json"})
    assert asked.wait(20)
    assert plain.call("GET", "/health")[0] == 200
    assert plain.call("POST", COMPLETION, {"prompt": "a", "max_tokens": 1})[0] == 200
    go_on.set()
    assert connection.getresponse().status == 200
    connection.close()


def test_bodies_that_are_being_read_have_so_much_memory(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones do not count."""
    most = 5 * body_limits.FREE_BYTES  # and each takes two
    monkeypatch.setattr(body_limits, "BODIES_BYTES", most)
    access = Access(Keys(fixed=[key("alice"), key("bob")]))
    engine.run()
    large = json.dumps({"prompt": "a", "max_tokens": 1, "user": "a" * 65_000, "stop": ["b" * 200]})
    large += " " * (2 * body_limits.FREE_BYTES)
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        plain = Plain(server)

        def begin(name: str, body: str, *, whole: bool) -> http.client.HTTPConnection:
            connection = plain.connect()
            connection.putrequest("POST", COMPLETION)
            for header in (
                ("Content-Type", "application/json"),
                ("Authorization", f"Bearer {name}"),
            ):
                connection.putheader(*header)
            connection.putheader("Content-Length", str(len(body) + (not whole)))
            connection.endheaders(body.encode())
            return connection

        slow = [begin("alice", large, whole=False) for _ in range(3)]
        (told, *_), _, _ = select.select([each.sock for each in slow], [], [], PATIENCE)
        (refused,) = (each for each in slow if each.sock is told)
        answer = refused.getresponse()
        assert answer.status == 429 and b"bytes of bodies are being read" in answer.read()
        slow.remove(refused)
        refused.close()
        for name in ("alice", "bob"):
            connection = begin(name, json.dumps({"prompt": "a", "max_tokens": 1}), whole=True)
            assert connection.getresponse().status == 200
            connection.close()
        for each in slow:
            each.send(b" ")
            assert each.getresponse().status == 200
            each.close()
        for _ in range(3):
            connection = begin("bob", large, whole=True)
            assert connection.getresponse().status == 200
            connection.close()


def test_who_hangs_up_within_a_body_is_no_failure_of_the_servers(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = ServerOptions(request_log=True)
    with (
        Server(engine, grace_s=0.0, http=SETTINGS, options=options) as server,
        Plain(server).socket() as sending,
    ):
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        kind = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        sending.sendall((head + kind).encode())
        assert b"100" in sending.recv(4096)  # it reads the body now
        reset = struct.pack("ii", 1, 0)
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    (line,) = [each for each in caplog.messages if each.startswith("call ended")]
    assert "ending=cancelled" in line
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
