"""The kind of each part of a response, which decides whether the call can be retried."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from jaxserve.deploy.in_process import Status
from jaxserve.server.http.openai.choices import GIVEN_UP
from jaxserve.server.http.openai.sse import DONE
from jaxserve.server.proto import generation_pb2 as pb

_EVENT = b"data: "
_BEGINNING = b"event: message_start\n"  # of /v1/messages


class ResponseKind(enum.IntEnum):
    """NOTHING: no part of the answer yet, such as headers, or that targets are given up; falsy.
    ANSWER: a part of the answer, or an error caused by the call. FAILURE: the server could not
    serve the call."""

    NOTHING = 0
    ANSWER = 1
    FAILURE = 2


def http_response_kind(message: Mapping[str, Any]) -> ResponseKind:
    """The kind of an ASGI message of the HTTP frontend."""
    if message["type"] == "http.response.start":
        return ResponseKind.FAILURE if message["status"] >= 500 else ResponseKind.NOTHING
    body = message.get("body", b"")
    if body.startswith(_BEGINNING) and body.count(b"\n\n") == 1:
        return ResponseKind.NOTHING
    if not body.startswith(_EVENT) or body == DONE:
        return ResponseKind.ANSWER if body else ResponseKind.NOTHING
    return first_response_kind(_of_event(event) for event in body.split(b"\n\n") if event)


def grpc_response_kind(part: Any) -> ResponseKind:
    """The kind of a part of the gRPC frontend's response."""
    if isinstance(part, Status):
        failed = part.code in ("UNAVAILABLE", "INTERNAL")
        return ResponseKind.FAILURE if failed else ResponseKind.ANSWER
    return ResponseKind.NOTHING if _only_given_up(part) else ResponseKind.ANSWER


def first_response_kind(told: Iterable[ResponseKind]) -> ResponseKind:
    """The first kind among several that is not NOTHING."""
    return next(filter(None, told), ResponseKind.NOTHING)


def _of_event(event: bytes) -> ResponseKind:
    data = event.removeprefix(_EVENT)
    if not data.startswith(b"{"):
        return ResponseKind.ANSWER
    chunk = json.loads(data)
    if "error" in chunk:
        return ResponseKind.FAILURE
    choices = chunk.get("choices", ())
    begins = choices and all(map(_before_text, choices))
    return ResponseKind.NOTHING if begins else ResponseKind.ANSWER


def _before_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has only what may come before the first token: the role in a chat, or that
    targets are given up."""
    delta = choice.get("delta") or {}
    if choice.get("text") or delta.get("content") or choice.get("finish_reason"):
        return False
    return "role" in delta or choice.get("slo") == GIVEN_UP


def _only_given_up(part: bytes) -> bool:
    """`_before_text` for a serialized message, which may belong to another method."""
    try:
        found = pb.GenerateResponse.FromString(part)
    except DecodeError:
        return False
    told = pb.GenerateResponse(request_id=found.request_id, index=found.index, expected_missed=True)
    return part == told.SerializeToString()
