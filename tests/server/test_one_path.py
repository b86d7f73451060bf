"""One mistake, one outcome: the same text, code and field at every frontend, before anything is
submitted. Over a fake engine: gRPC, HTTP, lines of batches of both, LLM, and a replica of Ray
Serve, which is called as Ray Serve calls it."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import pytest

from jaxserve.client import make_request
from jaxserve.deploy.in_process import Status
from jaxserve.deploy.replica import EngineReplica
from jaxserve.deploy.replicas import NOTHING
from jaxserve.offline.llm import LLM
from jaxserve.sched.request import Grammar, InvalidRequest, SamplingParams
from jaxserve.server.proto import batches_pb2, batches_pb2_grpc, generation_pb2_grpc
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.call_outcome import CallOutcome
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.deploy.engine import Engine as BackloggedEngine
from tests.server.batches.serving import serving
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.logging_kept import logging_kept

PATIENCE = 20
NAN = float("nan")
GENERATE = "/jaxserve.v1.Generation/Generate"


class Refusal(NamedTuple):
    """What a client is told. code: as HTTP has it."""

    message: str
    code: str = "invalid_value"
    field_name: str | None = None


class Mistake(NamedTuple):
    """prompt, sampling, slo, request_id: what is asked. refusal: its message, from its field on.
    not_at: frontends that have no such field, or no word for the mistake. code: of HTTP's error."""

    refusal: str
    prompt: str | list[int] = "hi"
    sampling: dict[str, Any] = {}  # noqa: RUF012
    slo: dict[str, float] = {}  # noqa: RUF012
    request_id: str = ""
    not_at: tuple[str, ...] = ()
    code: str = "invalid_value"


WITHOUT_TARGETS = ("grpc batch", "http batch")  # as batches are
WITHOUT_IDS = (*WITHOUT_TARGETS, "llm")
TOO_LONG = "at most 4095 can be served: this model's maximum context length is 4096"
OVER = "context_length_exceeded"
MISTAKES = {
    "no tokens": Mistake(
        "prompt: is empty; at least 1 token is needed", prompt=[], not_at=("http",)
    ),
    "no text": Mistake("prompt: is empty; at least 1 token is needed", prompt=""),
    "too long": Mistake(f"prompt: has 5000 tokens; {TOO_LONG}", prompt="x" * 5000, code=OVER),
    "too many ids": Mistake(f"prompt: has 4096 tokens; {TOO_LONG}", prompt=[1] * 4096, code=OVER),
    "no token": Mistake("prompt: token id 100000 is outside 0..99999", prompt=[1, 100_000]),
    "below 0": Mistake("prompt: token id -1 is outside 0..99999", prompt=[1, -1]),
    "max_tokens": Mistake("max_tokens: must be at least 1, got 0", sampling={"max_tokens": 0}),
    "no room": Mistake(
        "max_tokens: 4095 after a prompt of 2 tokens makes 4097; at most 4096 in all can be served",
        sampling={"max_tokens": 4095},
        code=OVER,
    ),
    "min_tokens": Mistake(
        "min_tokens: must be at least 0 and at most 5, got 6",
        sampling={"max_tokens": 5, "min_tokens": 6},
    ),
    "temperature": Mistake(
        "temperature: must be at least 0 and at most 100, got -0.5", sampling={"temperature": -0.5}
    ),
    "nan": Mistake(
        "temperature: must be at least 0 and at most 100, got nan", sampling={"temperature": NAN}
    ),
    "top_p": Mistake("top_p: must be at least 0 and at most 1, got -0.1", sampling={"top_p": -0.1}),
    "top_k": Mistake("top_k: must be at least 0, got -2", sampling={"top_k": -2}),
    "n": Mistake("n: must be at least 1 and at most 16, got 17", sampling={"n": 17}),
    "logprobs": Mistake(
        "logprobs: must be at least 0 and at most 20, got 21", sampling={"logprobs": 21}
    ),
    "stop": Mistake("stop: has 17 entries; at most 16 are allowed", sampling={"stop": ["a"] * 17}),
    "a long stop": Mistake(
        "stop: a stop string has 257 characters; 1 to 256 are allowed",
        sampling={"stop": ["a" * 257]},
    ),
    "stop_token_ids": Mistake(
        "stop_token_ids: token id -7 is outside 0..99999", sampling={"stop_token_ids": [-7]}
    ),
    "logit_bias": Mistake(
        "logit_bias: token id -7 is outside 0..99999", sampling={"logit_bias": {-7: 1.0}}
    ),
    "a large bias": Mistake(
        "logit_bias: must be at least -100 and at most 100, got 101.0",
        sampling={"logit_bias": {1: 101.0}},
    ),
    "many biases": Mistake(
        "logit_bias: has 301 entries; at most 300 are allowed",
        sampling={"logit_bias": dict.fromkeys(range(301), 1.0)},
    ),
    "target": Mistake(
        "slo.ttft_ms: must be a positive, finite time, got -3.0",
        slo={"ttft_ms": -3.0},
        not_at=(*WITHOUT_TARGETS, "llm"),  # whose SLO is in seconds, and its own
    ),
    "an endless target": Mistake(
        "slo.tbt_ms: must be a positive, finite time, got inf",
        slo={"tbt_ms": math.inf},
        not_at=(*WITHOUT_TARGETS, "llm"),
    ),
    "request_id": Mistake(
        "request_id: has 129 characters; at most 128 are allowed",
        request_id="x" * 129,
        not_at=WITHOUT_IDS,
    ),
    "unprintable": Mistake(
        "request_id: has characters that cannot be printed", request_id="a\tb", not_at=WITHOUT_IDS
    ),
    "grammar": Mistake("{grammar}: is bad", sampling={"grammar": Grammar.regex("bad")}),
}


