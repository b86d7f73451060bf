"""A replica, called as Ray Serve calls it, with an engine without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from jaxserve.client import make_embed_request, make_score_request
from jaxserve.config import Config, ConfigError
from jaxserve.deploy import replica as module
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.in_process import Status
from jaxserve.deploy.moves.relay import Unserved
from jaxserve.deploy.replica import EngineReplica
from jaxserve.deploy.replicas import NOTHING, SNAPSHOT, Replicas
from jaxserve.engine.errors import HostLost
from jaxserve.engine.output import Output
from jaxserve.sched.request import SLO
from jaxserve.server.access.key_file import ApiKey, digest_of
from jaxserve.server.access.options import KEYS_VARIABLE
from jaxserve.server.proto import generation_pb2 as pb
from tests.deploy.engine import Engine

T = TypeVar("T")

SHORT = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(max_tokens=3))
SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "client": ("127.0.0.1", 1234),
}


@contextmanager
def serving(engine: Engine) -> Iterator[Engine]:
    yield engine
    engine.stop()


def run(test: Callable[[EngineReplica], Awaitable[T]], engine: Engine, *flags: str) -> T:
    """The test, with a replica that is stopped behind it."""

    async def whole() -> T:
        replica = EngineReplica(
            ["--config.engine.stall_s=0", *flags], 1, lambda _: serving(engine), lambda: "r1"
        )
        try:
            return await asyncio.wait_for(test(replica), 60)
        finally:
            engine.stop()
            await replica.stop()

    return asyncio.run(whole())


async def pieces_of(parts: AsyncGenerator[list[Any], None]) -> list[Any]:
    return [part async for piece in parts for part in piece]


def post(
    replica: EngineReplica, path: str, *headers: tuple[bytes, bytes], **body: Any
) -> AsyncGenerator[list[Any], None]:
    given = [*SCOPE["headers"], *headers]
    scope = {**SCOPE, "path": path, "raw_path": path.encode(), "headers": given}
    return replica.http(scope, json.dumps(body).encode(), routing_request=NOTHING)


def rpc(
    replica: EngineReplica, message: Any, *metadata: tuple[str, str], name: str = "Generate"
) -> AsyncGenerator[Any, None]:
    method, raw = f"/jaxserve.v1.Generation/{name}", message.SerializeToString()
    return replica.grpc(method, raw, [*metadata], "ipv4:127.0.0.1:5", routing_request=NOTHING)


def body(messages: list[dict[str, Any]]) -> bytes:
    return b"".join(each.get("body", b"") for each in messages)


def test_an_http_call_is_answered_by_the_door_itself() -> None:
    async def call(replica: EngineReplica) -> list[Any]:
        return await pieces_of(post(replica, "/v1/completions", prompt="Hi", max_tokens=3))

    start, *rest = run(call, Engine().run())
    assert start["status"] == 200
    assert json.loads(body(rest))["choices"][0]["text"] == " w0 w1 w2"


def test_a_stream_comes_as_it_is_made() -> None:
    engine = Engine()

    async def call(replica: EngineReplica) -> list[Any]:
        parts = post(replica, "/v1/completions", prompt="Hi", max_tokens=2, stream=True)
        first = asyncio.ensure_future(anext(parts))
        await asyncio.to_thread(engine.wait, lambda: engine.live)
        engine.step()
        seen = list(await first)
        while b"w0" not in body(seen):
            seen += await anext(parts)
        assert b"w1" not in body(seen)
        engine.step()
        return seen + await pieces_of(parts)

    messages = run(call, engine)
    assert [each["type"] for each in messages].count("http.response.start") == 1
    assert body(messages).endswith(b"data: [DONE]\n\n") and b"w1" in body(messages)


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_who_stops_reading_has_hung_up(door: str) -> None:
    engine = Engine()

    async def call(replica: EngineReplica) -> None:
        parts = post(replica, "/v1/completions", prompt="Hi", max_tokens=9, stream=True)
        if door == "grpc":
            parts = rpc(replica, pb.GenerateRequest(text="Hi"))
        first = asyncio.ensure_future(anext(parts))
        await asyncio.to_thread(engine.wait, lambda: engine.live)
        engine.step()
        await first
        await parts.aclose()
        await asyncio.to_thread(engine.wait, lambda: not engine.live)

    run(call, engine)
    assert len(engine.cancelled) == 1


def test_an_rpc_is_answered_by_the_door_itself() -> None:
    *raw, status = run(lambda replica: pieces_of(rpc(replica, SHORT)), Engine().run())
    assert status.code == "OK" and ("x-slo-class", "default") in status.trailing
    answers = [pb.GenerateResponse.FromString(one) for one in raw]
    assert "".join(one.text for one in answers) == " w0 w1 w2"
    assert answers[-1].finish.usage.output_tokens == 3


def test_so_are_those_for_vectors_and_scores() -> None:
    async def call(replica: EngineReplica) -> list[Any]:
        vectors = rpc(replica, make_embed_request(["Hi", "You"]), name="Embed")
        scores = rpc(replica, make_score_request("Hi", "You"), name="Score")
        return [*await pieces_of(vectors), *await pieces_of(scores)]

    embedded, first, scored, second = run(call, Engine().run())
    assert first.code == second.code == "OK"
    found = pb.EmbedResponse.FromString(embedded).embeddings
    assert [each.usage.prompt_tokens for each in found] == [2, 3]
    assert pb.ScoreResponse.FromString(scored).usage.prompt_tokens == 5


def test_targets_come_through_and_the_answer_says_so() -> None:
    engine = Engine().run()

    async def call(replica: EngineReplica) -> tuple[Any, Any]:
        said = [(b"x-slo-ttft-ms", b"500"), (b"x-llm-d-slo-tpot-ms", b"50")]
        http = await pieces_of(post(replica, "/v1/completions", *said, prompt="Hi", max_tokens=3))
        grpc = await pieces_of(rpc(replica, SHORT, ("x-slo-ttft-ms", "500")))
        return http[0], grpc[-1]

    start, status = run(call, engine)
    headers = dict(start["headers"])
    assert (headers[b"x-slo-ttft-ms"], headers[b"x-slo-tpot-ms"]) == (b"500", b"50")
    assert headers[b"x-slo-met"] == b"false", "the fake engine's TBT is 60 ms"
    assert status.code == "OK" and dict(status.trailing)["x-slo-met"] == "true"
    assert [each.slo for each in engine.requests] == [SLO(0.5, 0.05), SLO(0.5)]


def test_an_rpc_that_fails_ends_with_its_status() -> None:
    empty = pb.GenerateRequest(text="")
    (status,) = run(lambda replica: pieces_of(rpc(replica, empty)), Engine())
    assert isinstance(status, Status) and status.code == "INVALID_ARGUMENT"
    assert "prompt" in status.details


def test_keys_are_asked_for_at_both_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "me sha256:" + "0" * 64)

    async def call(replica: EngineReplica) -> tuple[Any, Any]:
        http = await pieces_of(post(replica, "/v1/completions", prompt="Hi"))
        grpc = await pieces_of(rpc(replica, SHORT))
        return http[0]["status"], grpc[0].code

    assert run(call, Engine()) == (401, "UNAUTHENTICATED")


def test_an_id_is_each_key_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ";".join(ApiKey(name, digest_of(name.encode())).line() for name in ("alice", "bob"))
    monkeypatch.setenv(KEYS_VARIABLE, keys)
    engine = Engine()

    async def call(replica: EngineReplica) -> tuple[Any, Any, Any]:
        def ask() -> Any:
            key = (b"authorization", b"Bearer alice")
            return pieces_of(post(replica, "/v1/completions", key, prompt="Hi", request_id="mine"))

        hers = asyncio.create_task(ask())
        await asyncio.to_thread(engine.wait, lambda: len(engine.live) == 1)
        again = await ask()
        message = pb.GenerateRequest(text="Hi", request_id="mine")
        his = asyncio.create_task(pieces_of(rpc(replica, message, ("authorization", "Bearer bob"))))
        await asyncio.to_thread(engine.wait, lambda: len(engine.live) == 2)
        engine.run()
        return again, await hers, await his

    again, hers, his = run(call, engine)
    assert again[0]["status"] == 409 and b"'mine' is already running" in body(again)
    assert json.loads(body(hers))["id"] == "cmpl-mine"
    assert {pb.GenerateResponse.FromString(each).request_id for each in his[:-1]} == {"mine"}


def test_its_health_is_the_engines() -> None:
    engine = Engine()

    async def call(replica: EngineReplica) -> None:
        await replica.check_health()
        engine.fail(RuntimeError("no memory"))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="no memory"):
            await replica.check_health()

    run(call, engine)


def test_what_it_says_is_what_routers_and_the_autoscaler_read() -> None:
    engine = Engine().run()

    async def call(replica: EngineReplica) -> tuple[dict[str, Any], dict[str, float]]:
        slo = {"ttft_ms": 500}
        await pieces_of(post(replica, "/v1/completions", prompt="Hi", max_tokens=3, slo=slo))
        return await replica.record_routing_stats(), await replica.record_autoscaling_stats()

    said, load = run(call, engine)
    replicas = Replicas("slo")
    replicas.update({"a": said[SNAPSHOT]})
    assert replicas.choose(NOTHING, said[SNAPSHOT]["time"]) == "a"
    assert said[SNAPSHOT]["mean_output"] == 3.0
    # The fake engine expects 250 ms; its one request with targets has met them.
    assert load["wait_share"] == 0.0 or load["wait_share"] == 0.5
    assert sum(value for name, value in load.items() if name.startswith("met:")) == 1


def test_it_stops_once_what_runs_has_ended() -> None:
    engine = Engine()

    async def call(replica: EngineReplica) -> list[Any]:
        parts = post(replica, "/v1/completions", prompt="Hi", max_tokens=1)
        answer = asyncio.ensure_future(pieces_of(parts))
        await asyncio.to_thread(engine.wait, lambda: engine.live)
        stopping = replica.__del__()
        assert stopping is not None and replica.__del__() is None
        task = asyncio.ensure_future(stopping)
        await asyncio.to_thread(engine.wait, lambda: not engine.open)
        with pytest.raises(Unserved, match="shutting down") as late:
            await pieces_of(post(replica, "/v1/completions", prompt="Hi"))
        assert late.value.replica == "r1"
        engine.step()
        await task
        return await answer

    assert run(call, engine)[0]["status"] == 200
    assert engine.stopped and not engine.cancelled


def test_several_hosts_have_as_many_devices_each() -> None:
    config = replica_config(["--config.mesh.tensor=4"], hosts=2)
    assert (config.mesh.hosts, config.mesh.tensor) == (2, 4)
    with pytest.raises(ConfigError, match=r"^flags: mesh.tensor must be a multiple of the 3 hosts"):
        replica_config(["--config.mesh.tensor=4"], hosts=3)


def test_its_model_may_be_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which each process looks for where it is: the files' places may differ."""
    pytest.importorskip("ray")
    from jaxserve.deploy.followers import running_engine

    box, engine = replica_config([]).model.path, Engine()
    monkeypatch.setattr(engine, "start", engine.run, raising=False)
    monkeypatch.setattr(
        "jaxserve.server.startup.launch.local_path",
        lambda path: {"smollm2": box}.get(path, path),
    )
    loaded: list[str] = []
    monkeypatch.setattr(module, "load_chat_template", collecting(loaded, module.load_chat_template))
    monkeypatch.setattr(
        "jaxserve.engine.startup.build.build_engine",
        lambda config, **_: loaded.append(config.model.path) or engine,
    )

    async def test() -> None:
        flags = ["smollm2", "--config.engine.stall_s=0"]
        replica = EngineReplica(flags, 1, running_engine, lambda: "r1")
        await replica.stop()

    asyncio.run(test())
    assert loaded == [box, box]


