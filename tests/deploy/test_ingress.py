"""The ingress, with replicas that answer, break off or die."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client.core import GaugeMetricFamily

from jaxserve.client import make_embed_request, make_score_request
from jaxserve.config import ConfigError
from jaxserve.deploy.in_process import Status
from jaxserve.deploy.moves.relay import Unserved
from jaxserve.deploy.replicas import NOTHING, ROUTING_REQUEST, WHERE, Where
from jaxserve.server.moves.resume_point import ResumePoint
from jaxserve.server.proto import generation_pb2 as pb

pytestmark = pytest.mark.ray  # it has to be installed

START = {"type": "http.response.start", "status": 200, "headers": []}
DIES, AWAY, FAILED, BROKEN, LOST = "dies", "away", "failed", "broken", "lost"


HUNG_UP = b"hung up"


def body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Response:
    """What a handle gives: a generator that may be cancelled."""

    def __init__(self, script: Sequence[Any]) -> None:
        self._script, self.cancelled = script, False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        from ray.exceptions import (
            ActorDiedError,
            ActorUnavailableError,
            ObjectLostError,
            RayTaskError,
        )

        for step in self._script:
            if step == DIES:
                raise ActorDiedError()
            if step == AWAY:
                raise ActorUnavailableError("out of reach", b"0" * 16)
            if step == FAILED:
                unserved = Unserved("the engine failed", "b")
                raise RayTaskError("http", "Traceback", unserved).as_instanceof_cause()
            if step == BROKEN:
                raise RayTaskError("http", "Traceback", KeyError("x")).as_instanceof_cause()
            if step == LOST:
                raise ObjectLostError("0" * 56, None, "")
            yield step


class Handle:
    """Of a deployment, whose replicas answer one after the other as the scripts say."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts = list(scripts)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.responses: list[Response] = []
        self.told: Any = []  # by all, of whatever is asked
        self.asked: list[str] = []
        self.dead = 0  # replicas that are asked how long bodies may be

    def options(self, *, method_name: str, stream: bool = False) -> Any:
        if method_name == "sizes":
            return SimpleNamespace(remote=self._sizes)
        return self

    async def _sizes(self) -> tuple[int, int]:
        from ray.exceptions import ActorDiedError

        if self.dead:
            self.dead -= 1
            raise ActorDiedError()
        return 1000, 16

    def broadcast(self, method_name: str) -> Any:
        async def results(*, timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert timeout_s and return_exceptions
            self.asked.append(method_name)
            if isinstance(self.told, Exception):
                raise self.told
            return self.told

        return SimpleNamespace(results_async=results)

    def remote(self, *arguments: Any, **named: Any) -> Response:
        self.calls.append((arguments, named))
        self.responses.append(Response(self.scripts.pop(0)))
        return self.responses[-1]


class Context:
    def __init__(self) -> None:
        self.code: Any = None
        self.details = ""
        self.trailing: list[tuple[str, str]] = []

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing: list[tuple[str, str]]) -> None:
        self.trailing = trailing

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", "Bearer x")]

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def http(handle: Handle, sent: bytes, **changed: Any) -> list[dict[str, Any]]:
    """What the client of a call gets. changed: of the scope."""
    from jaxserve.deploy.ingress import Ingress

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "extensions": object(),  # of the proxy's, which no other process can have
        **changed,
    }
    got: list[dict[str, Any]] = []

    whole = iter([{"type": "http.request", "body": sent, "more_body": HUNG_UP in sent}])

    async def receive() -> dict[str, Any]:
        return next(whole, {"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        got.append(message)

    async def call() -> None:
        response = await Ingress(handle)(SimpleNamespace())  # type: ignore[arg-type]
        await response(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(call())
    return got


def rpc(handle: Handle) -> tuple[list[str], Context]:
    """The texts that the client of Generate gets, and how it ends."""
    from jaxserve.deploy.ingress import CallFailed, Ingress

    texts: list[str] = []
    context = Context()

    async def call() -> None:
        message = pb.GenerateRequest(text="Hi there", slo=pb.Slo(ttft_ms=500))
        async for answer in Ingress(handle).Generate(message, context):  # type: ignore[arg-type]
            texts.append(answer.text)

    try:
        asyncio.run(call())
    except CallFailed:
        assert context.code is not None
    return texts, context


def test_vectors_and_scores_are_passed_on() -> None:
    """The router is told what vectors cost; scores go anywhere, as /score does."""
    from jaxserve.deploy.ingress import CallFailed, Ingress

    many = [pb.EmbedResponse(embeddings=[pb.Embedding(index=i, values=[i, 1.5])]) for i in range(2)]
    scored = pb.ScoreResponse(scores=[pb.Score(score=0.5)])

    async def vectors(handle: Handle, context: Context) -> list[pb.EmbedResponse]:
        message = make_embed_request(["Hi there"] * 3, slo={"ttft_ms": 500})
        answers = Ingress(handle).Embed(message, context)  # type: ignore[arg-type]
        return [each async for each in answers]

    async def scores(handle: Handle, context: Context) -> pb.ScoreResponse:
        message = make_score_request("a", "b")
        return await Ingress(handle).Score(message, context)  # type: ignore[arg-type]

    handle = Handle([[each.SerializeToString()] for each in many])
    assert asyncio.run(vectors(handle, Context())) == many
    ((given, named),) = handle.calls
    assert given[0] == "/jaxserve.v1.Generation/Embed"
    assert named[ROUTING_REQUEST].ttft == 0.5 and named[ROUTING_REQUEST].sequences == 3
    handle = Handle([[scored.SerializeToString()]])
    assert asyncio.run(scores(handle, Context())) == scored
    assert handle.calls[0][1][ROUTING_REQUEST] is NOTHING
    refusal, context = Status("INVALID_ARGUMENT", "documents: is empty"), Context()
    for call in (vectors, scores):
        with pytest.raises(CallFailed, match="documents: is empty"):
            asyncio.run(call(Handle([[refusal]]), context))
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT


def said(text: str) -> bytes:
    return pb.GenerateResponse(text=text).SerializeToString()


def test_what_the_replica_says_is_passed_on_and_the_router_is_told_what_it_costs() -> None:
    handle = Handle([[START, body(b"a")], [body(b"b", more=False)]])
    sent = json.dumps({"prompt": "Hi there", "slo": {"ttft_ms": 500}}).encode()
    assert http(handle, sent) == [START, body(b"a"), body(b"b", more=False)]
    ((scope, given, resume), named) = handle.calls[0]
    assert 0 < ResumePoint.model_validate_json(resume).arrived <= time.time()
    assert given == sent and "extensions" not in scope
    assert named[ROUTING_REQUEST].ttft == 0.5 and named[ROUTING_REQUEST].prompt_len > 1
    assert handle.responses[0].cancelled


WHOLE = [START, body(b"b", more=False)]


@pytest.mark.parametrize(
    "scripts",
    [
        ([[START], DIES], [WHOLE]),
        ([[START], FAILED], [WHOLE]),
        ([WHOLE, DIES],),  # it was whole by then
    ],
)
def test_an_answer_is_whole_though_its_replica_ends(scripts: Sequence[Sequence[Any]]) -> None:
    handle = Handle(*scripts)
    assert http(handle, b"{}") == WHOLE
    assert handle.calls[-1][1][WHERE].avoid == (("b",) if FAILED in scripts[0] else ())


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        (([DIES], [DIES], [WHOLE]), b"unavailable"),  # it goes elsewhere once
        (([AWAY], [WHOLE]), b"unavailable"),  # who may still compute it
        (([FAILED], [FAILED]), b"the engine failed"),
        (([LOST],), b"unavailable"),  # with the node that had it
    ],
)
def test_what_nobody_answers_is_unavailable(scripts: Sequence[Any], said: bytes) -> None:
    start, problem = http(Handle(*scripts), b"{}")
    assert start["status"] == 503 and said in problem["body"]
    assert b"Traceback" not in problem["body"]
    assert any(name == b"retry-after" for name, _ in start["headers"])


def test_what_is_cut_off_or_too_long_is_sent_nowhere() -> None:
    handle = Handle()
    assert http(handle, HUNG_UP) == []
    assert http(handle, b" " * 1001)[0]["status"] == 413 and not handle.calls


def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    *told, last = http(Handle([[START, body(b"data: 1\n\n")], DIES], []), b"{}")
    assert told == [START, body(b"data: 1\n\n")]
    event = json.loads(last["body"].removeprefix(b"data: "))
    assert event["error"]["code"] == "unavailable" and not last.get("more_body", False)


def test_it_does_so_in_the_form_of_its_api() -> None:
    def last(path: str) -> bytes:
        told = http(Handle([[START, body(b"data: 1\n\n")], DIES], []), b"{}", path=path)
        return bytes(told[-1]["body"])

    name, data, *_ = last("/v1/messages").split(b"\n")
    event = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error" and event["type"] == "error"
    assert set(event["error"]) == {"type", "message"}
    (line,) = last("/api/chat").splitlines()
    assert "is gone" in json.loads(line)["error"]


def test_an_error_in_a_replica_is_the_servers_and_said_as_one() -> None:
    start, problem = http(Handle([BROKEN]), b"{}")
    assert start["status"] == 500 and b"internal error: KeyError" in problem["body"]
    *_, last = http(Handle([[START, body(b"data: 1\n\n")], BROKEN]), b"{}")
    assert b'"code":"internal"' in last["body"]
    assert rpc(Handle([BROKEN]))[1].code is grpc.StatusCode.INTERNAL


def test_a_prefix_of_the_route_is_not_the_replicas_business() -> None:
    handle = Handle([[START, body(b"", more=False)]])
    http(handle, b'{"prompt": "Hi there"}', path="/llm/v1/completions", root_path="/llm")
    ((scope, _, _), named) = handle.calls[0]
    assert scope["path"] == "/v1/completions" and named[ROUTING_REQUEST].prompt_len > 1


def test_metrics_are_of_all_replicas_for_those_whom_the_door_lets_in() -> None:
    page = [[START, body(b"its own", more=False)]]
    handle = Handle(page)
    gauge = GaugeMetricFamily("jaxserve:num_blocks", "Blocks.", 7)
    handle.told = [("b", [gauge]), KeyError("of one that has just gone")]
    start, told = http(handle, b"", path="/metrics", method="GET")
    assert start["status"] == 200 and b'jaxserve:num_blocks{replica="b"} 7.0' in told["body"]
    assert handle.responses[0].cancelled
    handle = Handle(page)
    handle.told = TimeoutError()
    assert http(handle, b"", path="/metrics", method="GET")[0]["status"] == 503
    refused = [{**START, "status": 401}, body(b"no key", more=False)]
    assert http(Handle([refused], [refused]), b"", path="/metrics", method="GET") == refused


def test_a_reset_is_of_all_replicas_for_those_whom_the_door_lets() -> None:
    path, done = "/reset_prefix_cache", [START, body(b"", more=False)]
    handle = Handle([done])
    handle.told = [None, KeyError("of one that has just gone")]
    assert http(handle, b"", path=path) == done and handle.asked == ["reset_prefix_cache"]
    handle = Handle([done])
    handle.told = TimeoutError()
    assert http(handle, b"", path=path)[0]["status"] == 503
    refused = [{**START, "status": 403}, body(b"no admin", more=False)]
    handle = Handle([refused])
    assert http(handle, b"", path=path) == refused and not handle.asked


def test_how_long_bodies_may_be_another_replica_says_too() -> None:
    handle = Handle([[START, body(b"", more=False)]])
    handle.dead = 1
    assert http(handle, b"{}")[0]["status"] == 200
    handle = Handle()
    handle.dead = 2
    assert http(handle, b"{}")[0]["status"] == 503


def test_rpcs_go_the_same_ways() -> None:
    assert rpc(Handle([[said("a"), said("b")]]))[0] == ["a", "b"]
    assert rpc(Handle([DIES], [[said("a")]]))[0] == ["a"]
    texts, context = rpc(Handle([[said("a")], DIES], []))
    assert texts == ["a"] and context.code is grpc.StatusCode.UNAVAILABLE
    assert "gone" in context.details
    again = [("grpc-retry-pushback-ms", "900")]
    texts, context = rpc(Handle([[Status("RESOURCE_EXHAUSTED", "too many", again)]]))
    assert (texts, context.code) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (context.details, context.trailing) == ("too many", again)
    met = [("x-slo-met", "true")]
    texts, context = rpc(Handle([[said("a"), Status("OK", "", met)]]))
    assert (texts, context.code, context.trailing) == (["a"], None, met)


def test_info_is_any_replicas() -> None:
    from jaxserve.deploy.ingress import Ingress

    handle = Handle([[pb.GetServerInfoResponse(model="m").SerializeToString()]])
    call = Ingress(handle).GetServerInfo(pb.GetServerInfoRequest(), Context())  # type: ignore[arg-type]
    assert asyncio.run(call).model == "m"
    assert handle.calls[0][0][0] == "/jaxserve.v1.Generation/GetServerInfo"


def test_where_a_call_is_sent_is_known_before_it_is_accepted_and_until_it_ends() -> None:
    """A replica that is out of reach accepts nothing; a client may hang up meanwhile."""
    from jaxserve.deploy.router import SnapshotRouter

    router = SnapshotRouter.__new__(SnapshotRouter)
    router.initialize_state(routing="least_loaded")
    known, ids = router._known, {name: SimpleNamespace(unique_id=name) for name in "ab"}
    known.update({"a": None, "b": None})
    replicas = [SimpleNamespace(replica_id=each) for each in ids.values()]
    named = {ROUTING_REQUEST: NOTHING, WHERE: Where(to="b", call="key")}
    call: Any = SimpleNamespace(routing_context=SimpleNamespace(), kwargs=named)
    known.at["key"] = []
    asyncio.run(router.choose_replicas(replicas, call))
    assert known.at == {"key": ["b"]}
    router.on_request_routed(call, ids["a"], None)
    assert known.at == {"key": ["a"]}
    del known.at["key"]
    router.on_request_routed(call, ids["b"], None)
    assert not known.at


def test_the_autoscaler_reads_what_replicas_say() -> None:
    from jaxserve.deploy.load import Load
    from jaxserve.deploy.ray import scale

    late = Load(wait_share=2.0, busy=0.9).as_metrics()
    metrics = {name: {"a": value} for name, value in late.items()}
    context = SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=1)
    assert scale(context) == (2, {})  # type: ignore[arg-type]
    metrics["running_requests"] = {"b": 1.0}  # Ray Serve's own, of one that says nothing
    assert scale(context) == (2, {})  # type: ignore[arg-type]
    nothing = SimpleNamespace(aggregated_metrics=None, current_num_replicas=3)
    assert scale(nothing) == (3, {})  # type: ignore[arg-type]


def test_the_application_is_built_of_what_the_config_file_says() -> None:
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built

    from jaxserve.deploy.ray import app

    assert (
        built(app, {"replicas": "3", "routing": "two_choices"}).__class__.__name__ == "Application"
    )
    with pytest.raises(ValueError, match="no routing 'best'"):
        built(app, {"routing": "best"})


def test_each_host_of_a_replica_has_a_bundle_and_is_started_in_it() -> None:
    from jaxserve.deploy.ray import app
    from jaxserve.deploy.settings import Settings

    settings = Settings(hosts=2, num_gpus=4, flags=["--config.mesh.tensor=8"])
    engine = app(settings)._bound_deployment.init_args[0]._bound_deployment
    assert engine._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 4}] * 2
    assert engine.ray_actor_options["num_gpus"] == 4 and engine.init_args[1] == 2
    with pytest.raises(ConfigError, match=r"mesh.tensor must be a multiple of the 2 hosts"):
        app(Settings(hosts=2))
