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

SPEAKS = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


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
        (b"data: [DONE]\n\n", ResponseKind.ANSWER),
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
    assert grpc_response_kind(Status("UNAVAILABLE", "")) is ResponseKind.FAILURE
    assert grpc_response_kind(Status("INVALID_ARGUMENT", "")) is ResponseKind.ANSWER
