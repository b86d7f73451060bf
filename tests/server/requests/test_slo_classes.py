"""Named targets: what the config may say, and what a request makes of one."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from jaxserve.client import Client, ServerError, make_request
from jaxserve.config import Config, ConfigError
from jaxserve.sched.request import NO_CLASS, SLO, Tier
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.slo_classes import MAX_CLASSES, ServiceLevel, slo_classes
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine


def of(**classes: object) -> dict[str, ServiceLevel]:
    return slo_classes(classes)


@pytest.fixture
def classes() -> dict[str, ServiceLevel]:
    return slo_classes(Config().server.slo_classes)


@pytest.fixture
def stub(
    engine: FakeEngine, classes: dict[str, ServiceLevel]
) -> Iterator[generation_pb2_grpc.GenerationStub]:
    with (
        Server(engine.run(), grace_s=0.0, slo_classes=classes) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield generation_pb2_grpc.GenerationStub(channel)


def test_there_are_three_and_one_may_have_others(classes: dict[str, ServiceLevel]) -> None:
    assert classes == {
        "interactive": ServiceLevel(SLO(1.0, 0.1875), Tier.REALTIME, "interactive"),
        "standard": ServiceLevel(SLO(5.0, 0.375), Tier.REALTIME, "standard"),
        "offline": ServiceLevel(SLO(jct=600.0), Tier.BEST_EFFORT, "offline"),
    }
    assert of(mine="ttft=2s") == {"mine": ServiceLevel(SLO(2.0), Tier.REALTIME, "mine")}
    assert of(mine="tbt=50ms:max_tbt=1s")["mine"].slo == SLO(tbt=0.05, max_tbt=1.0)
    assert of(mine="ttft=1s:value=2.5")["mine"].value == 2.5
    assert of() == {}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            "mine",
            "",
            "mine: may have tier=, value=, ttft=, tbt=, jct=, max_tbt= and program=, got ''",
        ),
        ("mine", "program=5", "mine: program: must be a time such as 200ms or 1.5s, got '5'"),
        ("mine", "ttft=5", "mine: ttft: must be a time such as 200ms or 1.5s, got '5'"),
        ("mine", "greedy=true", "mine: may have .*, got 'greedy=true'"),
        ("mine", "value=" + 400 * "9", "mine: value: must be a number between"),
        ("mine", 5, "mine: must be text, as 'ttft=1s:tbt=100ms', got 5"),
        (NO_CLASS, "ttft=1s", "default: is what requests without a class are counted as"),
        ("a b", "ttft=1s", "a b: a name has 1 to 64 letters"),
        ("x" * 65, "ttft=1s", "a name has 1 to 64 letters"),
    ],
)
def test_wrong_classes_are_refused_by_name(name: str, text: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"server.slo_classes.*{problem}") as error:
        of(**{name: text})
    assert "\n" not in str(error.value)


def test_too_many_classes_are_refused() -> None:
    many = {f"c{i}": "ttft=1s" for i in range(MAX_CLASSES)}
    assert len(of(**many)) == MAX_CLASSES
    with pytest.raises(ConfigError, match="has 101 classes; at most 100 are allowed"):
        of(**many, more="ttft=1s")


def test_what_a_request_says_itself_wins_over_its_class(
    stub: generation_pb2_grpc.GenerationStub, engine: FakeEngine
) -> None:
    own: tuple[tuple[dict, SLO, Tier], ...] = (
        ({}, SLO(1.0, 0.1875), Tier.REALTIME),
        ({"slo": {"tbt_ms": 50.0}}, SLO(1.0, 0.05), Tier.REALTIME),
        ({"slo": {"max_tbt_ms": 500.0}}, SLO(1.0, 0.1875, max_tbt=0.5), Tier.REALTIME),
        ({"slo": {"jct_ms": 9000.0}}, SLO(1.0, 0.1875, 9.0), Tier.REALTIME),
        ({"tier": "best_effort"}, SLO(1.0, 0.1875), Tier.BEST_EFFORT),
        ({"slo_class": "offline"}, SLO(jct=600.0), Tier.BEST_EFFORT),
        ({"slo_class": "offline", "tier": "realtime"}, SLO(jct=600.0), Tier.REALTIME),
        ({"slo_class": ""}, SLO(), Tier.REALTIME),
    )
    for asked, slo, tier in own:
        asked = {"slo_class": "interactive"} | asked
        list(stub.Generate(make_request("hi", max_tokens=1, **asked)))
        request = engine.requests[-1]
        assert (request.slo, request.tier) == (slo, tier)
        assert request.slo_class == (asked["slo_class"] or NO_CLASS)


def test_an_unknown_class_is_refused_with_those_that_there_are(
    stub: generation_pb2_grpc.GenerationStub, engine: FakeEngine
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(make_request("hi", slo_class="gold")))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    words = "slo_class: there is no 'gold'; this server has interactive, offline, standard"
    assert error.value.details() == words
    assert engine.requests == []


def test_a_server_without_classes_says_so(client: Client) -> None:
    with pytest.raises(ServerError, match="there is no 'gold'; this server has none"):
        client.complete("hi", slo_class="gold")
    assert not client.info().slo_classes


def test_the_classes_are_told(stub: generation_pb2_grpc.GenerationStub) -> None:
    told = stub.GetServerInfo(pb.GetServerInfoRequest()).slo_classes
    assert list(told) == [
        pb.SloClass(
            name="interactive", targets=pb.Slo(ttft_ms=1000, tbt_ms=187.5), tier=pb.TIER_REALTIME
        ),
        pb.SloClass(name="offline", targets=pb.Slo(jct_ms=600_000), tier=pb.TIER_BEST_EFFORT),
        pb.SloClass(
            name="standard", targets=pb.Slo(ttft_ms=5000, tbt_ms=375), tier=pb.TIER_REALTIME
        ),
    ]
