"""What completions and chats count and say alike of what the engine tells them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response
from pydantic_core import to_json

from jaxserve.engine.output import Output, Timings
from jaxserve.sched.request import Request
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.sched.slo.verdict import Verdict
from jaxserve.server.http.openai.multi_prompt import Generating
from jaxserve.server.http.openai.request_options import SERVED_AS
from jaxserve.server.requests.engine_requests import EngineRequests

_INLINE_BYTES = 64 << 10  # longer answers become JSON beside the event loop


class UsageCount:
    """Tokens of a call, so far."""

    def __init__(self, wanted: Sequence[Request]) -> None:
        self._prompt = sum(len(request.prompt) for request in wanted)
        self._output = 0

    def add(self, tokens: int) -> None:
        """Of some continuation."""
        self._output += tokens

    def as_dict(self) -> dict[str, int]:
        """The usage object."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._output,
            "total_tokens": self._prompt + self._output,
        }


class LogprobLists:
    """Those of one continuation, for an answer that is sent whole: lists by name, as JSON. One
    request may ask for millions of values, which as objects would take a gigabyte and hold up
    whoever turns all of them into JSON at once. fields: what stands beside the lists."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._lists: dict[str, list[bytes]] = {}
        self.bytes = 0

    def add(self, found: Mapping[str, Any]) -> None:
        """What comes next of each list."""
        for name in (each for each in found if each not in self._fields):
            piece = to_json(found[name], inf_nan_mode="null")[1:-1]
            self._lists.setdefault(name, []).extend([piece] if piece else [])
            self.bytes += len(piece)

    def json(self) -> bytes:
        """The object."""
        lists = {name: b"[%s]" % b",".join(some) for name, some in self._lists.items()}
        return _with(to_json(self._fields), lists)


async def whole_answer(
    requests: EngineRequests,
    fields: Mapping[str, Any],
    choices: Sequence[tuple[Mapping[str, Any], LogprobLists | None]],
    characters: int,
) -> Response:
    """The answer of a call that asked for no stream.

    Args:
        requests: whose threads are for long ones.
        fields: of the answer, but its choices.
        choices: the fields of each but its log-probabilities, and those.
        characters: of all its texts.
    """

    def made() -> bytes:
        told = [
            _with(to_json(each), {"logprobs": b"null" if lists is None else lists.json()})
            for each, lists in choices
        ]
        return _with(to_json(fields), {"choices": b"[%s]" % b",".join(told)})

    size = characters + sum(lists.bytes for _, lists in choices if lists is not None)
    body = made() if size <= _INLINE_BYTES else await requests.run_beside(made)
    return Response(body, media_type="application/json")


def _with(json: bytes, raw: Mapping[str, bytes]) -> bytes:
    """The object with further fields, which are JSON already."""
    more = [b'"%s":%s' % (name.encode(), value) for name, value in raw.items()]
    return b"{%s}" % b",".join([*filter(None, [json[1:-1]]), *more])


def response_head(kind: str, prefix: str, model: str, generating: Generating) -> dict[str, Any]:
    """The fields that every object and chunk of a call begins with."""
    return {
        "id": f"{prefix}-{generating.record.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "service_tier": SERVED_AS[generating.wanted[0].tier],
    }


def finish_fields(last: Output) -> dict[str, Any]:
    """What the last piece of a continuation has besides: why it ended, its times, and whether its
    targets were met."""
    assert last.finish_reason is not None
    fields: dict[str, Any] = {"finish_reason": str(last.finish_reason)}
    if last.timings is not None:
        fields["timings"] = _milliseconds(last.timings)
    if last.verdict is not None:
        fields["slo"] = _verdict(last.verdict)
    return fields


def _milliseconds(timings: Timings) -> dict[str, float | None]:
    return {
        "queue_ms": timings.queue * 1000,
        "ttft_ms": timings.ttft * 1000,
        "tbt_ms": None if timings.tbt is None else timings.tbt * 1000,
        "total_ms": timings.total * 1000,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    """As gRPC's SloVerdict, and the client's lines of answers."""
    targets = {name: getattr(verdict.slo, name) for name in TARGETS}
    asked = [name for name in TARGETS if targets[name] is not None]
    return {
        "class": verdict.slo_class,
        "tier": verdict.tier.name.lower(),
        "targets": {f"{name}_ms": targets[name] * 1000 for name in asked},
        "targets_met": {f"{name}_ms": getattr(verdict, name) for name in asked},
        "met": verdict.met,
        "problems": [
            {
                "kind": str(problem.kind),
                "target_ms": problem.target * 1000,
                "limit_ms": problem.limit * 1000,
            }
            for problem in verdict.problems
        ],
    }
