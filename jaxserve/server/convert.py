"""Between protobuf messages and the engine's own types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve import __version__
from jaxserve.engine.output import FinishReason, Timings, TokenLogprobs, Usage
from jaxserve.engine.stats import EngineInfo
from jaxserve.sched.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SLO,
    InvalidRequest,
    Tier,
    at_most_entries,
)
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.streams import Delta

MAX_REQUEST_ID = 128
_LISTS = {
    "logit_bias": MAX_LOGIT_BIAS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "stop": MAX_STOP_STRINGS,
}

TIERS = {
    pb.TIER_UNSPECIFIED: Tier.REALTIME,
    pb.TIER_REALTIME: Tier.REALTIME,
    pb.TIER_BEST_EFFORT: Tier.BEST_EFFORT,
}
REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def check_message(message: pb.GenerateRequest) -> None:
    """Raises InvalidRequest for what protobuf itself lets through: unknown fields and enum values,
    an overlong request_id."""
    no_unknown_fields("request", message)
    if message.tier not in TIERS:
        known = ", ".join(pb.Tier.keys())
        raise InvalidRequest("tier", f"unknown value {message.tier}; known values are {known}")
    at_most("request_id", message.request_id, MAX_REQUEST_ID)


def prompt(message: Any) -> str | Sequence[int]:
    """Of a message with `text` and `token_ids` in a oneof `prompt`; ids are not copied yet, for
    there may be too many. Raises InvalidRequest without a prompt, or for an empty one."""
    which = message.WhichOneof("prompt")
    if which is None:
        raise InvalidRequest("prompt", "is missing; set text or token_ids")
    if which == "text":
        if not message.text:
            raise InvalidRequest("prompt", "text is empty; at least 1 character is needed")
        return str(message.text)
    if not message.token_ids.ids:
        raise InvalidRequest("prompt", "token_ids is empty; at least 1 token is needed")
    ids: Sequence[int] = message.token_ids.ids
    return ids


def sampling_fields(message: pb.SamplingParams) -> dict[str, Any]:
    """Those of the request's sampling parameters that are set, by SamplingParams' names. Raises
    InvalidRequest for a list that is too long to look at."""
    fields: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name in _LISTS:
            at_most_entries(descriptor.name, len(value), _LISTS[descriptor.name])
        if descriptor.name == "logit_bias":
            fields[descriptor.name] = tuple(sorted(value.items()))
        elif isinstance(value, (bool, int, float)):
            fields[descriptor.name] = value
        else:
            fields[descriptor.name] = tuple(value)
    return fields


def slo(message: pb.Slo) -> SLO:
    """The request's targets: milliseconds on the wire, seconds inside. Raises InvalidRequest,
    naming the target, for a time that is not positive and finite."""
    seconds = {}
    for descriptor, value in message.ListFields():
        if not (math.isfinite(value) and value > 0):
            problem = f"must be a positive time in milliseconds, got {value}"
            raise InvalidRequest(f"slo.{descriptor.name}", problem)
        seconds[descriptor.name.removesuffix("_ms")] = value / 1000
    return SLO(**seconds)


def response(request_id: str, delta: Delta) -> pb.GenerateResponse:
    """One message from all that one continuation has to say."""
    message = pb.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        token_ids=delta.token_ids,
        text="".join(delta.text),
        logprobs=[logprobs(entry) for entry in delta.logprobs],
    )
    last = delta.last
    if last is not None and last.finish_reason is not None:
        message.finish.CopyFrom(finish(last.finish_reason, last.usage, last.timings))
    return message


def finish(reason: FinishReason, usage: Usage | None, timings: Timings | None) -> pb.Finish:
    """How a continuation ended."""
    message = pb.Finish(reason=REASONS[reason])
    if usage is not None:
        message.usage.prompt_tokens = usage.prompt_tokens
        message.usage.output_tokens = usage.output_tokens
        message.usage.preemptions = usage.preemptions
    if timings is not None:
        message.timings.queue_ms = timings.queue * 1000
        message.timings.ttft_ms = timings.ttft * 1000
        message.timings.total_ms = timings.total * 1000
    return message


def server_info(info: EngineInfo) -> pb.GetServerInfoResponse:
    """Every field of `EngineInfo` under its own name, and the version."""
    return pb.GetServerInfoResponse(version=__version__, **asdict(info))


def logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    """Of one token."""
    top = [pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)


def at_most(name: str, text: str, limit: int) -> None:
    """Raises InvalidRequest for more than `limit` characters."""
    if len(text) > limit:
        raise InvalidRequest(name, f"has {len(text)} characters; at most {limit} are allowed")


def no_unknown_fields(name: str, message: Message) -> None:
    """A field that a newer client sends would be dropped silently, so it is refused: raises
    InvalidRequest."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(name, f"field number {number} is unknown to this server")
    for descriptor, value in message.ListFields():
        if isinstance(value, Message):
            no_unknown_fields(descriptor.name, value)
