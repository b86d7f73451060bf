"""Vectors and scores over gRPC: what is answered, limits, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from jaxserve.client import Client, ServerError, make_embed_request, make_score_request
from jaxserve.sched.request import SLO, PoolingParams, PoolingType, Tier
from jaxserve.server.grpc import generation_service, message_conversion, pooling_conversion
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.pooling import pooled_outputs
from jaxserve.server.requests.pooling.scoring import Scoring
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.server.fake_engine import INFO, PATIENCE, FakeEngine
from tests.server.grpc.test_grpc_hostile import ended, raw

Code = grpc.StatusCode
EMBED, SCORE = "/jaxserve.v1.Generation/Embed", "/jaxserve.v1.Generation/Score"
BOTH = "{query}{document}"


def vector(prompt: Any, kind: int = 0) -> np.ndarray:
    """The fake engine's."""
    found = np.eye(INFO.d_model)[1 + kind]
    found[0] = len(prompt)
    return found / np.linalg.norm(found)


@pytest.fixture
def running(engine: FakeEngine) -> FakeEngine:
    engine.run()
    return engine


@pytest.fixture
def scored(running: FakeEngine) -> Iterator[Client]:
    """Of a server that scores by tokens."""
    options = ServerOptions(scoring=Scoring("<{query}|{document}>", ("A", "B")))
    classes = {"offline": ServiceLevel(SLO(jct=600.0), Tier.BEST_EFFORT, "offline")}
    server = Server(running, options=options, grace_s=0.0, slo_classes=classes)
    with server, Client(server.address) as client:
        yield client


def test_vectors_of_texts_and_token_ids(client: Client, running: FakeEngine) -> None:
    prompts = ["hello", [5, 6, 7], "é"]
    found = client.embed(prompts, request_id="mine")
    for each, length in zip(found, (5, 3, 1), strict=True):
        assert each.slo is None
        assert each.embedding == pytest.approx(vector("x" * length), abs=1e-6)
        assert each.usage.prompt_tokens == length and each.timings.ttft_ms == 200
    assert [request.id for request in running.requests] == ["mine", "mine-1", "mine-2"]
    assert {request.pooling for request in running.requests} == {PoolingParams()}
    (short,) = client.embed("hello", pooling="cls", normalize=False, dimensions=2)
    assert short.embedding == [5, 0]
    assert running.requests[-1].pooling == PoolingParams(PoolingType.CLS, False, 2)


def test_every_pooling_has_its_value() -> None:
    types = message_conversion.POOLING_TYPES
    assert set(types) == set(pb.PoolingType.values())
    assert set(types.values()) == {None, *PoolingType}