def collecting(given: list[str], call: Callable[..., T]) -> Callable[..., T]:
    """The call, which adds to what it was given first."""

    def calling(one: str, *rest: Any) -> T:
        given.append(one)
        return call(one, *rest)

    return calling


def test_calls_of_a_replica_that_has_lost_a_host_may_come_again() -> None:
    engine = Engine()

    async def call(replica: EngineReplica) -> list[Any]:
        parts = post(replica, "/v1/completions", prompt="Hi", max_tokens=9, stream=True)
        answer = asyncio.ensure_future(pieces_of(parts))
        await asyncio.to_thread(engine.wait, lambda: engine.live)
        engine.step()
        await asyncio.sleep(0)
        engine.fail_silently(HostLost("host 1 is gone"))
        return await answer

    _, *rest = run(call, engine)
    event = json.loads(body(rest).rpartition(b"data: ")[2])
    assert event["error"]["code"] == "unavailable" and "host 1 is gone" in event["error"]["message"]


@pytest.mark.parametrize(
    ("door", "given_up"), [("http", False), ("chat", True), ("stream", False), ("grpc", True)]
)
def test_what_a_replica_had_not_begun_to_answer_when_its_engine_failed_it_leaves_to_others(
    door: str, given_up: bool
) -> None:
    engine = Engine()

    def ask(replica: EngineReplica) -> AsyncGenerator[Any, None]:
        if door == "grpc":
            return rpc(replica, pb.GenerateRequest(text="Hi"))
        if door == "chat":
            messages = [{"role": "user", "content": "Hi"}]
            return post(replica, "/v1/chat/completions", messages=messages, stream=True)
        return post(replica, "/v1/completions", prompt="Hi", stream=door == "stream")

    async def call(replica: EngineReplica) -> None:
        waiting = asyncio.ensure_future(pieces_of(ask(replica)))
        await asyncio.to_thread(engine.wait, lambda: engine.live)
        if given_up:
            ((name, running),) = engine.live.items()
            running.on_output(Output(name, 0, expected_missed=True))
        engine.fail(RuntimeError("no memory"))
        for answer in (waiting, pieces_of(ask(replica))):
            with pytest.raises(Unserved, match="no memory"):
                await answer
        snapshot = (await replica.record_routing_stats())[SNAPSHOT]
        assert snapshot["draining"]

    run(call, engine)


