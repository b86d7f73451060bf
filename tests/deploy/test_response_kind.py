"""What the parts of an answer tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.deploy.in_process import Status
from jaxserve.deploy.response_kind import (
    ResponseKind,
    first_response_kind,
    grpc_response_kind,
    http_response_kind,
)
from jaxserve.server.proto import generation_pb2 as pb

SPEAKS = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
GIVEN_UP = {"index": 0, "finish_reason": None, "slo": {"expected": "missed"}}


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", ResponseKind.NOTHING),
        (b'{"choices": []}', ResponseKind.ANSWER),
        (event(SPEAKS), ResponseKind.NOTHING),
        (event(SPEAKS) + event({"choices": [{"delta": {"content": "a"}}]}), ResponseKind.ANSWER),
        (event(SPEAKS) + event({"error": {"code": "unavailable"}}), ResponseKind.FAILURE),
        (event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), ResponseKind.ANSWER),
        (event({"choices": [{"text": ""}]}), ResponseKind.ANSWER),
        (event({"choices": [], "usage": {}}), ResponseKind.ANSWER),
        (event({"choices": [{**GIVEN_UP, "text": "", "logprobs": None}]}), ResponseKind.NOTHING),
        (event({"choices": [{**GIVEN_UP, "text": "a", "logprobs": None}]}), ResponseKind.ANSWER),
        (event(SPEAKS) + event({"choices": [{**GIVEN_UP, "delta": {}}]}), ResponseKind.NOTHING),
        (event({"choices": [{**GIVEN_UP, "delta": {"content": "a"}}]}), ResponseKind.ANSWER),
        (b"data: [DONE]\n\n", ResponseKind.ANSWER),
        (b"event: message_start\ndata: {}\n\n", ResponseKind.NOTHING),
        (b"event: message_start\ndata: {}\n\nevent: ping\ndata: {}\n\n", ResponseKind.ANSWER),
    ],
)
def test_a_body_tells_by_what_is_in_it(body: bytes, told: ResponseKind) -> None:
    assert http_response_kind({"type": "http.response.body", "body": body}) is told


def test_a_head_tells_only_that_the_server_fails() -> None:
    heads = {
        status: {"type": "http.response.start", "status": status} for status in (200, 404, 503)
    }
    assert {status: http_response_kind(head) for status, head in heads.items()} == {
        200: ResponseKind.NOTHING,
        404: ResponseKind.NOTHING,
        503: ResponseKind.FAILURE,
    }
    assert first_response_kind(map(http_response_kind, heads.values())) is ResponseKind.FAILURE


def test_statuses_tell_whose_fault_it_is() -> None:
    assert grpc_response_kind(b"") is ResponseKind.ANSWER
    assert grpc_response_kind(b"\xff") is ResponseKind.ANSWER, "no message of Generate's"
    assert grpc_response_kind(Status("UNAVAILABLE", "")) is ResponseKind.FAILURE
    assert grpc_response_kind(Status("INVALID_ARGUMENT", "")) is ResponseKind.ANSWER


def test_that_targets_are_given_up_is_no_part_of_a_message_s_answer() -> None:
    told = pb.GenerateResponse(request_id="a", index=1, expected_missed=True)
    assert grpc_response_kind(told.SerializeToString()) is ResponseKind.NOTHING
    for answer in ({"text": "a"}, {"token_ids": [5]}, {"finish": pb.Finish()}):
        more = pb.GenerateResponse(request_id="a", expected_missed=True, **answer)
        assert grpc_response_kind(more.SerializeToString()) is ResponseKind.ANSWER
    info = pb.GetServerInfoResponse(version="1", model="m", num_params=1, policy="p")
    assert grpc_response_kind(info.SerializeToString()) is ResponseKind.ANSWER