def test_a_large_answer_comes_in_messages_that_any_client_takes(
    client: Client, channel: grpc.Channel, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = make_embed_request([[7] * n for n in range(1, 300)])
    (whole,) = raw(channel, message.SerializeToString(), EMBED)
    monkeypatch.setattr(generation_service, "_INLINE_VALUES", 8)
    monkeypatch.setattr(pooling_conversion, "_MESSAGE_VALUES", 10)
    sent = [
        pb.EmbedResponse.FromString(each)
        for each in raw(channel, message.SerializeToString(), EMBED)
    ]
    assert [len(each.embeddings) for each in sent] == [2] * 149 + [1]
    assert len({each.request_id for each in sent}) == 1
    told = [each for response in sent for each in response.embeddings]
    assert told == list(pb.EmbedResponse.FromString(whole).embeddings)
    assert [each.index for each in told] == list(range(299))


def test_numbers_are_little_endian_on_the_wire() -> None:
    message = pb.Embedding(values=[1.5, -2.0]).SerializeToString()
    assert message.endswith(np.array([1.5, -2.0], "<f4").tobytes())


def test_scores_are_cosines_without_tokens(client: Client, running: FakeEngine) -> None:
    found = client.score("abc", ["abc", "a", "abc"], slo={"ttft_ms": 1.0})
    cosines = [1, float(vector("abc") @ vector("a")), 1]
    assert [each.score for each in found.scores] == pytest.approx(cosines, abs=1e-6)
    assert [request.prompt for request in running.requests] == [(97, 98, 99), (97,)]  # each once
    assert found.usage.prompt_tokens == 4
    assert not any(each.HasField("slo") for each in found.scores)  # each is made of two
    both = client.score(["a", "b"], ["b", "a"], slo={"ttft_ms": 1.0})
    assert not any(each.HasField("slo") for each in both.scores)


def test_scores_by_tokens(client: Client, scored: Client, running: FakeEngine) -> None:
    """The server's, or the call's own."""
    found = scored.score(["q", "{document}"], ["d", "e"], slo_class="offline")
    expected = 1 / (1 + np.exp((ord("B") - ord("A")) / 10))
    assert [each.score for each in found.scores] == pytest.approx([expected] * 2, abs=1e-6)
    assert {each.slo.slo_class for each in found.scores} == {"offline"}
    texts = ["".join(map(chr, request.prompt)) for request in running.requests]
    assert texts == ["<q|d>", "<{document}|e>"]
    found = client.score("q", "d", tokens=["D", 65], template="{document}{query}")
    assert found.scores[0].score == pytest.approx(1 / (1 + np.exp(-0.3)), abs=1e-6)
    found = scored.score("q", "d", tokens=[])
    assert found.scores[0].score == pytest.approx(1)


def test_targets_and_their_verdicts(client: Client, running: FakeEngine) -> None:
    slo = {"ttft_ms": 250, "jct_ms": 150}
    for each in client.embed(["a", "b"], slo=slo, tier="best_effort", cache_salt="s"):
        assert each.slo is not None and each.slo.tier == pb.TIER_BEST_EFFORT
        assert each.slo.targets_met.ttft_ms and not each.slo.targets_met.jct_ms
    assert {request.cache_salt for request in running.requests} == {"s"}


REFUSED: list[tuple[Any, str]] = [
    (pb.EmbedRequest(), "inputs: has none; 1 to 2048"),
    (make_embed_request(["a"] * 2049), "inputs: has 2049 entries; at most 2048"),
    (pb.EmbedRequest(inputs=[pb.Input(text="a"), pb.Input()]), "inputs.1: is required"),
    (make_embed_request(["a", ""]), "inputs.1: "),
    (make_embed_request([[]]), "inputs: "),
    (make_embed_request([[2**31 - 1]]), "inputs: token id 2147483647 is outside"),
    (make_embed_request([[5] * 4000] * 76), "inputs: at most 300,000 tokens in all"),
    (make_embed_request("a", dimensions=0), "dimensions: "),
    (pb.EmbedRequest(inputs=[pb.Input(text="a")], pooling=9), "pooling: unknown value 9"),
    (pb.EmbedRequest(inputs=[pb.Input(text="a")], tier=9), "tier: unknown value 9"),
    (make_embed_request("a", slo_class="none"), "slo_class: "),
    (make_embed_request("a", request_id="x" * 129), "request_id: has 129"),
    (make_embed_request("a", cache_salt="x" * 257), "cache_salt: has 257"),
    (make_embed_request("a", prompt_cache_key="x" * 257), "prompt_cache_key: has 257"),
    (make_score_request([], "a"), "queries: has none"),
    (make_score_request("a", []), "documents: has none"),
    (make_score_request(["a"] * 10_000, "a"), "queries: has 10000 entries"),
    (make_score_request(["a", "b"], ["a", "b", "c"]), "documents: has 3 texts beside 2"),
    (make_score_request("a", ""), "documents: "),
    (make_score_request("a", "b", tokens=["A"] * 17, template=BOTH), "tokens: has 17 entries"),
    (make_score_request("a", "b", tokens=[2**31 - 1], template=BOTH), "tokens: "),
    (
        pb.ScoreRequest(
            queries=["a"], documents=["b"], tokens=pb.ScoredTokens(tokens=[pb.ScoredToken()])
        ),
        "tokens.0: is empty; set text or id",
    ),
    (
        make_score_request("a" * 3000, "b", tokens=["A"], template="{query}" * 2000 + BOTH),
        "documents: the pairs' prompts have",
    ),
]


@pytest.mark.parametrize(("message", "said"), REFUSED)
def test_what_is_refused(
    refusing: tuple[grpc.Channel, FakeEngine], message: Any, said: str
) -> None:
    """With one clear error, and nothing is submitted. ../http/openai/test_pooling.py has more."""
    channel, engine = refusing
    method = EMBED if isinstance(message, pb.EmbedRequest) else SCORE
    error = ended(raw(channel, message.SerializeToString(), method))
    assert error.code() is Code.INVALID_ARGUMENT
    assert error.details().startswith(said)
    assert not engine.requests


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\x12\x03\x0a\x01a\xf8\x07\x01", "request: field number 127"),
        (b"\x12\x06\x0a\x01a\xf8\x07\x01", "inputs: field number 127"),
        (b"\x12\x05\x0a\x03\xed\xa0\x80", "request: is not a jaxserve.v1.EmbedRequest"),
        (b"\x12\x7fcut", "request: is not a jaxserve.v1.EmbedRequest"),
        (b"\x12\x00" * 300_000, "request: has more than 262,144 fields"),
    ],
)
def test_what_no_client_of_ours_sends(
    refusing: tuple[grpc.Channel, FakeEngine], message: bytes, said: str
) -> None:
    """Unknown fields, in a list, too; half a surrogate, which protobuf knows for no text."""
    error = ended(raw(refusing[0], message, EMBED))
    assert error.code() is Code.INVALID_ARGUMENT and error.details().startswith(said)


