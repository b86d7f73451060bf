"""Attacks over HTTP, and the expected answers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve_lab.bench.stress import http_calls
from jaxserve_lab.bench.stress.attacks import MIB, Tried
from jaxserve_lab.bench.stress.http_calls import CHAT, COMPLETIONS, MESSAGES, OLLAMA
from jaxserve_lab.bench.stress.server_process import Victim

SILENT, OPEN_FILES = 1024, 1024  # connections, and files of the server
BODY_BYTES = (256 << 10, MIB, 8 * MIB)
LIARS, HONEST, HONEST_MS = 60, 24, 4000
_PATIENCE_S = 120.0
_SILENT_S = 10.0
_SURROGATES = ("\ud800", "a\udfff", "\udc00\ud800")
_STRINGS = (*_SURROGATES, "\0", "\x1b[31m", "\u202e", "e\u0301" * 500, "\U0010ffff")
_TEXTS = ("request_id", "user", "stop", "slo_class")
_USER = {"role": "user"}
_BLOCKS = b'{"max_tokens":2,"messages":[{"role":"user","content":['
_LISTS_WITHIN_TEXT = json.dumps(
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "f", "arguments": '{"a":[' + "[]," * 20_000 + "[]]}"},
            }
        ],
    }
).encode()


def call(server: Victim, path: str, body: Any = None, **options: Any) -> tuple[int, bytes]:
    """See `http_calls.call`."""
    return http_calls.call(server.http_address, path, body, key=server.key, **options)


def _try(server: Victim, tried: Tried, path: str, body: Any, **options: Any) -> int:
    """Makes a call; counts and returns its status."""
    began = time.monotonic()
    status, _ = call(server, path, body, **options)
    tried.codes[str(status)] += 1
    if status >= 400:
        tried.longest_s = max(tried.longest_s, time.monotonic() - began)
    return status


def _serves(server: Victim, tried: Tried) -> None:
    """Expects an ordinary call to be served."""
    status, _ = call(server, COMPLETIONS, {"prompt": "Once", "max_tokens": 2})
    tried.expect(status == 200, f"an ordinary call got {status} afterwards")


def strings(server: Victim) -> Tried:
    """Sends lone surrogates, NUL and the like in every place for a string."""
    tried = Tried()
    for text in _STRINGS:
        message = {**_USER, "content": text}
        completion = ({"prompt": "x", name: text} for name in _TEXTS)
        calls: list[tuple[str, dict[str, Any]]] = [(COMPLETIONS, fields) for fields in completion]
        calls += [
            (COMPLETIONS, {"prompt": text}),
            (CHAT, {"messages": [message]}),
            (CHAT, {"messages": [{**message, "role": text}]}),
            *((MESSAGES, body) for body in _messages(text)),
            (OLLAMA, {"messages": [message], "format": text}),
            (OLLAMA, {"messages": [{**message, "tool_name": text}], "keep_alive": text}),
            ("/tokenize", {"prompt": text}),
        ]
        for path, body in calls:
            few = {OLLAMA: {"options": {"num_predict": 2}}, "/tokenize": {}}
            short = few.get(path, {"max_tokens": 2})
            status = _try(server, tried, path, {**body, **short})
            tried.expect(status < 500, f"{path}: {status} for {list(body)} of {text[:9]!r}")
    _serves(server, tried)
    return tried


def _messages(text: str) -> Iterator[dict[str, Any]]:
    """Messages with this in each place for a string."""
    use = {"type": "tool_use", "id": text, "name": text, "input": {text: text}}
    result = {"type": "tool_result", "tool_use_id": text, "content": text, "is_error": True}
    turns = [{**_USER, "content": "a"}, {"role": "assistant", "content": [use]}]
    yield {"messages": [*turns, {**_USER, "content": [result]}]}
    yield {"messages": turns[:1], "system": [{"type": "text", "text": text}]}
    yield {"messages": turns[:1], "metadata": {"user_id": text}, "stop_sequences": [text]}


def integers(server: Victim) -> Tried:
    """Sends integers of 400 digits in every place for a number."""
    tried, large = Tried(), 10**399
    fields: dict[str, Any] = dict.fromkeys(("max_tokens", "n", "best_of", "logprobs"), large)
    fields |= dict.fromkeys(("top_k", "seed", "min_tokens", "temperature", "top_p"), large)
    fields |= {"logit_bias": {"1": large}, "stop_token_ids": [large], "prompt": [large]}
    fields |= {"slo": {"ttft_ms": large}}
    for name, value in fields.items():
        status = _try(server, tried, COMPLETIONS, {"prompt": "x", "max_tokens": 2, name: value})
        tried.expect(status == 400, f"{name} of 400 digits got {status}")
    message = {**_USER, "content": "x"}
    for told in ({"max_tokens": large}, {"thinking": {"type": "enabled", "budget_tokens": large}}):
        status = _try(server, tried, MESSAGES, {"messages": [message], "max_tokens": 2, **told})
        tried.expect(status == 400, f"{told.keys()} of 400 digits got {status}")
    for name in ("num_predict", "seed", "top_k", "num_ctx"):
        status = _try(server, tried, OLLAMA, {"messages": [message], "options": {name: large}})
        tried.expect(status == 400, f"options.{name} of 400 digits got {status}")
    _serves(server, tried)
    return tried


def bodies(server: Victim) -> Tried:
    """Sends up to 8 MiB that take long to parse, or have long lists of errors."""
    tried = Tried()
    for size in BODY_BYTES:
        for path, begin, piece, end in (
            (CHAT, b'{"messages":[', b"1,", b"1]}"),
            (CHAT, b'{"messages":[', b'{"role":"user","content":"a"},', b'{"role":"user"}]}'),
            (CHAT, b'{"messages":[', b"[", b""),
            (CHAT, b'{"messages":[', _LISTS_WITHIN_TEXT + b",", b'{"role":"user"}]}'),
            (MESSAGES, _BLOCKS, b'{"type":"text","text":"a"},', b"1]}]}"),
            (MESSAGES, _BLOCKS, b'{"type":"tool_use","input":' + b'{"a":' * 99, b""),
            (
                OLLAMA,
                b'{"messages":[',
                b'{"role":"user","content":"a"},',
                b'{"role":"user","x":1}]}',
            ),
            (COMPLETIONS, b'{"prompt":[', b"1,", b"1]}"),
            (COMPLETIONS, b'{"prompt":[', b"1.2345678901234567e-300,", b"1]}"),
            (COMPLETIONS, b'{"prompt":[', b"1" * 4300 + b",", b"1]}"),
            (COMPLETIONS, b'{"prompt":[', b'"",', b'""]}'),
            (COMPLETIONS, b'{"prompt":"', b"\\u0061", b'"}'),
        ):
            body = begin + piece * ((size - len(begin)) // len(piece)) + end
            _refused(server, tried, path, body)
        unknown = b",".join(b'"a%d":1' % place for place in range(size // 12))
        _refused(server, tried, COMPLETIONS, b"{" + unknown + b"}")
    _serves(server, tried)
    return tried


def _refused(server: Victim, tried: Tried, path: str, body: bytes) -> None:
    status = _try(server, tried, path, body)
    problem = f"{path}: {status} for {len(body):,} bytes that begin {body[:40]!r}"
    tried.expect(400 <= status < 500, problem)


def silent(server: Victim) -> Tried:
    """Opens as many connections as the server may have files. Each gets an answer before its body
    was sent; then half of them send bytes slowly and the others nothing."""
    tried = Tried()
    with contextlib.ExitStack() as stack:
        head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        held = [stack.enter_context(_connected(server, head)) for _ in range(SILENT)]
        until = time.monotonic() + _SILENT_S
        while time.monotonic() < until:
            for connection in held[::2]:
                with contextlib.suppress(OSError):
                    connection.send(b"x")
            status, _ = call(server, "/health")
            tried.expect(status == 200, f"/health got {status}")
            time.sleep(1.0)
        for connection in held:
            tried.codes["closed" if _is_closed(connection) else "still there"] += 1
    tried.expect(set(tried.codes) == {"closed"}, "a connection is still there")
    _serves(server, tried)
    return tried


def framing(server: Victim) -> Tried:
    """Sends a request with an ambiguous end, followed by another request (RFC 9112 section
    11.2)."""
    tried = Tried()
    lengths = ("Content-Length: 5\r\nTransfer-Encoding: chunked", "Content-Length: 5, 6")
    codings = ("Transfer-Encoding: chunked, identity", "X-Long: " + "x" * 60_000)
    for head in (*lengths, *codings):
        request = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n0\r\n\r\n"
        behind = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with _connected(server, (request + behind).encode()) as connection:
            answers = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(1 << 16):
                    answers += piece
        tried.codes[answers[9:12].decode() or "closed"] += 1
        tried.expect(answers.count(b"HTTP/1.1 ") <= 1, f"what is behind {head[:40]!r} was served")
    tried.expect(set(tried.codes) <= {"400", "closed"}, "a request was served")
    return tried


def browsers(server: Victim) -> Tried:
    """Sends what other sites' pages make browsers send: forms, and calls to a name that resolves to
    this machine."""
    tried = Tried()
    upload, kind = http_calls.form()
    for path, body in (("/v1/files", upload), (COMPLETIONS, b"{}"), ("/v1/models", None)):
        for lie in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            _try(server, tried, path, body, headers={**kind, **lie})
    tried.expect(set(tried.codes) == {"403"}, "a page of another site's was served")
    return tried


def liars(server: Victim) -> Tried:
    """Sends many requests with impossible targets, and later a few with possible targets."""
    tried = Tried()

    def ask(ttft_ms: float) -> int:
        body = {"prompt": "Once upon a time", "max_tokens": 32, "slo": {"ttft_ms": ttft_ms}}
        return call(server, COMPLETIONS, body)[0]

    with ThreadPoolExecutor(LIARS + HONEST) as pool:
        lies = [pool.submit(ask, 0.001) for _ in range(LIARS)]
        time.sleep(0.1)
        began = time.monotonic()
        honest = [pool.submit(ask, HONEST_MS) for _ in range(HONEST)]
        served = sum(future.result() == 200 for future in honest)
        tried.longest_s = time.monotonic() - began
        statuses = [future.result() for future in lies]
    tried.codes.update({"honest, 200": served, "honest, refused": HONEST - served})
    tried.codes.update(f"liars, {status}" for status in statuses)
    tried.expect(served >= HONEST - 2, "honest calls were refused beside liars")
    return tried


def template(server: Victim) -> Tried:
    """Sends chats with which the checkpoint's template loops, or fills the memory."""
    tried = Tried()
    for content in ("loop", "fill"):
        status = _try(server, tried, CHAT, {"messages": [{**_USER, "content": content}]})
        tried.expect(status != 200, f"a template that would {content} got {status}")
    _serves(server, tried)
    return tried


HOSTILE_TEMPLATE = """{% if messages[0]['content'] == 'loop' %}
{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}
{% else %}{{ 'ab' * 1500000000 }}{% endif %}"""


@contextlib.contextmanager
def _connected(server: Victim, sent: bytes) -> Iterator[socket.socket]:
    """A connection that has sent this, and reads little at once."""
    host, port = server.http_address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), _PATIENCE_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        yield connection


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(_SILENT_S)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