def test_what_is_wrong_with_a_call_is_nobody_elses_to_answer() -> None:
    engine = Engine()

    async def call(replica: EngineReplica) -> list[Any]:
        engine.fail(RuntimeError("no memory"))
        await asyncio.sleep(0)
        return await pieces_of(post(replica, "/v1/completions", nonsense=1))

    assert run(call, engine)[0]["status"] == 400


def test_its_metrics_are_those_of_a_server() -> None:
    engine = Engine().run()

    async def call(replica: EngineReplica) -> Any:
        await pieces_of(post(replica, "/v1/completions", prompt="Hi", max_tokens=3))
        return await replica.metrics()

    name, metrics = run(call, engine)
    samples = {sample.name: sample.value for metric in metrics for sample in metric.samples}
    assert name == "r1" and samples["jaxserve:generation_tokens_total"] == 3


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--port=9", "server.port has no meaning.*proxies"),
        ("--config.server.batch_dir=/x", "server.batch_dir.*no batches"),
        ("--config.mesh.hosts=2", "mesh.hosts has no meaning.*the setting hosts"),
        ("--config.mesh.hosts_wait_s=0.0", "flags: mesh.hosts_wait_s must be more than 0"),
        ("--polcy=vllm", "polcy"),
        ("--config.server.grace_s=-1", "server.grace_s: must be 0"),
    ],
)
def test_a_flag_that_means_nothing_here_is_refused(flag: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(lambda _: asyncio.sleep(0), Engine(), flag)


def test_each_replica_records_to_a_file_of_its_own() -> None:
    """With its name, since those of one host are given the same flags."""
    configs: list[Config] = []

    async def start() -> None:
        flags = ["--config.engine.stall_s=0", "--config.engine.record=served.jsonl"]
        engine = Engine()
        replica = EngineReplica(
            flags, 1, lambda config: configs.append(config) or serving(engine), lambda: "r1"
        )
        await replica.stop()

    asyncio.run(start())
    assert configs[0].engine.record == "served.jsonl.r1"
