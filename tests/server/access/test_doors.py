"""Both doors, and the metrics, with keys."""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.client import Client, ServerError, make_request
from jaxserve.sched.request import SLO, Tier
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import INFO, PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS

CLASSES = {
    "fast": ServiceLevel(SLO(ttft=0.1), Tier.REALTIME, "fast", value=5.0),
    "agent": ServiceLevel(SLO(), Tier.REALTIME, "agent", program_deadline=1.0),
}
KEYS = [
    key("alice"),
    key("often", rate=2),
    key("many", concurrency=1),
    key("two", concurrency=2),
    key("low", tier="best_effort"),
    key("heavy", weight=3),
    key("dear", max_value=3),
    key("root", admin=1),
    key("slow", min_ttft_ms=200, min_tbt_ms=50, min_jct_ms=1000, min_program_ms=5000),
]
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(autouse=True)
def no_key_of_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    options = ServerOptions(request_log=True)
    access = Access(Keys(fixed=KEYS))
    with Server(
        engine,
        grace_s=0.0,
        metrics_port=0,
        http=SETTINGS,
        options=options,
        access=access,
        slo_classes=CLASSES,
    ) as server:
        yield server


def asked(
    address: str | None,
    method: str,
    path: str,
    name: str | None = None,
    body: Any = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes, dict[str, str]]:
    """HTTP, with a key's secret. Reads no more than the first line of endless answers."""
    assert address is not None
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    headers = {"Content-Type": "application/json", **more}
    if name is not None:
        headers["Authorization"] = f"Bearer {name}"
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    endless = response.getheader("content-type", "").startswith("text/event-stream")
    text = response.readline() if endless else response.read()
    connection.close()
    return response.status, text, {k.lower(): v for k, v in response.getheaders()}


GUARDED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_0"),
    ("POST", "/v1/messages"),
    ("POST", "/api/chat"),
    ("GET", "/api/tags"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("GET", "/v1/files"),
    ("POST", "/v1/batches"),
    ("GET", "/metrics"),
    ("GET", "/console/info"),
    ("GET", "/console/events"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "//health"),
    ("OPTIONS", "/v1/models"),
    ("POST", "/reset_prefix_cache"),
]


def test_http_wants_a_key(server: Server) -> None:
    for method, path in GUARDED:
        status, text, headers = asked(server.http_address, method, path, body=BODY)
        error = json.loads(text)["error"]
        if path.startswith("/api/"):
            assert (status, error[:28]) == (401, "this server wants an API key"), path
        else:
            said = status, error["type"], error.get("code", "invalid_api_key")
            assert said == (401, "authentication_error", "invalid_api_key"), path
        assert headers["www-authenticate"] == 'Bearer realm="jaxserve"'
        status, _, headers = asked(server.http_address, method, path, "mallory", BODY)
        assert status == 401 and headers["www-authenticate"].endswith('error="invalid_token"')
        assert asked(server.http_address, method, path, "alice")[0] != 401


def test_anthropics_header_has_a_key_too(server: Server, engine: FakeEngine) -> None:
    engine.run()
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for given, status in (("alice", 200), ("mallory", 401)):
        connection = http.client.HTTPConnection(str(server.http_address), timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "X-Api-Key": given}
        connection.request("POST", "/v1/messages", json.dumps(body), headers)
        answer = connection.getresponse()
        told = json.loads(answer.read())
        assert answer.status == status, told
        connection.close()
    assert engine.requests[-1].tenant == "alice"


def test_only_an_admin_acts_on_the_whole_server(server: Server, engine: FakeEngine) -> None:
    engine.served = dataclasses.replace(INFO, prefix_caching=True)
    for name in ("alice", "low", "heavy"):
        status, text, _ = asked(server.http_address, "POST", "/reset_prefix_cache", name)
        error = json.loads(text)["error"]
        assert (status, error["code"], engine.resets) == (403, "admin_only", 0)
    assert asked(server.http_address, "POST", "/reset_prefix_cache", "root")[0] == 200
    assert engine.resets == 1


def test_whether_it_is_well_anybody_may_ask(server: Server) -> None:
    for path in ("/health", "/ready", "/"):
        assert asked(server.http_address, "GET", path)[0] == 200
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_metrics_port_wants_one_too(server: Server) -> None:
    status, text, headers = asked(server.metrics_address, "GET", "/metrics")
    refused = status, headers["www-authenticate"]
    assert refused == (401, 'Bearer realm="jaxserve"') and b"jaxserve:" not in text
    status, text, _ = asked(server.metrics_address, "GET", "/metrics", "alice")
    assert status == 200 and b"jaxserve:" in text


