"""Vectors and scores over HTTP: shapes, limits, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.http.openai.pooling import pooling_routes
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.pooling import pooled_call, pooled_outputs
from jaxserve.server.requests.pooling.scoring import Scoring
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.conftest import CLASSES, SETTINGS, Plain

PATHS = {
    "/v1/embeddings": {"input": "hello"},
    "/pooling": {"input": "hello"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
}


def vector(prompt: str, kind: int = 0) -> np.ndarray:
    """The fake engine's."""
    found = np.eye(INFO.d_model)[1 + kind]
    found[0] = len(prompt)
    return found / np.linalg.norm(found)


@pytest.fixture
def scored(engine: FakeEngine) -> Iterator[Plain]:
    """A server that scores by tokens."""
    scoring = Scoring("<{query}|{document}>", ("A", "B"))
    options = ServerOptions(scoring=scoring)
    engine.run()
    with Server(engine, options=options, grace_s=0.0, http=SETTINGS) as server:
        yield Plain(server)


def test_openais_client_gets_vectors(client: openai.OpenAI, running: FakeEngine) -> None:
    """Which asks for base64, and reads it."""
    made = client.embeddings.create(model="fake", input=["hello", "hi"])
    assert [entry.index for entry in made.data] == [0, 1]
    for entry, prompt in zip(made.data, ("hello", "hi"), strict=True):
        assert entry.object == "embedding"
        assert entry.embedding == pytest.approx(vector(prompt).tolist(), abs=1e-6)
    assert made.model == "fake" and made.usage.prompt_tokens == made.usage.total_tokens == 7
    short = client.embeddings.create(
        model="fake", input=[5, 6, 7], dimensions=2, encoding_format="float"
    )
    expected = np.array([3, 1]) / 10**0.5
    assert short.data[0].embedding == pytest.approx(expected.tolist(), abs=1e-6)
    last = running.requests[-1]
    assert last.prompt == (5, 6, 7) and last.sampling.max_tokens == 1 and last.pooling is not None


def test_both_encodings_say_the_same(plain: Plain, running: FakeEngine) -> None:
    body = {"input": [[1] * n for n in range(1, 40)], "pooling": "mean", "normalize": False}
    _, floats, _ = plain.call("POST", "/v1/embeddings", body)
    _, packed, _ = plain.call("POST", "/v1/embeddings", {**body, "encoding_format": "base64"})
    for n, (one, other) in enumerate(zip(floats["data"], packed["data"], strict=True), 1):
        assert one["embedding"] == [n, 0.0, 1.0, 0.0]
        assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == [n, 0, 1, 0]


def test_a_long_answer_comes_in_pieces(
    plain: Plain, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"input": [[7] * n for n in range(1, 300)], "request_id": "many"}
    status, whole, headers = plain.call("POST", "/v1/embeddings", body)
    assert status == 200 and "content-length" in headers
    monkeypatch.setattr(pooling_routes, "_INLINE_VALUES", 8)
    monkeypatch.setattr(pooling_routes, "_PIECE_BYTES", 1000)
    status, pieces, headers = plain.call("POST", "/v1/embeddings", body)
    assert status == 200 and "content-length" not in headers
    assert {**pieces, "created": 0} == {**whole, "created": 0}
    assert whole["id"] == "embd-many" and len({each.id for each in running.requests}) == 299


def test_vllms_pooling(plain: Plain, running: FakeEngine) -> None:
    status, body, _ = plain.call("POST", "/pooling", {"input": "hello", "pooling": "cls"})
    (entry,) = body["data"]
    assert status == 200 and entry["object"] == "pooling"
    assert entry["data"] == pytest.approx(vector("hello", 2).tolist(), abs=1e-6)


def test_scores_are_cosines_without_tokens(plain: Plain, running: FakeEngine) -> None:
    body = {"queries": "abc", "documents": ["abc", "a", "abc"]}
    status, found, _ = plain.call("POST", "/v1/score", body)
    assert status == 200 and found["object"] == "list"
    assert [entry["score"] for entry in found["data"]] == pytest.approx(
        [1, float(vector("abc") @ vector("a")), 1], abs=1e-6
    )
    assert [request.prompt for request in running.requests] == [(97, 98, 99), (97,)]  # each once
    assert found["usage"]["prompt_tokens"] == 4


