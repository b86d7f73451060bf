"""What answers say of targets in headers and trailing metadata, and refusals of the load."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from jaxserve.client import make_request
from jaxserve.engine.stats import EngineStats
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.engine_load import EngineLoad, LoadMeter
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import INFO, PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

CLASSES = {"night": ServiceLevel(SLO(ttft=1.5, jct=600.0), Tier.BEST_EFFORT, "night")}
SLOW = {"slo": {"ttft_ms": 187.5, "tbt_ms": 100}}  # the fake engine's first token takes 200 ms
BUSY = {"running": 3, "waiting": 7, "kv_cache_usage": 0.25}
LOAD = (
    "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=7, "
    "named_metrics.num_requests_running=3"
)


class Busy(FakeEngine):
    """Three run and seven wait, and a quarter of the pool is taken."""

    def stats(self) -> EngineStats:
        free = INFO.num_blocks * 3 // 4
        return dataclasses.replace(super().stats(), running=3, waiting=7, blocks_free=free)


@pytest.fixture
def engine() -> FakeEngine:
    engine = Busy()
    engine.wait_s = Wait(0.1, 0.1)
    return engine


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    options = ServerOptions(refuse_late=0.75)
    with Server(
        engine.run(), grace_s=0.0, http=SETTINGS, slo_classes=CLASSES, options=options
    ) as server:
        yield server


@pytest.fixture
def plain(server: Server) -> Plain:
    return Plain(server)


def told(headers: dict[str, str]) -> dict[str, str]:
    return {n: v for n, v in headers.items() if n.startswith("x-slo") or n == "server-timing"}


def test_a_whole_answer_says_what_was_asked_for_and_what_came_of_it(plain: Plain) -> None:
    timing = "preprocess;dur=0.000, queue;dur=100.000, ttft;dur=200.000, tbt;dur=59.200, "
    timing += "total;dur=300.000, max_tbt;dur=60.000"
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 4}
    _, _, headers = plain.call("POST", "/v1/completions", body)
    nothing = {"x-slo-class": "default", "x-slo-tier": "realtime"}
    assert told(headers) == {**nothing, "server-timing": timing}
    _, answer, headers = plain.call("POST", "/v1/completions", {**body, **SLOW})
    asked = {"x-slo-ttft-ms": "187.5", "x-slo-tpot-ms": "100", "x-slo-max-tbt-ms": "2000"}
    assert told(headers) == {**nothing, **asked, "x-slo-met": "false", "server-timing": timing}
    assert answer["choices"][0]["slo"]["met"] is False
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "slo": "night"}
    _, _, headers = plain.call("POST", "/v1/chat/completions", chat)
    night = {"x-slo-class": "night", "x-slo-tier": "best_effort", "x-slo-met": "true"}
    times = {"x-slo-ttft-ms": "1500", "x-slo-jct-ms": "600000"}
    assert told(headers) == {**night, **times, "server-timing": timing}
    response = {"input": "a", "model": INFO.model, "max_output_tokens": 4, "slo": "night"}
    _, _, headers = plain.call("POST", "/v1/responses", response)
    assert told(headers) == {**night, **times, "server-timing": timing}
    for path in ("/v1/models", "/version"):
        assert not told(plain.call("GET", path)[2])
    assert not told(plain.call("POST", "/tokenize", {"prompt": "a"})[2])
    assert not told(plain.call("POST", "/v1/completions", {"prompt": "a", "n": 99})[2])


def test_a_stream_begins_with_what_was_asked_for(server: Server) -> None:
    with openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="none") as client:
        raw = client.completions.with_raw_response.create(
            model=INFO.model, prompt="a", max_tokens=4, stream=True, extra_body=SLOW
        )
        found = {name: raw.headers[name] for name in raw.headers if name.startswith("x-slo")}
        list(raw.parse())
    asked = {"x-slo-ttft-ms": "187.5", "x-slo-tpot-ms": "100", "x-slo-max-tbt-ms": "2000"}
    assert found == {"x-slo-class": "default", "x-slo-tier": "realtime", **asked}
    assert "server-timing" not in raw.headers


def test_grpc_ends_with_the_same(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(make_request("a", max_tokens=4, **SLOW), timeout=PATIENCE)
        list(call)
        trailing = dict(call.trailing_metadata())
    assert (trailing["x-slo-class"], trailing["x-slo-ttft-ms"]) == ("default", "187.5")
    assert trailing["x-slo-met"] == "false" and "ttft;dur=200.000" in trailing["server-timing"]


def test_who_is_late_hears_when_to_come_again_and_how_busy_it_is(
    server: Server, engine: FakeEngine, plain: Plain
) -> None:
    engine.wait_s = Wait(2.5, 0.1)
    tight = {"prompt": "a", "slo": {"ttft_ms": 500}}
    for stream in (False, True):
        status, answer, headers = plain.call("POST", "/v1/completions", {**tight, "stream": stream})
        error = answer["error"]
        assert (status, error["code"], error["load"]) == (429, "expected_late", BUSY)
        assert 2100 <= error["retry_after_ms"] <= 3151
        assert headers["retry-after-ms"] == str(error["retry_after_ms"])
        assert int(headers["retry-after"]) == -(-error["retry_after_ms"] // 1000)
        assert headers["endpoint-load-metrics"] == LOAD
        assert headers["x-slo-ttft-ms"] == "500" and "x-slo-met" not in headers
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError) as late:
            list(stub.Generate(make_request("a", slo=tight["slo"]), timeout=PATIENCE))
    trailing = dict(late.value.trailing_metadata())
    assert trailing["endpoint-load-metrics"] == LOAD and trailing["x-slo-ttft-ms"] == "500"
    assert 2100 <= float(trailing["grpc-retry-pushback-ms"]) <= 3150


def test_other_refusals_say_it_as_far_as_coming_again_helps(engine: FakeEngine) -> None:
    access = Access(Keys(fixed=[key("often", rate=1), key("two", concurrency=2)]))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        connection = Plain(server).connect()

        def call(who: str, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
            said = {"Authorization": f"Bearer {who}", "Content-Type": "application/json"}
            body = json.dumps({"prompt": "a", "max_tokens": 1, **fields})
            connection.request("POST", "/v1/completions", body, said)
            response = connection.getresponse()
            return response.status, json.loads(response.read())["error"], dict(response.headers)

        assert call("often", n=99)[0] == 400
        status, error, headers = call("often")
        assert (status, error["code"], error["load"]) == (429, "rate_limit_exceeded", BUSY)
        assert 50_000 < error["retry_after_ms"] <= 60_000 == 1000 * int(headers["retry-after"])
        assert headers["endpoint-load-metrics"] == LOAD
        for who, fields in (("nobody", {}), ("two", {"n": 3}), ("two", {"n": 99})):
            status, error, headers = call(who, **fields)
            assert status in (400, 401) and not {"load", "retry_after_ms"} & set(error)
            assert not {"retry-after-ms", "endpoint-load-metrics"} & set(headers)
        server._frontends.requests.draining = True
        status, error, headers = call("two")
        assert (status, error["load"]) == (503, BUSY) and 500 <= error["retry_after_ms"] <= 1500
        server._frontends.requests.draining = False
        connection.close()


def test_the_engine_is_asked_ten_times_a_second_at_most(engine: FakeEngine) -> None:
    now, asked = [5.0], []
    stats = engine.stats
    engine.stats = lambda: (asked.append(now[0]), stats())[1]  # type: ignore[method-assign]
    meter = LoadMeter(engine, lambda: now[0])
    assert [meter() for _ in range(1000)][-1] == EngineLoad(3, 7, 0.25)
    now[0] += 0.05
    meter()
    assert asked == [5.0]
    now[0] += 0.05
    meter()
    assert len(asked) == 2
