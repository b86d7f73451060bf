"""Targets in headers and gRPC metadata, priorities, and what keys say of who says nothing."""

from __future__ import annotations

import http.client
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.client import make_request
from jaxserve.sched.request import SLO, InvalidRequest, Program, Tier
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.requests.target_headers import header_targets, target_headers
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS

TTFT, TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"
LLM_D_TTFT, LLM_D_TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
CLASSES = {
    "chat": ServiceLevel(SLO(ttft=1.0, tbt=0.2), Tier.REALTIME, "chat"),
    "night": ServiceLevel(SLO(jct=600.0), Tier.BEST_EFFORT, "night"),
}
KEYS = [
    key("plain"),
    key("slow", min_ttft_ms=200),
    key("low", tier="best_effort"),
    key("chats", slo_class="chat"),
    key("loose", slo_class="chat", min_ttft_ms=3000),
    key("patient", slo_class="chat", default_tier="best_effort"),
    key("nights", slo_class="night"),
    key("cheap", slo_class="chat", tier="best_effort"),
]
REALTIME, BEST_EFFORT = Tier.REALTIME, Tier.BEST_EFFORT
Pairs = Sequence[tuple[str, str]]


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    access = Access(Keys(fixed=KEYS))
    with Server(
        engine.run(), grace_s=0.0, http=SETTINGS, slo_classes=CLASSES, access=access
    ) as server:
        yield server


def post(
    server: Server, who: str, headers: Pairs = (), path: str = "/v1/completions", **fields: Any
) -> tuple[int, dict[str, Any]]:
    """Headers as they are given, twice where they are there twice."""
    assert server.http_address is not None
    said = {"prompt": "a"} if path == "/v1/completions" else {}
    body = json.dumps({**said, "max_tokens": 2, **fields}).encode()
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE)
    connection.putrequest("POST", path)
    for name, value in (("Authorization", f"Bearer {who}"), ("Content-Type", "application/json")):
        connection.putheader(name, value)
    for name, value in (*headers, ("Content-Length", str(len(body)))):
        connection.putheader(name, value.encode("latin-1"))
    connection.endheaders(body)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def level(engine: FakeEngine) -> tuple[SLO, Tier, str]:
    last = engine.requests[-1]
    return last.slo, last.tier, last.slo_class


def served(
    server: Server, engine: FakeEngine, who: str, *headers: tuple[str, str], **fields: Any
) -> tuple[SLO, Tier, str]:
    status, answer = post(server, who, headers, **fields)
    assert status == 200, answer
    return level(engine)


def refused(server: Server, who: str, headers: Pairs, **fields: Any) -> tuple[str, str]:
    status, answer = post(server, who, headers, **fields)
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


def test_a_program_in_headers(server: Server, engine: FakeEngine) -> None:
    said = (("X-Program-Id", "run 1"), ("x-program-deadline-ms", "1500"))
    for path, fields in (
        ("/v1/completions", {}),
        ("/v1/responses", {"input": "a", "max_tokens": None}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ):
        assert post(server, "plain", said, path, **fields)[0] == 200
        assert engine.requests[-1].program == Program("run 1", 1.5)
    assert post(server, "plain", said, program="own", program_over=True)[0] == 200
    assert engine.requests[-1].program == Program("own", over=True), "fields precede headers"
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        metadata = [("authorization", "Bearer plain"), ("x-program-id", "run 2")]
        list(stub.Generate(make_request("a", max_tokens=1), metadata=metadata, timeout=PATIENCE))
    assert engine.requests[-1].program == Program("run 2")


@pytest.mark.parametrize(
    ("headers", "name", "words"),
    [
        ([("x-program-id", "")], "x-program-id", "has 0 characters"),
        ([("x-program-id", "x" * 129)], "x-program-id", "has 129 characters"),
        ([("x-program-id", "a\x80")], "x-program-id", "cannot be printed"),
        ([("x-program-id", "a"), ("x-program-id", "b")], "x-program-id", "is there twice"),
        ([("x-program-deadline-ms", "5")], "x-program-deadline-ms", "x-program-id has to name it"),
        (
            [("x-program-id", "a"), ("x-program-deadline-ms", "1e300")],
            "x-program-deadline-ms",
            "must be a number of milliseconds, above 0 and at most 1,000,000,000",
        ),
    ],
)
def test_mistakes_in_headers_of_programs(
    server: Server, engine: FakeEngine, headers: Pairs, name: str, words: str
) -> None:
    param, message = refused(server, "plain", headers)
    assert param == name and words in message
    assert not engine.requests


def test_headers_win_over_the_class_and_the_body_over_headers(
    server: Server, engine: FakeEngine
) -> None:
    said = ((TTFT, "500"), (LLM_D_TPOT, "62.5"))
    assert served(server, engine, "plain", *said) == (SLO(0.5, 0.0625), REALTIME, "default")
    found = served(server, engine, "plain", *said, slo_class="night")
    assert found == (SLO(0.5, 0.0625, jct=600.0), BEST_EFFORT, "night")
    found = served(server, engine, "plain", *said, slo={"ttft_ms": 900, "jct_ms": 5000})
    assert found == (SLO(0.9, 0.0625, jct=5.0), REALTIME, "default")
    further = (("X-SLO-JCT-MS", "3000"), ("X-Slo-Max-Tbt-Ms", "80"))
    assert served(server, engine, "plain", *further)[0] == SLO(jct=3.0, max_tbt=0.08)
    found = served(server, engine, "plain", (TTFT, "500"), (LLM_D_TTFT, "250"))
    assert found[0] == SLO(0.25), "llm-d's own name wins, as in its router"
    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "a"}]}
    assert served(server, engine, "plain", *said, **chat)[0] == SLO(0.5, 0.0625)


