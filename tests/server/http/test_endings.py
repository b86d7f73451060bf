"""Clients that leave, servers that stop, engines that fail."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.engine.output import FinishReason, Output
from jaxserve.server.server import Server
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

JSON = {"Content-Type": "application/json"}


def begin(plain: Plain, **fields: object) -> HTTPConnection:
    connection = plain.connect()
    body = json.dumps({"prompt": "a", "max_tokens": 50, **fields})
    connection.request("POST", "/v1/completions", body, JSON)
    return connection


@pytest.mark.promise(12)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]], ids=["one", "two"])
def test_who_hangs_up_is_cancelled(
    plain: Plain, engine: FakeEngine, stream: bool, prompt: object
) -> None:
    connection = begin(plain, stream=stream, prompt=prompt)
    engine.wait(lambda: len(engine.live) == (1 if prompt == "a" else 2))
    if stream:
        engine.step()
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")
        response.close()
    connection.close()
    engine.wait(lambda: not engine.live and engine.cancelled)


def test_an_engine_that_fails_ends_calls_with_an_error(plain: Plain, engine: FakeEngine) -> None:
    whole, stream = begin(plain), begin(plain, stream=True)
    engine.wait(lambda: len(engine.live) == 2)
    engine.step()
    events = stream.getresponse()
    assert events.status == 200
    engine.fail(RuntimeError("out of luck"))
    response = whole.getresponse()
    assert response.status == 500
    assert "out of luck" in json.loads(response.read())["error"]["message"]
    assert b'"engine_failed"' in events.read()
    status, answer, _ = plain.call("GET", "/health")
    assert status == 503 and "out of luck" in answer["error"]["message"]
    assert plain.call("GET", "/ready")[0] == 503


@pytest.mark.promise(21)
def test_a_server_that_stops_lets_calls_end() -> None:
    engine = FakeEngine()
    server = Server(engine, grace_s=PATIENCE, http=SETTINGS)
    server.start()
    plain = Plain(server)
    assert plain.call("GET", "/ready")[0] == 200
    running = begin(plain, max_tokens=2)
    engine.wait(lambda: engine.live)
    server.request_stop()
    engine.wait(lambda: not engine.open)
    status, answer, headers = plain.call("GET", "/ready")
    assert status == 503 and "shutting down" in answer["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    status, answer, headers = plain.call("POST", "/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["type"]) == (503, "service_unavailable")
    assert int(headers["retry-after"]) >= 1
    engine.step(2)
    assert json.loads(running.getresponse().read())["choices"][0]["text"] == " w0 w1"
    running.close()
    assert server.stop(PATIENCE)


def test_calls_beyond_the_grace_are_told(engine: FakeEngine, plain: Plain, server: Server) -> None:
    whole, stream = begin(plain), begin(plain, stream=True)
    engine.wait(lambda: len(engine.live) == 2)
    stopping = threading.Thread(target=server.stop)  # the grace is 0 s
    stopping.start()
    assert whole.getresponse().status == 503
    assert b"shutting down" in stream.getresponse().read()
    whole.close()
    stream.close()
    stopping.join(PATIENCE)
    assert not stopping.is_alive()


@pytest.mark.parametrize("door", ["gRPC", "HTTP"])
def test_a_continuation_that_fails_takes_the_others_with_it(
    plain: Plain, engine: FakeEngine, server: Server, door: str
) -> None:
    with Client(server.address) as client:
        if door == "gRPC":
            generation = client.generate("a", n=2)
        else:
            connection = begin(plain, n=2)
        engine.wait(lambda: engine.live)
        (running,) = engine.live.values()
        name = running.request.id
        del running.produced[0]
        failed = FinishReason.ERROR
        running.on_output(Output(name, 0, finish_reason=failed, error="the grammar is too complex"))
        engine.wait(lambda: name in engine.cancelled and not engine.live)
        if door == "gRPC":
            with pytest.raises(ServerError, match="too complex"):
                list(generation)
        else:
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 500 and b"too complex" in answer and b"internal" in answer
            connection.close()