class Frontends(NamedTuple):
    engine: FakeEngine
    server: Server
    plain: Plain
    channel: grpc.Channel


@pytest.fixture(scope="module")
def frontends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontends]:
    engine = BackloggedEngine()
    with (
        serving(engine, tmp_path_factory.mktemp("batches"), http=SETTINGS) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield Frontends(engine, server, Plain(server), channel)


def grpc_request(mistake: Mistake) -> pb.GenerateRequest:
    sampling = {name: value for name, value in mistake.sampling.items() if name != "grammar"}
    request = make_request(
        mistake.prompt, slo=mistake.slo or None, request_id=mistake.request_id, **sampling
    )
    if "grammar" in mistake.sampling:
        request.sampling.grammar.regex = mistake.sampling["grammar"].text
    return request


def http_body(mistake: Mistake) -> dict[str, Any]:
    body = {"prompt": mistake.prompt, **mistake.sampling}
    if "grammar" in body:
        body["guided_regex"] = body.pop("grammar").text
    if mistake.slo:
        body["slo"] = mistake.slo
    if mistake.request_id:
        body["request_id"] = mistake.request_id
    return body


def via_grpc(on: Frontends, mistake: Mistake) -> Refusal:
    stub = generation_pb2_grpc.GenerationStub(on.channel)
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(grpc_request(mistake), timeout=PATIENCE))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return Refusal(error.value.details())


def told(status: int, answer: Any) -> Refusal:
    assert status == 400, answer
    error = answer["error"]
    return Refusal(error["message"], error["code"], error["param"])


def via_http(on: Frontends, mistake: Mistake) -> Refusal:
    return told(*on.plain.call("POST", "/v1/completions", http_body(mistake))[:2])


def via_grpc_batch(on: Frontends, mistake: Mistake) -> Refusal:
    asked = grpc_request(mistake)
    line = batches_pb2.BatchLine(sampling=asked.sampling)
    if isinstance(mistake.prompt, str):
        line.text = asked.text
    else:
        line.token_ids.CopyFrom(asked.token_ids)
    stub = batches_pb2_grpc.BatchesStub(on.channel)
    lines = batches_pb2.SubmitBatchRequest(lines=[line], commit=True)
    name = stub.SubmitBatch(lines, timeout=PATIENCE).status.batch_id
    pages = stub.GetBatch(batches_pb2.GetBatchRequest(batch_id=name, follow=True), timeout=PATIENCE)
    (result,) = [each for page in pages for each in page.results]
    assert result.error.code == "INVALID_ARGUMENT"
    return Refusal(result.error.message)


