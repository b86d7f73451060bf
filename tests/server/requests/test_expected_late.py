"""Real-time requests whose first token would come too late are refused, at both frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from jaxserve.client import Client, ServerError, make_request
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.server.grpc.calls import RETRY_KEY
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.telemetry.test_prometheus import scrape, value

CLASSES = {"fast": ServiceLevel(SLO(ttft=0.5), Tier.REALTIME, "fast")}
TIGHT = {"ttft_ms": 500}


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    """The engine says that a first token takes 2.5 s, and 0.1 s if nobody were there."""
    engine.wait_s = Wait(2.5, 0.1)
    options = ServerOptions(refuse_late=0.75)
    with Server(
        engine,
        metrics_port=0,
        grace_s=0.0,
        http=SETTINGS,
        slo_classes=CLASSES,
        options=options,
    ) as server:
        yield server


@pytest.fixture
def plain(server: Server) -> Plain:
    return Plain(server)


def complete(plain: Plain, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    return plain.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, **fields})


def nothing_is_left(server: Server, engine: FakeEngine) -> None:
    assert server._loop is not None
    idle = server._frontends.admission.wait_idle()
    asyncio.run_coroutine_threadsafe(idle, server._loop).result(PATIENCE)
    assert not engine.requests and not server._frontends.requests.running


def test_grpc(server: Server, stub: generation_pb2_grpc.GenerationStub, engine: FakeEngine) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(make_request("hi", slo=TIGHT), timeout=20))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = error.value.details()
    assert details == (
        "slo.ttft_ms: the first token is expected in 2500 ms, 100 for its own prompt and 2400 of "
        "waiting for others; it may wait for 300 ms, 0.75 (server.refuse_late) of the 400 ms that "
        "500 ms leave; try again later, or set serve_late"
    )
    # 2.4 s of waiting, less three quarters of the 0.4 s that it has.
    trailing = dict(error.value.trailing_metadata())
    assert 2100 <= float(trailing[RETRY_KEY]) <= 3150
    nothing_is_left(server, engine)


@pytest.mark.parametrize("stream", [False, True])
def test_http(server: Server, plain: Plain, engine: FakeEngine, stream: bool) -> None:
    for prompt in ("a", ["a", "b", "c"]):
        status, answer, headers = complete(plain, slo=TIGHT, stream=stream, prompt=prompt)
        assert status == 429
        error = answer["error"]
        assert (error["code"], error["param"]) == ("expected_late", "slo.ttft_ms")
        assert error["type"] == "rate_limit_error"
        assert "2500 ms" in error["message"] and "500 ms" in error["message"]
        assert headers["retry-after"] in ("3", "4")
    nothing_is_left(server, engine)


def test_a_target_for_the_whole_job_is_one_for_its_first_token(plain: Plain) -> None:
    for more in ({}, {"ttft_ms": 5000}):
        status, answer, _ = complete(plain, slo={"jct_ms": 500, **more})
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (429, "expected_late", "slo.jct_ms")
        assert error["message"].startswith("slo.jct_ms: the first token is expected in 2500 ms")


def test_a_chat_and_a_class(plain: Plain) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "slo": "fast"}
    status, answer, _ = plain.call("POST", "/v1/chat/completions", chat)
    assert (status, answer["error"]["code"]) == (429, "expected_late")


def test_who_is_served_all_the_same(plain: Plain, engine: FakeEngine) -> None:
    engine.run()
    for fields in (
        {},
        {"slo": {"tbt_ms": 1, "jct_ms": 1}},
        {"slo": {"ttft_ms": 5000}},
        {"slo": TIGHT, "tier": "best_effort"},
        {"slo": TIGHT, "service_tier": "flex"},
        {"slo": TIGHT, "serve_late": True},
        {"slo": {"ttft_ms": 99}},  # which the prompt alone would miss
    ):
        status, answer, _ = complete(plain, **fields)
        assert status == 200 and answer["choices"][0]["text"] == " w0 w1"
    assert complete(plain, slo=TIGHT)[0] == 429
    engine.wait_s = Wait(0.3, 0.1)  # there is room again
    assert complete(plain, slo=TIGHT)[0] == 200
    status, answer, _ = complete(plain, serve_late="yes")
    assert status == 400 and answer["error"]["param"] == "serve_late"


def test_clients_say_it_too(server: Server, engine: FakeEngine) -> None:
    engine.run()
    with Client(server.address) as client:
        with pytest.raises(ServerError, match="expected in 2500 ms"):
            client.complete("hi", max_tokens=2, slo=TIGHT)
        for fields in ({"serve_late": True}, {"tier": "best_effort"}):
            (one,) = client.complete("hi", max_tokens=2, slo=TIGHT, **fields)
            assert one.text == " w0 w1"


def test_only_where_the_config_says_so(engine: FakeEngine) -> None:
    engine.wait_s = Wait(2.5, 0.1)
    engine.run()
    with Server(engine, grace_s=0.0) as server, Client(server.address) as client:
        assert client.complete("hi", max_tokens=2, slo=TIGHT)


def test_many_leave_nothing_and_are_counted(
    server: Server, plain: Plain, engine: FakeEngine
) -> None:
    connection = plain.connect()
    body = b'{"prompt": "a", "slo": {"ttft_ms": 500}}'
    for _ in range(20):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 429 and reply.read()
    connection.close()
    nothing_is_left(server, engine)
    samples = scrape(server)
    method = "http /v1/completions"
    assert value(samples, "calls_total", method=method, ending="expected_late") == 20
    assert value(samples, "expected_wait_seconds", tier="realtime") == 2.5
    assert value(samples, "expected_wait_seconds", tier="best_effort") == 5.0