def test_grpc_wants_a_key(
    server: Server, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine.run()
    for name in (None, "mallory"):
        with Client(server.address, api_key=name) as client:
            for call in (
                lambda c=client: c.info(timeout=PATIENCE),
                lambda c=client: c.complete("a", timeout=PATIENCE),
                lambda c=client: c.embed("a", timeout=PATIENCE),
                lambda c=client: c.score("a", "b", timeout=PATIENCE),
                lambda c=client: c.batch_status("b"),
            ):
                with pytest.raises(ServerError) as error:
                    call()
                assert error.value.code == "UNAUTHENTICATED" and not error.value.passing
    assert not engine.live
    with Client(server.address, api_key="alice") as client:
        assert client.info(timeout=PATIENCE).model == "fake"
        caplog.clear()
        assert client.complete("a", max_tokens=2, timeout=PATIENCE)[0].text == " w0 w1"
    (line,) = caplog.messages
    assert " method=Generate " in line and " key=alice ending=ok " in line


def test_reflection_wants_one_and_two_in_a_call_are_none(server: Server) -> None:
    wanted = reflection_pb2.ServerReflectionRequest(list_services="")
    given, other = ("authorization", "Bearer alice"), ("authorization", "Bearer mallory")
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        for metadata in ((), (given, other)):
            with pytest.raises(grpc.RpcError) as error:
                next(stub.ServerReflectionInfo(iter([wanted]), PATIENCE, metadata))
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = next(stub.ServerReflectionInfo(iter([wanted]), PATIENCE, (given,)))
        assert "jaxserve.v1.Generation" in str(answer)


def test_a_rate_is_counted_once_for_both_doors(server: Server, engine: FakeEngine) -> None:
    engine.run()
    assert asked(server.http_address, "POST", "/v1/completions", "often", BODY)[0] == 200
    with Client(server.address, api_key="often") as client:
        client.complete("a", max_tokens=2, timeout=PATIENCE)
        with pytest.raises(ServerError, match="often: 2 calls a minute") as error:
            client.complete("a", max_tokens=2, timeout=PATIENCE)
        assert error.value.code == "RESOURCE_EXHAUSTED" and error.value.passing
    status, text, headers = asked(server.http_address, "POST", "/v1/completions", "often", BODY)
    assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 30
    for _ in range(5):  # what is asked every few seconds is not counted, and others are not told
        assert asked(server.http_address, "GET", "/metrics", "often")[0] == 200
    assert asked(server.http_address, "POST", "/v1/completions", "alice", BODY)[0] == 200


def test_calls_at_once_are_counted_once_for_both_doors(server: Server, engine: FakeEngine) -> None:
    with Client(server.address, api_key="many") as client:
        running = client.generate("a", max_tokens=2)
        engine.wait(lambda: engine.live)
        status, text, headers = asked(server.http_address, "POST", "/v1/completions", "many", BODY)
        assert status == 429 and "many: 1 calls are open" in text.decode()
        assert int(headers["retry-after"]) >= 1
        with pytest.raises(grpc.RpcError) as error, grpc.insecure_channel(server.address) as other:
            refuse(other)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hints = dict(error.value.trailing_metadata())
        assert int(hints["grpc-retry-pushback-ms"]) >= 1000
        engine.run()
        list(running)
    status, text, _ = asked(server.http_address, "GET", "/metrics", "many")
    assert b'method="Generate"' in text
    while asked(server.http_address, "POST", "/v1/completions", "many", BODY)[0] != 200:
        pass  # the call ends a moment after its last message


def test_requests_count_however_many_are_in_a_call(server: Server, engine: FakeEngine) -> None:
    body = {"prompt": ["a"] * 128, "n": 2, "max_tokens": 2}
    status, text, headers = asked(server.http_address, "POST", "/v1/completions", "two", body)
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (400, "too_many_requests") and "retry-after" not in headers
    assert "asks for 256 requests" in error["message"] and "two may have 2" in error["message"]
    with Client(server.address, api_key="two") as client:
        with pytest.raises(ServerError, match="asks for 3 requests") as refused:
            client.complete("a", n=3, timeout=PATIENCE)
        assert refused.value.code == "INVALID_ARGUMENT"
        running = client.generate("a", n=2, max_tokens=2)
        engine.wait(lambda: engine.live)
        status, text, headers = asked(server.http_address, "POST", "/v1/completions", "two", BODY)
        assert status == 429 and "two: 2 requests run, and the call asks for 1" in text.decode()
        assert int(headers["retry-after"]) >= 1
        with pytest.raises(ServerError, match="2 requests run") as refused:
            client.complete("a", timeout=PATIENCE)
        assert refused.value.code == "RESOURCE_EXHAUSTED"
        assert len(engine.requests) == 1
        engine.run()
        list(running)
    while asked(server.http_address, "POST", "/v1/completions", "two", BODY)[0] != 200:
        pass  # the call ends a moment after its last message


def test_requests_count_until_the_engine_is_done_with_them(
    server: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = threading.Event()
    monkeypatch.setattr(engine, "cancel", lambda _: abandoned.set())  # it takes a while
    with Client(server.address, api_key="two") as client:
        running = client.generate("a", n=2, max_tokens=2)
        engine.wait(lambda: engine.live)
        running.cancel()
        assert abandoned.wait(PATIENCE)
        with pytest.raises(ServerError, match="2 requests run"):
            client.complete("a", timeout=PATIENCE)
        engine.run()
        engine.wait(lambda: not engine.live)
        while asked(server.http_address, "POST", "/v1/completions", "two", BODY)[0] != 200:
            pass


def test_an_id_is_each_key_s_own(server: Server, engine: FakeEngine) -> None:
    given, body = {"request_id": "mine", "max_tokens": 2}, {**BODY, "request_id": "mine"}
    address = server.http_address
    with (
        Client(server.address, api_key="alice") as alice,
        Client(server.address, api_key="two") as two,
    ):
        hers = alice.generate("a", **given)
        engine.wait(lambda: len(engine.live) == 1)
        theirs = two.generate("a", **given)
        engine.wait(lambda: len(engine.live) == 2)
        with pytest.raises(ServerError, match=r"^request_id: 'mine' is already running") as error:
            alice.complete("a", **given)
        assert error.value.code == "ALREADY_EXISTS"
        status, text, _ = asked(address, "POST", "/v1/completions", "alice", body)
        assert status == 409 and "'mine' is already running" in text.decode()
        theirs.cancel()
        engine.wait(lambda: len(engine.live) == 1)  # theirs, not hers
        engine.run()
        assert {message.request_id for message in hers} == {"mine"}
    status, text, _ = asked(address, "POST", "/v1/completions", "two", body)
    assert (status, json.loads(text)["id"]) == (200, "cmpl-mine")
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "request_id": "mine"}
    status, text, _ = asked(address, "POST", "/v1/chat/completions", "two", chat)
    assert (status, json.loads(text)["id"]) == (200, "chatcmpl-mine")


CLAIMS: list[tuple[str, dict[str, Any], str]] = [
    ("low", {"tier": "realtime"}, "tier: key low may ask for best_effort only"),
    ("low", {"service_tier": "priority"}, "tier: key low may ask for best_effort only"),
    ("low", {"slo_class": "fast"}, "tier: key low may ask for best_effort only"),
    ("slow", {"slo": {"ttft_ms": 1}}, "slo.ttft_ms: 1 ms is tighter than key slow may ask"),
    ("slow", {"slo": {"tbt_ms": 49.5}}, "slo.tbt_ms: 49.5 ms is tighter than key slow may"),
    ("slow", {"slo": {"max_tbt_ms": 49}}, "key slow may ask for, 50 ms (min_tbt_ms)"),
    ("slow", {"slo": {"jct_ms": 1e-9}}, "slo.jct_ms: 1e-09 ms is tighter than key slow may"),
    ("slow", {"slo_class": "fast"}, "for, 200 ms (min_ttft_ms)"),
]


def test_what_a_request_may_claim_is_bounded_by_its_key(server: Server, engine: FakeEngine) -> None:
    for name, fields, problem in CLAIMS:
        body = {**BODY, **fields}
        status, text, _ = asked(server.http_address, "POST", "/v1/completions", name, body)
        assert status == 400 and problem in json.loads(text)["error"]["message"]
        wanted = {key: value for key, value in fields.items() if key in ("slo", "slo_class")}
        with Client(server.address, api_key=name) as client, pytest.raises(ServerError) as error:
            client.complete("a", timeout=PATIENCE, **(wanted or {"tier": "realtime"}))
        assert error.value.code == "INVALID_ARGUMENT" and problem in str(error.value)
    assert not engine.requests


def test_a_programs_deadline_is_bounded_by_its_key(server: Server, engine: FakeEngine) -> None:
    tight = "4999 ms is tighter than key slow may ask for, 5000 ms (min_program_ms)"
    body = {**BODY, "program": "a", "program_deadline_ms": 4999}
    headers = {"x-program-id": "a", "x-program-deadline-ms": "4999"}
    path = "/v1/completions"
    for given, more, where in (
        (body, {}, "program_deadline_ms"),
        (BODY, headers, "x-program-deadline-ms"),
    ):
        status, text, _ = asked(server.http_address, "POST", path, "slow", given, more)
        error = json.loads(text)["error"]
        assert (status, error["param"]) == (400, where)
        assert error["message"] == f"{where}: {tight}"
    with Client(server.address, api_key="slow") as client:
        with pytest.raises(ServerError) as refused:
            client.complete("a", timeout=PATIENCE, program={"id": "a", "deadline_ms": 4999})
        assert f"program.deadline_ms: {tight}" in str(refused.value)
        engine.run()
        client.complete("a", timeout=PATIENCE, program={"id": "a", "deadline_ms": 5000})
        client.complete("a", timeout=PATIENCE, program={"id": "b"}, slo_class="agent")
    own, of_class = (request.program for request in engine.requests)
    assert own is not None and own.deadline == 5.0
    assert of_class is not None and of_class.usual_deadline == 5.0


def test_a_class_is_worth_no_more_than_its_key(server: Server, engine: FakeEngine) -> None:
    engine.run()
    for name, value in (("dear", 3.0), ("alice", 1.0)):
        for body in ({**BODY, "slo_class": "fast"}, BODY, {**BODY, "value": 1000}):
            asked(server.http_address, "POST", "/v1/completions", name, body)
        with Client(server.address, api_key=name) as client:
            client.complete("a", timeout=PATIENCE, slo_class="fast")
        found = [request.value for request in engine.requests if request.tenant == name]
        assert found[0] == found[-1] == value and set(found[1:-1]) == {1.0}


def test_the_engine_knows_whose_a_request_is_and_what_its_share(
    server: Server, engine: FakeEngine
) -> None:
    engine.run()
    for name in ("heavy", "alice"):
        assert asked(server.http_address, "POST", "/v1/completions", name, BODY)[0] == 200
        with Client(server.address, api_key=name) as client:
            client.complete("a", timeout=PATIENCE)
    found = [(one.tenant, one.weight) for one in engine.requests]
    assert found == [("heavy", 3.0)] * 2 + [("alice", 1.0)] * 2


def test_what_is_within_its_key_is_served(server: Server, engine: FakeEngine) -> None:
    engine.run()
    for name, fields in (
        ("low", {}),
        ("low", {"tier": "best_effort"}),
        ("low", {"slo": {"ttft_ms": 1}}),
        ("slow", {"slo": {"ttft_ms": 200, "tbt_ms": 50, "jct_ms": 1000, "max_tbt_ms": 50}}),
        ("alice", {"slo_class": "fast"}),
    ):
        body = {**BODY, **fields}
        assert asked(server.http_address, "POST", "/v1/completions", name, body)[0] == 200
    tiers = [request.tier for request in engine.requests]
    assert tiers == [Tier.BEST_EFFORT] * 3 + [Tier.REALTIME] * 2


def test_a_console_that_is_open_is_a_call(server: Server) -> None:
    assert server.http_address is not None
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE)
    connection.request("GET", "/console/events", headers={"Authorization": "Bearer many"})
    assert connection.getresponse().readline()
    for path in ("/console/events", "/v1/models"):
        status, text, _ = asked(server.http_address, "GET", path, "many")
        assert status == 429 and "many: 1 calls are open" in text.decode()
    assert asked(server.http_address, "GET", "/console/info", "many")[0] == 200
    connection.close()
    while asked(server.http_address, "GET", "/v1/models", "many")[0] != 200:
        pass  # that it is closed is noticed at its next event


def refuse(channel: grpc.Channel) -> None:
    stub = generation_pb2_grpc.GenerationStub(channel)
    list(
        stub.Generate(
            make_request("a"), timeout=PATIENCE, metadata=(("authorization", "Bearer many"),)
        )
    )


@pytest.mark.promise(18)
def test_no_key_is_ever_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    asked(server.http_address, "GET", "/v1/models", "jx-mallory")
    with Client(server.address, api_key="jx-mallory") as client, pytest.raises(ServerError):
        client.info(timeout=PATIENCE)
    server.stop()
    assert caplog.text.count("ending=unauthenticated") == 2 and "jx-mallory" not in caplog.text
