"""What the parts of an answer tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.deploy.in_process import Status
from jaxserve.deploy.response_kind import Told, by_http, by_rpc, first

SPEAKS = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", Told.NOTHING),
        (b'{"choices": []}', Told.ANSWER),
        (event(SPEAKS), Told.NOTHING),
        (event(SPEAKS) + event({"choices": [{"delta": {"content": "a"}}]}), Told.ANSWER),
        (event(SPEAKS) + event({"error": {"code": "unavailable"}}), Told.FAILURE),
        (event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), Told.ANSWER),
        (event({"choices": [{"text": ""}]}), Told.ANSWER),
        (event({"choices": [], "usage": {}}), Told.ANSWER),
        (b"data: [DONE]\n\n", Told.ANSWER),
    ],
)
def test_a_body_tells_by_what_is_in_it(body: bytes, told: Told) -> None:
    assert by_http({"type": "http.response.body", "body": body}) is told


def test_a_head_tells_only_that_the_server_fails() -> None:
    heads = {
        status: {"type": "http.response.start", "status": status} for status in (200, 404, 503)
    }
    assert {status: by_http(head) for status, head in heads.items()} == {
        200: Told.NOTHING,
        404: Told.NOTHING,
        503: Told.FAILURE,
    }
    assert first(map(by_http, heads.values())) is Told.FAILURE


def test_statuses_tell_whose_fault_it_is() -> None:
    assert by_rpc(b"") is Told.ANSWER
    assert by_rpc(Status("UNAVAILABLE", "")) is Told.FAILURE
    assert by_rpc(Status("INVALID_ARGUMENT", "")) is Told.ANSWER