def test_scores_by_tokens(plain: Plain, running: FakeEngine, scored: Plain) -> None:
    """The server's, or the call's own."""
    body = {"text_1": ["q", "{document}"], "text_2": ["d", "e"]}
    _, found, _ = scored.call("POST", "/score", body)
    expected = 1 / (1 + np.exp((ord("B") - ord("A")) / 10))
    assert [entry["score"] for entry in found["data"]] == pytest.approx([expected] * 2, abs=1e-6)
    texts = ["".join(map(chr, request.prompt)) for request in running.requests]
    assert texts == ["<q|d>", "<{document}|e>"]
    own = {"tokens": ["D", 65], "template": "{document}{query}"}
    _, found, _ = plain.call("POST", "/score", {"text_1": "q", "text_2": "d", **own})
    assert found["data"][0]["score"] == pytest.approx(1 / (1 + np.exp(-0.3)), abs=1e-6)
    one = {**own, "tokens": ["A"]}
    _, found, _ = plain.call("POST", "/score", {"text_1": "q", "text_2": "d", **one})
    assert found["data"][0]["score"] == pytest.approx(1 / (1 + np.exp(-6.5)), abs=1e-6)


def test_the_best_come_first(plain: Plain, running: FakeEngine) -> None:
    path = "/v2/rerank"
    body = {"query": "abcd", "documents": ["a", {"text": "abcd"}, "abc"], "top_n": 2}
    status, found, _ = plain.call("POST", path, body)
    assert status == 200 and found["id"].startswith("rerank-")
    assert [entry["index"] for entry in found["results"]] == [1, 2]
    first, second = found["results"]
    assert first["relevance_score"] == pytest.approx(1) and second["relevance_score"] < 1
    assert first["document"] == {"text": "abcd"}
    _, bare, _ = plain.call("POST", path, {**body, "return_documents": False, "top_n": 0})
    assert len(bare["results"]) == 3 and "document" not in bare["results"][0]


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("/v1/embeddings", {"input": []}, "input", "has no prompts; 1 to 2048"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input.1", "is empty"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "2049 prompts; 1 to 2048"),
        ("/v1/embeddings", {"model": "other"}, "model", "no model 'other'"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input.1", "must be as the first prompt"),
        ("/v1/embeddings", {"input": [[1, True]]}, "input.0.1", "must be a token id"),
        ("/v1/embeddings", {"input": [10**400]}, "input.0", "must be a token id"),
        ("/v1/embeddings", {"input": [100_000]}, "input", "token id 100000 is outside"),
        ("/v1/embeddings", {"input": [5] * 4096}, "input", "at most 4095"),
        ("/v1/embeddings", {"input": [[5] * 4000] * 76}, "input", "at most 300,000"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input", "must be a string, or a list"),
        ("/v1/embeddings", {"dimensions": 5}, "dimensions", "at most 4, got 5"),
        ("/v1/embeddings", {"dimensions": 0}, "dimensions", "at least 1"),
        ("/v1/embeddings", {"encoding_format": "int8"}, "encoding_format", "float"),
        ("/v1/embeddings", {"pooling": "max"}, "pooling", "last"),
        ("/v1/embeddings", {"slo_class": "none"}, "slo_class", "none"),
        ("/score", {"text_2": None}, "text_1", "are needed"),
        ("/score", {"queries": "a"}, "text_1", "are needed"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "beside 2"),
        ("/score", {"text_2": [{"text": "a", "image": "b"}]}, "text_2.0", "must be a string"),
        ("/score", {"text_1": ["a"] * 2049, "text_2": ["a"] * 2049}, "text_1", "1 to 2048"),
        ("/score", {"tokens": ["A"], "template": "{query}"}, "template", "{document}"),
        ("/score", {"template": "{query}{document}"}, "template", "only for scores by tokens"),
        ("/score", {"tokens": ["AB"], "template": "{query}{document}"}, "tokens", "is 2 tokens"),
        ("/score", {"tokens": ["A" * 60_000], "template": "{query}{document}"}, "tokens", "60000"),
        ("/score", {"tokens": ["A"] * 17}, "tokens", "at most 16"),
        ("/rerank", {"tokens": [100_000], "template": "{query}{document}"}, "tokens", "outside"),
        (
            "/score",
            {"text_1": "a" * 3000, "tokens": ["A"], "template": "{query}" * 2000 + "{document}"},
            "text_2",
            "at most 4,194,304",
        ),
        ("/score", {"text_2": "a" * 4096}, "text_2", "at most 4095"),
        ("/rerank", {"documents": ["a" * 4096]}, "documents", "at most 4095"),
        ("/rerank", {"documents": ["a"] * 2049}, "documents", "1 to 2048"),
        ("/rerank", {"top_n": -1}, "top_n", "at least 0"),
        ("/rerank", {"query": ["a"]}, "query", "must be a string"),
    ],
)
def test_what_is_refused(
    refusing: tuple[Plain, FakeEngine],
    path: str,
    fields: dict[str, Any],
    param: str,
    said: str,
) -> None:
    """With one clear error, and nothing is submitted."""
    plain, engine = refusing
    status, body, _ = plain.call("POST", path, {**PATHS[path], **fields})
    assert status in (400, 404), body
    assert body["error"]["param"] == param and said in body["error"]["message"], body
    assert not engine.requests


def test_half_a_surrogate_is_no_text(shared: Plain) -> None:
    for path, body in PATHS.items():
        raw = json.dumps(body).replace("hello", "\\ud800").replace('"a"', '"\\ud800"').encode()
        status, answer, _ = shared.call("POST", path, raw)
        assert status == 400 and "half a surrogate pair" in answer["error"]["message"]


def test_a_body_has_room_for_as_many_tokens_as_a_call_may_have(
    plain: Plain, running: FakeEngine
) -> None:
    """Though the longest prompt of the model takes far less."""
    inputs = [[100_000] * 300] * 1000
    assert len(json.dumps(inputs)) > 2 << 20
    status, body, _ = plain.call("POST", "/v1/embeddings", {"input": inputs})
    assert status == 400 and "token id 100000 is outside" in body["error"]["message"]


def test_an_answer_has_a_size(
    plain: Plain, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_outputs, "MAX_VALUES", 11)
    status, body, _ = plain.call("POST", "/v1/embeddings", {"input": ["a", "b", "c"]})
    assert status == 400 and "3 vectors of 4 numbers; at most 11" in body["error"]["message"]
    status, _, _ = plain.call("POST", "/v1/embeddings", {"input": ["a", "b"]})
    assert status == 200


def test_few_are_with_the_engine_at_once(
    plain: Plain, engine: FakeEngine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call waits for its own, not for others."""
    monkeypatch.setattr(pooled_call, "AT_ONCE", 5)
    most = 0
    submit = engine.submit

    def counted(*given: Any) -> None:
        nonlocal most
        submit(*given)
        most = max(most, len(engine.live))

    monkeypatch.setattr(engine, "submit", counted)
    engine.max_requests = 3
    engine.run()
    made = client.embeddings.create(model="fake", input=[[1] * n for n in range(1, 20)])
    expected = [vector("a" * n).tolist() for n in range(1, 20)]
    assert [entry.embedding for entry in made.data] == [pytest.approx(e) for e in expected]
    assert most == 3
    engine.max_requests = 0
    with pytest.raises(openai.RateLimitError, match="queued"):
        client.embeddings.create(model="fake", input=["a", "b"])


def test_a_key_has_as_many_at_once_as_it_may(engine: FakeEngine) -> None:
    """The rest of its call waits, instead of being refused."""
    access = Access(Keys(fixed=[key("dave", concurrency=2)]))
    with Server(engine, access=access, grace_s=0.0, http=SETTINGS) as server:
        url = f"http://{server.http_address}/v1"
        with openai.OpenAI(base_url=url, api_key="dave", max_retries=0) as client:
            engine.run()
            made = client.embeddings.create(model="fake", input=["a"] * 7)
    assert len(made.data) == 7
    assert {request.tenant for request in engine.requests} == {"dave"}


def test_targets_and_their_verdicts(plain: Plain, running: FakeEngine) -> None:
    body = {"input": ["a", "b"], "slo": {"ttft_ms": 250, "jct_ms": 150}, "tier": "best_effort"}
    _, found, _ = plain.call("POST", "/v1/embeddings", body)
    for entry in found["data"]:
        assert entry["slo"]["targets_met"] == {"ttft_ms": True, "jct_ms": False}
        assert entry["slo"]["tier"] == "best_effort"
    _, found, _ = plain.call("POST", "/v1/embeddings", {"input": "a", "slo_class": "offline"})
    assert found["data"][0]["slo"]["class"] == "offline" and CLASSES["offline"]
    _, found, _ = plain.call("POST", "/rerank", {**PATHS["/rerank"], "slo_class": "offline"})
    assert "slo" not in found["results"][0]  # it is made of two
    _, found, _ = plain.call("POST", "/v1/embeddings", {"input": "a"})
    assert "slo" not in found["data"][0]


def test_who_hangs_up_leaves_nothing(plain: Plain, engine: FakeEngine) -> None:
    connection = plain.connect()
    data = json.dumps({"input": ["a", "b", "c"]}).encode()
    connection.request("POST", "/v1/embeddings", data, {"Content-Type": "application/json"})
    engine.wait(lambda: len(engine.live) == 3)
    connection.close()
    engine.wait(lambda: len(engine.cancelled) == 3 and not engine.live)


def test_one_that_fails_takes_the_others_with_it(plain: Plain, engine: FakeEngine) -> None:
    engine.drain(0.0)
    status, body, _ = plain.call("POST", "/v1/embeddings", {"input": ["a", "b"]})
    assert status == 503 and body["error"]["code"] == "unavailable"
