"""What a part of an answer on its way tells the client."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.deploy.in_process import Status
from jaxserve.server.http.openai.sse import DONE

_EVENT = b"data: "


class Told(enum.Enum):
    """NOTHING of what was asked for: a head, or who is speaking. ANSWER: some of it, or what is
    wrong with the call. FAILURE: that the server could not serve it."""

    NOTHING = enum.auto()
    ANSWER = enum.auto()
    FAILURE = enum.auto()


def by_http(message: Mapping[str, Any]) -> Told:
    """An ASGI message of the HTTP door."""
    if message["type"] == "http.response.start":
        return Told.FAILURE if message["status"] >= 500 else Told.NOTHING
    body = message.get("body", b"")
    if not body.startswith(_EVENT) or body == DONE:
        return Told.ANSWER if body else Told.NOTHING
    return first(_of_event(event) for event in body.split(b"\n\n") if event)


def by_rpc(part: Any) -> Told:
    """A part of the gRPC door's."""
    failed = isinstance(part, Status) and part.code in ("UNAVAILABLE", "INTERNAL")
    return Told.FAILURE if failed else Told.ANSWER


def first(told: Iterable[Told]) -> Told:
    """The first thing that is told in several parts."""
    return next((each for each in told if each is not Told.NOTHING), Told.NOTHING)


def _of_event(event: bytes) -> Told:
    data = event.removeprefix(_EVENT)
    if not data.startswith(b"{"):
        return Told.ANSWER
    chunk = json.loads(data)
    if "error" in chunk:
        return Told.FAILURE
    deltas = [choice.get("delta") for choice in chunk.get("choices", ())]
    # A chat begins with it, before there is a token.
    speaks = all(delta and "role" in delta and not delta.get("content") for delta in deltas)
    return Told.NOTHING if deltas and speaks else Told.ANSWER