def via_http_batch(on: Frontends, mistake: Mistake) -> Refusal:
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/completions",
        "body": http_body(mistake),
    }
    file = upload(on.plain, json.dumps(line).encode())
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    status, batch, _ = on.plain.call("POST", "/v1/batches", body)
    assert status == 200, batch
    while batch["status"] != "completed":
        _, batch, _ = on.plain.call("GET", f"/v1/batches/{batch['id']}")
    _, result, _ = on.plain.call("GET", f"/v1/files/{batch['error_file_id']}/content")
    response = result["response"]
    assert response["status_code"] == 400
    return Refusal(response["body"]["error"]["message"])


def upload(plain: Plain, content: bytes) -> str:
    parts = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n',
        content + b"\r\n--x--\r\n",
    )
    connection = plain.connect()
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    connection.request("POST", "/v1/files", b"".join(parts), kind)
    found: str = json.loads(connection.getresponse().read())["id"]
    connection.close()
    return found


def via_llm(on: Frontends, mistake: Mistake) -> Refusal:
    llm = LLM.over(on.engine, ChatTemplate())  # type: ignore[arg-type]
    fields = dict(mistake.sampling)
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple(fields["logit_bias"].items())
    try:
        with pytest.raises(InvalidRequest) as error:
            llm.generate([mistake.prompt], SamplingParams(**fields), progress=False)
    finally:
        llm._loop.close()
    return Refusal(str(error.value), field_name=error.value.field_name)


@contextmanager
def handed_over(engine: FakeEngine) -> Iterator[FakeEngine]:
    yield engine


def on_ray(engine: FakeEngine, call: Callable[[EngineReplica], Any]) -> list[Any]:
    """Parts of the response of a replica."""

    async def whole() -> list[Any]:
        flags = ["--config.engine.stall_s=0"]
        replica = EngineReplica(flags, 1, lambda _: handed_over(engine), lambda: "r")
        try:
            return [part async for piece in call(replica) for part in piece]
        finally:
            await replica.stop()

    with logging_kept():
        return asyncio.run(whole())


def via_ray_http(on: Frontends, mistake: Mistake) -> Refusal:
    scope = {
        **{"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"},
        **{"path": "/v1/completions", "query_string": b"", "client": ("127.0.0.1", 1)},
        "headers": [(b"content-type", b"application/json")],
    }
    body = json.dumps(http_body(mistake)).encode()
    start, *rest = on_ray(
        BackloggedEngine(), lambda replica: replica.http(scope, body, routing_request=NOTHING)
    )
    return told(start["status"], json.loads(b"".join(each.get("body", b"") for each in rest)))


def via_ray_grpc(on: Frontends, mistake: Mistake) -> Refusal:
    raw = grpc_request(mistake).SerializeToString()
    (status,) = on_ray(
        BackloggedEngine(),
        lambda replica: replica.grpc(GENERATE, raw, [], "peer", routing_request=NOTHING),
    )
    assert isinstance(status, Status) and status.code == "INVALID_ARGUMENT"
    return Refusal(status.details)


FRONTENDS = {
    "grpc": via_grpc,
    "http": via_http,
    "grpc batch": via_grpc_batch,
    "http batch": via_http_batch,
    "llm": via_llm,
    "ray http": via_ray_http,
    "ray grpc": via_ray_grpc,
}


@pytest.mark.promise(16)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_same_mistake_has_the_same_outcome_at_every_frontend(
    frontends: Frontends, name: str
) -> None:
    mistake = MISTAKES[name]
    calls, before = 0, Counter(frontends.server._tracker.counts)
    for frontend, ask in FRONTENDS.items():
        if frontend in mistake.not_at or frontend.removeprefix("ray ") in mistake.not_at:
            continue
        named = "guided_regex" if "http" in frontend else "grammar.regex"
        refusal = ask(frontends, mistake)
        assert refusal.message == mistake.refusal.format(grammar=named), frontend
        code = mistake.code if frontend.endswith("http") else "invalid_value"
        assert refusal.code == code, frontend
        field_name = refusal.message.partition(":")[0]
        assert refusal.field_name in (None, field_name), frontend
        calls += 1
    assert calls > 2
    assert frontends.engine.requests == []
    counted = Counter(frontends.server._tracker.counts) - before
    for method in ("Generate", "http /v1/completions"):
        if method == "Generate" or "http" not in mistake.not_at:
            assert counted[method, CallOutcome.INVALID] == 1, method
    assert not any(outcome is CallOutcome.FAILED for _, outcome in counted)