def test_grpc_metadata_says_the_same(server: Server, engine: FakeEngine) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        def call(who: str, *said: tuple[str, str], **fields: Any) -> tuple[SLO, Tier, str]:
            metadata = (("authorization", f"Bearer {who}"), *said)
            list(stub.Generate(make_request("a", **fields), metadata=metadata, timeout=PATIENCE))
            return level(engine)

        said = ((TTFT, "500"), (LLM_D_TPOT, "62.5"))
        assert call("plain", *said) == (SLO(0.5, 0.0625), REALTIME, "default")
        assert call("plain", *said, slo={"tbt_ms": 40})[0] == SLO(0.5, 0.04)
        assert call("chats") == (SLO(1.0, 0.2), REALTIME, "chat")
        for bad in ((TTFT, "nan"), (LLM_D_TTFT, "-5"), (TPOT, "")):
            with pytest.raises(grpc.RpcError, match=f"{bad[0]}: must be a number of") as error:
                call("plain", bad)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError, match=f"{TTFT}: is there twice"):
            call("plain", (TTFT, "5"), (TTFT, "5"))
        with pytest.raises(grpc.RpcError, match=f"{TTFT}: 100 ms is tighter than key slow may"):
            call("slow", (TTFT, "100"))


def test_what_is_no_time_is_refused_by_its_header(server: Server, engine: FakeEngine) -> None:
    limits = "a number of milliseconds, above 0 and at most 1,000,000,000"
    for value in ("9" * 400, "nan", "inf", "-1", "0", "", "1e3", "0x5", "5 6"):
        for name in (TTFT, LLM_D_TPOT):
            own = {"ttft_ms": 5, "tbt_ms": 5}
            param, message = refused(server, "plain", [(name, value)], slo=own)
            assert param == name and len(message) < 300
            assert message.startswith(f"{name}: must be {limits}, got {value!r:.80}")
    assert not engine.requests


def test_a_header_twice_or_of_other_letters_is_refused(server: Server, engine: FakeEngine) -> None:
    twice = [(TTFT, "5"), (TTFT, "5")]
    assert refused(server, "plain", twice) == (
        TTFT,
        f"{TTFT}: is there twice; at most one is taken",
    )
    assert refused(server, "plain", [(TTFT, "5, 6")])[0] == TTFT
    for letters in ("\xbd", "\xb2", "5\xa0"):
        assert refused(server, "plain", [(TPOT, letters)])[0] == TPOT
    assert not engine.requests
    assert post(server, "plain")[0] == 200


@given(st.lists(st.tuples(st.sampled_from([TTFT, TPOT, LLM_D_TTFT]), st.text()), max_size=4))
def test_any_values_are_positive_times_or_refused(pairs: list[tuple[str, str]]) -> None:
    try:
        found = header_targets(pairs)
    except InvalidRequest as error:
        assert error.field_name in dict(pairs)
    else:
        times = [time for time in (found.slo.ttft, found.slo.tbt) if time is not None]
        assert len(found.names) == len(times) and all(0 < time <= 1e6 for time in times)