def test_messages_and_answers_have_a_size(
    client: Client, channel: grpc.Channel, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for message, method in (
        (make_embed_request("x" * (8 << 20)), EMBED),
        (make_score_request("x" * (8 << 20), "a"), SCORE),
    ):
        error = ended(raw(channel, message.SerializeToString(), method))
        assert error.code() in (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT)
        assert "bytes are taken" in error.details() or "larger than" in error.details()
    monkeypatch.setattr(pooled_outputs, "MAX_VALUES", 11)
    with pytest.raises(ServerError, match="inputs: 3 vectors of 4 numbers; at most 11") as refused:
        client.embed(["a", "b", "c"])
    assert refused.value.code == "INVALID_ARGUMENT" and not running.requests
    assert len(client.embed(["a", "b"])) == 2


def test_another_model_is_not_found(client: Client, running: FakeEngine) -> None:
    for call in (client.embed, lambda text, **fields: client.score(text, text, **fields)):
        with pytest.raises(ServerError) as refused:
            call("a", model="other")
        assert refused.value.code == "NOT_FOUND"
    assert client.embed("a", model=INFO.model)


def test_calls_are_limited_and_counted(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of Generate are, by server.max_calls; each has its line in the log."""
    caplog.set_level(logging.INFO)
    options = ServerOptions(max_calls=1, request_log=True)
    with Server(engine, options=options, grace_s=0.0) as server, Client(server.address) as client:
        first = client._stub.Embed(make_embed_request(["a", "b"]), timeout=PATIENCE)
        engine.wait(lambda: len(engine.live) == 2)
        for call in (
            lambda: client.embed("a", timeout=PATIENCE),
            lambda: client.score("a", "b", timeout=PATIENCE),
        ):
            with pytest.raises(ServerError, match=r"server\.max_calls") as refused:
                call()
            assert refused.value.code == "RESOURCE_EXHAUSTED"
        engine.run()
        assert len(list(first)) == 1
        caplog.clear()
        assert client.embed(["a", "bc"]) and client.score("a", "b")
    lines = [line for line in caplog.messages if "ending=ok" in line]
    assert [" method=Embed " in line for line in lines] == [True, False]
    assert " method=Score " in lines[1] and all("prompt_tokens=" in line for line in lines)


@pytest.mark.parametrize("score", [False, True])
def test_a_cancelled_call_leaves_nothing(client: Client, engine: FakeEngine, score: bool) -> None:
    if score:
        message = make_score_request("a", ["b", "c"])
        call = client._stub.Score.future(message, timeout=PATIENCE)
    else:
        call = client._stub.Embed(make_embed_request(["a", "b", "c"]), timeout=PATIENCE)
    engine.wait(lambda: len(engine.live) == 3)
    call.cancel()
    engine.wait(lambda: len(engine.cancelled) == 3 and not engine.live)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_embed_request("a", pooling="max"), "pooling: unknown value 'max'"),
        (lambda: make_embed_request("a", temperature=1), "unknown option 'temperature'"),
        (lambda: make_embed_request("a", slo={"first": 1}), "unknown slo 'first'"),
        (lambda: make_embed_request("a", tier="none"), "tier: unknown value"),
        (lambda: make_embed_request("a", dimensions=2**31), "dimensions: "),
        (lambda: make_score_request("a", "b", tokens=[2**31]), "id: "),
        (lambda: make_score_request("a", "b", prompt_cache_key="k"), "unknown option"),
        (lambda: make_score_request("\ud800", "b"), "queries: "),
    ],
)
def test_what_a_message_cannot_hold(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
