"""What stands before the application."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator

import openai
import pytest

from jaxserve.server.http import admission_middleware
from jaxserve.server.http.transport import protocol
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.write_timeout import WriteTimeout
from jaxserve.server.server import Server
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.http.test_endings import begin

MIB = 1 << 20


@pytest.fixture
def stream_buffer_bytes() -> int:
    return MIB


@pytest.fixture
def server(engine: FakeEngine, stream_buffer_bytes: int) -> Iterator[Server]:
    options = ServerOptions(
        max_calls=2,
        write_timeout_s=0.2,
        stream_buffer_bytes=stream_buffer_bytes,
        request_log=True,
    )
    with Server(engine, grace_s=0.0, http=SETTINGS, options=options) as server:
        yield server


def counted(plain: Plain, method: str, ending: str) -> float:
    connection = plain.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith("jaxserve:calls_total")
        and f'method="{method}"' in line
        and f'ending="{ending}"' in line
    )
    return float(line.rsplit(" ", 1)[1])


def wait_counted(plain: Plain, ending: str, count: int, log: pytest.LogCaptureFixture) -> None:
    """Until so many calls have ended so; a call ends a moment after its client knows."""
    deadline = time.monotonic() + PATIENCE
    while counted(plain, "http /v1/completions", ending) < count:
        assert time.monotonic() < deadline, log.text


def test_more_calls_than_are_taken_get_429(plain: Plain, engine: FakeEngine) -> None:
    running = [begin(plain), begin(plain, stream=True)]
    engine.wait(lambda: len(engine.live) == 2)
    status, answer, headers = plain.call("POST", "/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["code"]) == (429, "too_many_calls")
    assert int(headers["retry-after"]) >= 1
    assert plain.call("GET", "/health")[0] == 200
    assert counted(plain, "http /v1/completions", "too_many_calls") == 1
    engine.step(50)
    for connection in running:
        assert connection.getresponse().read()
        connection.close()
    engine.run()
    assert plain.call("POST", "/v1/completions", {"prompt": "a"})[0] == 200


def test_a_body_that_does_not_say_how_long_it_is_is_not_read(plain: Plain) -> None:
    connection = plain.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    piece = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)
    try:
        for _ in range(100):
            connection.send(piece)
    except OSError:
        return  # the server has hung up on it
    assert connection.getresponse().status == 413


def test_a_body_that_does_not_come_is_not_waited_for(
    plain: Plain, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_middleware, "BODY_S", 0.1)
    for _ in range(3):  # more than may be open at once
        connection = plain.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "15")
        connection.endheaders(b'{"prompt"')
        response = connection.getresponse()
        assert response.status == 408
        problem = "the body: only 9 bytes of it have come within 0.1 s"
        assert json.loads(response.read())["error"]["message"] == problem
        connection.close()
    engine.run()
    assert plain.call("POST", "/v1/completions", {"prompt": "a"})[0] == 200


def test_a_head_that_is_too_long_is_not_kept(plain: Plain) -> None:
    with plain.socket() as connection:
        connection.sendall(b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):  # it may hang up before this is read
            connection.sendall(b"x" * (protocol.HEAD_BYTES + 1))
            assert connection.recv(64).startswith(b"HTTP/1.1 400 ")


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(("before", "sent"), [(b"", b""), (b"", HEALTH[:9]), (HEALTH, HEALTH[:9])])
def test_a_head_that_does_not_come_is_not_waited_for(
    plain: Plain, before: bytes, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)
    with plain.socket() as connection:
        connection.sendall(before)
        if before:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(sent)
        while connection.recv(4096):  # until the server hangs up
            pass


def test_a_call_may_take_longer_than_its_head_and_body(
    plain: Plain, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)
    monkeypatch.setattr(admission_middleware, "BODY_S", 0.05)
    calls = [begin(plain), begin(plain, stream=True)]
    engine.wait(lambda: len(engine.live) == 2)
    with plain.socket() as silent:  # it is given up later than they would be
        assert not silent.recv(1)
    engine.step(50)
    for connection in calls:
        response = connection.getresponse()
        assert response.status == 200 and b" w0" in response.read()
        connection.close()


@pytest.mark.parametrize(
    ("stream_buffer_bytes", "limited"),
    [(MIB, True), (1 << 30, True), (1 << 30, False)],
    ids=["full", "late", "dropped"],
)
def test_a_reader_that_does_not_read_is_given_up(
    limited: bool,
    plain: Plain,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Because of what waits for it, or because it waits for long, or since the system has dropped
    its connection, which may come first."""
    if not limited:
        if not hasattr(socket, "TCP_USER_TIMEOUT"):
            pytest.skip("this system drops nobody")
        monkeypatch.setattr(WriteTimeout, "wait", lambda _, write: write)
    engine.text = lambda k: "x" * 4096
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True}).encode()
    with plain.socket() as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        head += "Content-Type: application/json\r\n\r\n"
        connection.sendall(head.encode() + body)
        engine.wait(lambda: engine.live)
        engine.run()
        engine.wait(lambda: not engine.live)
        wait_counted(plain, "slow_reader", 1, caplog)
    assert "ending=slow_reader" in caplog.text and "reads too slowly" not in caplog.text


def test_every_call_is_a_line_without_its_prompt(
    client: openai.OpenAI, running: FakeEngine, plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client.completions.create(
        model="fake", prompt="secret", max_tokens=3, extra_body={"request_id": "mine"}
    )
    plain.call("POST", "/v1/completions", {"prompt": "secret", "foo": 1})
    plain.call("POST", "/v1/completions", b"secret")
    plain.call("GET", "/ready")
    lines = [r.getMessage() for r in caplog.records if r.name == "jaxserve.calls"]
    assert len(lines) == 3, lines
    assert 'door=http method="http /v1/completions" request_id=mine x_request_id=req_' in lines[0]
    assert " peer=127.0.0.1:" in lines[0]
    assert "ending=ok" in lines[0] and "prompt_tokens=6 output_tokens=3" in lines[0]
    assert "ending=invalid" in lines[1]
    assert "ending=malformed" in lines[2]
    assert "secret" not in "".join(lines)
    assert "secret" not in caplog.text


def test_a_call_that_the_client_leaves_is_counted_so(
    plain: Plain, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    for stream in (True, False):
        connection = begin(plain, stream=stream)
        engine.wait(lambda: engine.live)
        connection.close()
        engine.wait(lambda: not engine.live)
    with plain.socket() as connection:  # before its body has come
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
    wait_counted(plain, "cancelled", 3, caplog)
    assert "Traceback" not in caplog.text
