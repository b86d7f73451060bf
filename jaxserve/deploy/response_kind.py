"""What kind of answer a part of a response is, which decides whether the call can be retried."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.deploy.in_process import Status
from jaxserve.server.http.openai.sse import DONE

_EVENT = b"data: "


class ResponseKind(enum.IntEnum):
    """NOTHING: no part of the answer yet, such as headers; it is falsy. ANSWER: a part of it, or an
    error of the call's own. FAILURE: the server could not serve the call."""

    NOTHING = 0
    ANSWER = 1
    FAILURE = 2


def http_response_kind(message: Mapping[str, Any]) -> ResponseKind:
    """An ASGI message of the HTTP frontend."""
    if message["type"] == "http.response.start":
        return ResponseKind.FAILURE if message["status"] >= 500 else ResponseKind.NOTHING
    body = message.get("body", b"")
    if not body.startswith(_EVENT) or body == DONE:
        return ResponseKind.ANSWER if body else ResponseKind.NOTHING
    return first_response_kind(_of_event(event) for event in body.split(b"\n\n") if event)


def grpc_response_kind(part: Any) -> ResponseKind:
    """A part of the gRPC frontend's."""
    failed = isinstance(part, Status) and part.code in ("UNAVAILABLE", "INTERNAL")
    return ResponseKind.FAILURE if failed else ResponseKind.ANSWER


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
    deltas = [choice.get("delta") for choice in chunk.get("choices", ())]
    # A chat begins with it, before there is a token.
    speaks = all(delta and "role" in delta and not delta.get("content") for delta in deltas)
    return ResponseKind.NOTHING if deltas and speaks else ResponseKind.ANSWER
