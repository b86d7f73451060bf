"""A request arrives when its head has been read at the door: what comes before the engine counts in
its times and in what is promised of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import pytest

from jaxserve.client import Client, ServerError, make_request
from jaxserve.deploy.replica import EngineReplica
from jaxserve.deploy.replicas import NOTHING
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import Output
from jaxserve.engine.stats import Observer, RequestStats
from jaxserve.sched.request import SLO, Request, SamplingParams
from jaxserve.server.moves.resume_point import ResumePoint
from jaxserve.server.proto import batches_pb2, batches_pb2_grpc
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.deploy.engine import Engine as BackloggedEngine
from tests.engine.harness import engine as small_engine
from tests.engine.harness import wait_until_idle, write_shape
from tests.server.batches.serving import serving
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.processes import PATIENCE
from tests.server.test_one_path import GENERATE, on_ray, upload

SLOW_S = 100.0  # that an encoding takes, on the engine's clock


class Watched(BackloggedEngine):
    """Knows when it was last asked to encode something."""

    encoding = 0.0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.encoding = time.monotonic()
        return super().encode(text, special=special)


class Doors(NamedTuple):
    engine: Watched
    server: Server
    plain: Plain
    client: Client
    channel: grpc.Channel


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    engine = Watched()
    engine.run()
    with (
        serving(engine, tmp_path_factory.mktemp("batches"), http=SETTINGS) as server,
        Client(server.address) as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield Doors(engine, server, Plain(server), client, channel)


def posting(path: str, **body: Any) -> Callable[[Doors], Watched]:
    def post(on: Doors) -> Watched:
        status, answer, _ = on.plain.call("POST", path, body)
        assert status == 200, answer
        return on.engine

    return post


def generate(on: Doors) -> Watched:
    assert on.client.complete("hi", max_tokens=2)
    return on.engine


def embed(on: Doors) -> Watched:
    assert on.client.embed(["hi"])
    return on.engine


def batch(on: Doors) -> Watched:
    line = batches_pb2.BatchLine(text="hi", sampling=make_request("", max_tokens=2).sampling)
    stub = batches_pb2_grpc.BatchesStub(on.channel)
    lines = batches_pb2.SubmitBatchRequest(batch_id="b", lines=[line], commit=True)
    stub.SubmitBatch(lines, timeout=PATIENCE)
    ask = batches_pb2.GetBatchRequest(batch_id="b", follow=True)
    assert [page for page in stub.GetBatch(ask, timeout=PATIENCE) if page.results]
    return on.engine


def http_batch(on: Doors) -> Watched:
    body = {"prompt": "hi", "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    file = upload(on.plain, json.dumps(line).encode())
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    status, made, _ = on.plain.call("POST", "/v1/batches", asked)
    while status == 200 and made["status"] != "completed":
        status, made, _ = on.plain.call("GET", f"/v1/batches/{made['id']}")
    assert status == 200 and made["request_counts"]["completed"] == 1, made
    return on.engine


def replicated(call: Callable[[EngineReplica, bytes], Any]) -> Watched:
    engine = Watched()
    engine.run()
    assert on_ray(engine, lambda replica: call(replica, came(time.time())))
    return engine


def came(when: float) -> bytes:
    """What a replica is told by the ingress."""
    return ResumePoint(arrived=when).model_dump_json().encode()


def ray_http(_: Doors) -> Watched:
    scope = {
        **{"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"},
        **{"path": "/v1/completions", "query_string": b"", "client": ("127.0.0.1", 1)},
        "headers": [(b"content-type", b"application/json")],
    }
    body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    return replicated(lambda one, told: one.http(scope, body, told, routing_request=NOTHING))


def ray_grpc(_: Doors) -> Watched:
    raw = make_request("hi", max_tokens=2).SerializeToString()
    return replicated(
        lambda one, told: one.grpc(GENERATE, raw, [], "peer", told, routing_request=NOTHING)
    )


CHAT = [{"role": "user", "content": "hi"}]
DOORS = {
    "Generate": generate,
    "Embed": embed,
    "completions": posting("/v1/completions", prompt="hi", max_tokens=2),
    "chat": posting("/v1/chat/completions", messages=CHAT, max_tokens=2),
    "messages": posting("/v1/messages", messages=CHAT, max_tokens=16),
    "Ollama": posting("/api/chat", messages=CHAT, stream=False),
    "responses": posting("/v1/responses", input="hi", max_output_tokens=16),
    "embeddings": posting("/v1/embeddings", input="hi"),
    "score": posting("/score", text_1="a", text_2="b"),
    "a batch": batch,
    "a batch of HTTP": http_batch,
    "HTTP on Ray": ray_http,
    "gRPC on Ray": ray_grpc,
}


@pytest.mark.promise(29)
@pytest.mark.parametrize("name", DOORS)
def test_a_request_has_arrived_before_anything_is_encoded(doors: Doors, name: str) -> None:
    before = time.monotonic()
    engine = DOORS[name](doors)
    assert before <= engine.requests[-1].arrival <= engine.encoding


def test_what_another_host_says_is_not_after_now() -> None:
    """Whose clock is ahead."""
    raw = make_request("hi", max_tokens=2).SerializeToString()
    engine = Watched()
    engine.run()
    ahead = came(time.time() + 1000)
    on_ray(engine, lambda one: one.grpc(GENERATE, raw, [], "peer", ahead, routing_request=NOTHING))
    assert engine.requests[-1].arrival <= engine.encoding


class Slow(NamedTuple):
    """One whose clock is further on by SLOW_S after each encoding."""

    engine: Engine
    client: Client
    plain: Plain


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    spent = 0.0

    def clock() -> float:
        return time.monotonic() + spent

    def encode(text: str, *, special: bool = True) -> list[int]:
        nonlocal spent
        spent += SLOW_S
        return [5, 6, 7]

    shape = write_shape(tmp_path_factory.mktemp("shape"), "opt")
    with small_engine(shape) as engine, pytest.MonkeyPatch.context() as patch:
        wait_until_idle(engine)
        for one in (engine, engine._step_loop, engine._ttft_estimator):
            patch.setattr(one, "_clock", clock)
        patch.setattr(engine, "encode", encode)
        options = ServerOptions(refuse_late=0.5)
        with (
            Server(engine, grace_s=0.0, http=SETTINGS, options=options) as server,
            Client(server.address) as client,
        ):
            patch.setattr(server._tracker, "_clock", clock)
            yield Slow(engine, client, Plain(server))


class Ended(Observer):
    def __init__(self) -> None:
        self.stats: list[RequestStats] = []

    def on_finish(self, stats: RequestStats) -> None:
        self.stats.append(stats)


@pytest.mark.promise(29)
def test_a_slow_encoder_is_in_the_times_and_the_verdict(slow: Slow) -> None:
    ended = Ended()
    slow.engine.add_observer(ended)
    missed = {"slo": {"ttft_ms": 1000 * SLOW_S}, "serve_late": True}
    (found,) = slow.client.complete("hi", max_tokens=2, **missed)
    assert found.slo is not None and not found.slo.met
    times = found.timings
    assert times.preprocess_ms >= 1000 * SLOW_S > times.queue_ms
    assert times.total_ms >= times.ttft_ms >= times.preprocess_ms + times.queue_ms
    (easy,) = slow.client.complete("hi", max_tokens=2, slo={"ttft_ms": 3.6e6})
    assert easy.slo is not None and easy.slo.met
    body = {"prompt": "hi", "max_tokens": 2, **missed}
    status, answer, headers = slow.plain.call("POST", "/v1/completions", body)
    (choice,) = answer["choices"]
    assert status == 200 and not choice["slo"]["met"]
    assert choice["timings"]["preprocess_ms"] >= 1000 * SLOW_S
    assert headers["x-slo-met"] == "false"
    wait_until_idle(slow.engine)
    assert len(ended.stats) == 3
    for stats in ended.stats:
        assert stats.ttft is not None and stats.ttft >= stats.preprocess_time >= SLOW_S
        assert stats.e2e >= stats.ttft and stats.queue_time < SLOW_S


def test_who_has_waited_already_is_refused_as_late(slow: Slow) -> None:
    """And one that has not is served."""
    target = {"ttft_ms": 1500 * SLOW_S}
    with pytest.raises(ServerError, match=r"slo\.ttft_ms: the first token is expected in"):
        slow.client.complete("hi", max_tokens=2, slo=target)
    assert slow.client.complete([5, 6, 7], max_tokens=2, slo=target)


def test_a_request_without_an_arrival_arrives_when_it_is_submitted(slow: Slow) -> None:
    def serve(arrival: float) -> Output:
        outputs: list[Output] = []
        asked = SamplingParams(max_tokens=2), SLO(ttft=0.9 * SLOW_S)
        slow.engine.submit(Request("a", (5, 6, 7), *asked, arrival=arrival), outputs.append)
        wait_until_idle(slow.engine)
        return outputs[-1]

    now = serve(0.0)
    assert now.timings is not None and now.verdict is not None
    assert now.timings.preprocess == 0 and now.verdict.met
    before = serve(slow.engine._clock() - SLOW_S)
    assert before.timings is not None and before.verdict is not None
    assert before.timings.preprocess >= SLOW_S and not before.verdict.met
