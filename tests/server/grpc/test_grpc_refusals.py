"""Bad requests: the status code, and a message that names the field and the limit."""

from __future__ import annotations

import re
from collections.abc import Callable

import grpc
import pytest

from jaxserve.client import make_request
from jaxserve.server.grpc import message_conversion
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.proto import generation_pb2_grpc
from tests.server.fake_engine import FakeEngine
from tests.server.grpc.test_grpc_hostile import ended, retry_ms

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def refusal(
    stub: generation_pb2_grpc.GenerationStub, request: pb.GenerateRequest
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(request, timeout=20))
    return error.value.code(), error.value.details()


def with_unknown(request: pb.GenerateRequest, where: Callable) -> pb.GenerateRequest:
    """The request as a newer client would send it, with a field 99 that we do not have."""
    where(request).MergeFromString(b"\x98\x06\x01")
    return request


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.GenerateRequest(), ["prompt", "is required"]),
        (make_request([]), ["prompt", "empty"]),
        (make_request("hi", min_p=1.5), ["min_p", "at most 1"]),
        (make_request("hi", repetition_penalty=0.0), ["repetition_penalty", "at least 1e-06"]),
        (make_request("hi", repetition_penalty=1e-46), ["repetition_penalty", "at least 1e-06"]),
        (make_request("hi", presence_penalty=101.0), ["presence_penalty", "100"]),
        (make_request("hi", frequency_penalty=-101.0), ["frequency_penalty", "-100"]),
        (make_request("hi", prompt_logprobs=21), ["prompt_logprobs", "at most 20"]),
        (
            make_request([5] * 2100, prompt_logprobs=20),
            ["prompt_logprobs", "2100", "525 KiB", "at most 512", "server.stream_buffer_kib"],
        ),
        (make_request("hi", stop_token_ids=range(33)), ["stop_token_ids", "33", "at most 32"]),
        (make_request("hi", stop=[""]), ["stop", "0 characters", "256"]),
        (make_request("hi", slo={"tbt_ms": 0.0}), ["slo.tbt_ms", "positive"]),
        (make_request("hi", slo={"max_tbt_ms": -1.0}), ["slo.max_tbt_ms", "positive", "-1"]),
        (make_request("hi", cache_salt="x" * 257), ["cache_salt", "257", "256"]),
        (make_request("hi", prompt_cache_key="x" * 257), ["prompt_cache_key", "257", "256"]),
        (pb.GenerateRequest(text="hi", tier=7), ["tier", "7", "TIER_BEST_EFFORT"]),
        (with_unknown(make_request("hi"), lambda r: r), ["request", "99", "unknown"]),
        (with_unknown(make_request("hi"), lambda r: r.sampling), ["sampling", "99", "unknown"]),
        (with_unknown(make_request("hi"), lambda r: r.slo), ["slo", "99", "unknown"]),
        (with_unknown(make_request([1]), lambda r: r.token_ids), ["token_ids", "99"]),
    ],
)
def test_invalid_argument(refusing, request_, words: list[str]) -> None:
    """What is wrong at every door alike is in ../test_one_path.py."""
    channel, engine = refusing
    code, details = refusal(generation_pb2_grpc.GenerationStub(channel), request_)
    assert code is INVALID
    assert all(word in details for word in words), details
    assert "\n" not in details
    assert engine.requests == []


def test_any_number_of_unknown_fields_is_refused_without_a_look_at_each(
    stub, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        message_conversion, "UnknownFieldSet", lambda message: pytest.fail("looked")
    )
    for where in (lambda request: request, lambda request: request.sampling):
        request = make_request("hi", max_tokens=1)
        where(request).MergeFromString(b"\x98\x06\x01" * 200_000)
        code, details = refusal(stub, request)
        assert code is INVALID
        assert re.fullmatch(r"request: has 60000\d bytes of fields that are unknown .*", details)
    engine.run()
    assert list(stub.Generate(make_request("hi", max_tokens=1)))


def test_a_full_queue_is_resource_exhausted(stub, engine: FakeEngine) -> None:
    engine.max_requests = 1
    running = stub.Generate(make_request("hi"))
    engine.wait(lambda: engine.live)
    code, details = refusal(stub, make_request("hi"))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "try again later" in details
    assert 500 <= retry_ms(ended(stub.Generate(make_request("hi")))) <= 1500
    running.cancel()
    engine.wait(lambda: not engine.live)
    engine.run()
    assert list(stub.Generate(make_request("hi", max_tokens=1)))


def test_an_id_that_is_running_already_exists(stub, engine: FakeEngine) -> None:
    running = stub.Generate(make_request("hi", request_id="mine", max_tokens=1))
    engine.wait(lambda: engine.live)
    code, details = refusal(stub, make_request("hi", request_id="mine"))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "request_id" in details and "mine" in details
    engine.step()
    assert list(running)[-1].finish.reason == pb.FINISH_REASON_LENGTH


def test_a_stopped_engine_is_unavailable(stub, engine: FakeEngine) -> None:
    engine.drain(0.0)
    code, details = refusal(stub, make_request("hi"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in details