@given(st.floats(1e-9, 1e9), st.binary(max_size=30))
def test_a_time_comes_through_as_it_was_written(milliseconds: float, other: bytes) -> None:
    written = f"{milliseconds:.9f}"
    headers = [(b"x-other", other), (b"x-slo-ttft-ms", written.encode())]
    if float(written) > 0:
        (slo, names) = header_targets(target_headers(headers))
        assert slo.ttft is not None and math.isclose(slo.ttft, float(written) / 1000)
        assert names == {"ttft": TTFT}


def test_a_key_s_bounds_hold_for_headers(server: Server, engine: FakeEngine) -> None:
    param, message = refused(server, "slow", [(LLM_D_TTFT, "199")])
    assert param == LLM_D_TTFT and "199 ms is tighter than key slow may" in message
    assert "200 ms (min_ttft_ms)" in message
    param, _ = refused(server, "slow", [(TTFT, "199")], slo={"ttft_ms": 100})
    assert param == "slo.ttft_ms", "which won over the header"
    assert served(server, engine, "slow", (TTFT, "200"))[0] == SLO(0.2)


LEVELS: list[tuple[str, dict[str, Any], Any]] = [
    ("plain", {}, (SLO(), REALTIME, "default")),
    ("chats", {}, (SLO(1.0, 0.2), REALTIME, "chat")),
    ("chats", {"slo": {"ttft_ms": 300}}, (SLO(0.3, 0.2), REALTIME, "chat")),
    ("chats", {"slo_class": "night"}, (SLO(jct=600.0), BEST_EFFORT, "night")),
    ("chats", {"slo": "night"}, (SLO(jct=600.0), BEST_EFFORT, "night")),
    ("chats", {"slo_class": "default"}, (SLO(), REALTIME, "default")),
    ("chats", {"tier": "best_effort"}, (SLO(1.0, 0.2), BEST_EFFORT, "chat")),
    ("loose", {}, (SLO(3.0, 0.2), REALTIME, "chat")),
    ("patient", {}, (SLO(1.0, 0.2), BEST_EFFORT, "chat")),
    ("patient", {"slo_class": "chat"}, (SLO(1.0, 0.2), REALTIME, "chat")),
    ("patient", {"slo_class": "default"}, (SLO(), BEST_EFFORT, "default")),
    ("patient", {"tier": "realtime"}, (SLO(1.0, 0.2), REALTIME, "chat")),
    ("nights", {}, (SLO(jct=600.0), BEST_EFFORT, "night")),
    ("cheap", {}, (SLO(1.0, 0.2), BEST_EFFORT, "chat")),
    ("low", {"slo_class": "default"}, (SLO(), BEST_EFFORT, "default")),
]


def test_who_says_nothing_gets_what_the_key_says(server: Server, engine: FakeEngine) -> None:
    for who, fields, level in LEVELS:
        assert served(server, engine, who, **fields) == level, (who, fields)


def test_priorities_are_tiers(server: Server, engine: FakeEngine) -> None:
    """As vLLM has them, the lower the earlier; 0, which it has by default, says nothing."""
    for priority, tier in ((-(2**63), REALTIME), (-1, REALTIME), (0, REALTIME), (1, BEST_EFFORT)):
        assert served(server, engine, "plain", priority=priority)[1] is tier
    assert served(server, engine, "nights", priority=0)[1] is BEST_EFFORT
    assert served(server, engine, "nights", priority=-1)[1] is REALTIME
    assert served(server, engine, "plain", priority=2, service_tier="flex")[1] is BEST_EFFORT
    assert served(server, engine, "plain", priority=0, tier="best_effort")[1] is BEST_EFFORT
    for fields, problem in (
        ({"priority": 1, "tier": "realtime"}, ("tier", "realtime contradicts priority 1")),
        ({"priority": -1, "service_tier": "flex"}, ("service_tier", "flex contradicts priority")),
        ({"priority": 1 << 63}, ("priority", "must be at most")),
        ({"priority": 0.5}, ("priority", "must be")),
        ({"priority": True}, ("priority", "must be")),
    ):
        param, message = refused(server, "plain", [], **fields)
        assert param == problem[0] and re.match(f"{param}: .*{re.escape(problem[1])}", message)
    assert "key low may ask for best_effort only" in refused(server, "low", [], priority=-1)[1]
    assert served(server, engine, "low", priority=0)[1] is BEST_EFFORT
