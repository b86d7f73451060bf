"""Between protobuf messages and the engine's own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve import __version__
from jaxserve.engine.output import COMPLETE, FinishReason, Timings, TokenLogprobs, Usage
from jaxserve.engine.stats import EngineInfo
from jaxserve.sched.cost.reachability import SloProblemKind
from jaxserve.sched.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SLO,
    Grammar,
    InvalidRequest,
    PoolingType,
    Program,
    Tier,
    at_most_entries,
)
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.sched.slo.verdict import Verdict
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.proto import batches_pb2
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.engine_requests import MAX_CACHE_KEY, RequestFields
from jaxserve.server.requests.milliseconds import targets_ms, timings_ms, verdict_fields
from jaxserve.server.requests.output_streams import Delta
from jaxserve.server.requests.slo_classes import (
    ServiceLevel,
    check_deadline,
    own_targets,
    said_program,
)

_MANY_BYTES = 4096
_PROGRAM = ("program.id", "program.deadline_ms", "program.expected_calls", "program.over")
_LISTS = {
    "logit_bias": MAX_LOGIT_BIAS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "stop": MAX_STOP_STRINGS,
}

_TIER_VALUES = {tier: pb.Tier.Value(f"TIER_{tier.name}") for tier in Tier}
T = TypeVar("T")
_POOLING_VALUES = {kind: pb.PoolingType.Value(f"POOLING_TYPE_{kind.name}") for kind in PoolingType}
POOLING_TYPES = {
    pb.POOLING_TYPE_UNSPECIFIED: None,
    **{value: kind for kind, value in _POOLING_VALUES.items()},
}
TIERS = {pb.TIER_UNSPECIFIED: None, **{value: tier for tier, value in _TIER_VALUES.items()}}
REASONS = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    for reason in (*COMPLETE, FinishReason.CANCELLED)
}
PROBLEMS = {
    kind: pb.SloProblemKind.Value(f"SLO_PROBLEM_KIND_{kind.name}") for kind in SloProblemKind
}


def fields_from_message(message: pb.GenerateRequest, caller: Caller) -> RequestFields:
    """The fields in a message. Raises InvalidRequest, also for things that protobuf accepts, such
    as unknown fields and enum values."""
    check_unknown_fields("request", message)
    cache_key_of(message)
    prompt, sampling = prompt_from_message(message), sampling_from_message(message.sampling)
    program, key = program_from_message(message), message.prompt_cache_key
    check_deadline(program, caller, _PROGRAM[1])
    return RequestFields(
        prompt,
        sampling,
        **shared_fields(message, caller),
        prediction=message.prediction,
        program=program,
        continues=(("key", key),) if key else (),
    )


def program_from_message(message: pb.GenerateRequest) -> Program | None:
    """What a message says of its program; None if it says nothing. Raises InvalidRequest."""
    if not message.HasField("program"):
        return None
    said = message.program
    return said_program(
        said.id,
        said.deadline_ms if said.HasField("deadline_ms") else None,
        said.expected_calls if said.HasField("expected_calls") else None,
        said.over,
        _PROGRAM,
    )


def shared_fields(
    message: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest, caller: Caller
) -> dict[str, Any]:
    """The fields of `RequestFields` that all messages have. Raises InvalidRequest."""
    return {
        "request_id": message.request_id,
        "slo": slo_from_message(message.slo),
        "tier": known_value("tier", message.tier, TIERS, pb.Tier),
        "slo_class": message.slo_class,
        "serve_late": message.serve_late,
        "cache_salt": message.cache_salt,
        "caller": caller,
        "model": message.model,
    }


def known_value(name: str, value: int, values: Mapping[int, T], kind: Any) -> T:
    """What a value of an enum stands for.

    Args:
        name: the field's name.
        value: its value.
        values: the known values.
        kind: the enum.

    Raises:
        InvalidRequest: If the value is not known.
    """
    if value not in values:
        known = ", ".join(kind.keys())
        raise InvalidRequest(name, f"unknown value {value}; known values are {known}")
    return values[value]


def prompt_from_message(message: Any, name: str = "prompt") -> str | Sequence[int]:
    """The prompt of a message with `text` and `token_ids` in a oneof `prompt`. Ids are not copied
    yet, since there may be too many. Raises InvalidRequest for the field `name` if there is no
    prompt."""
    which = message.WhichOneof("prompt")
    if which is None:
        raise InvalidRequest(name, "is required")
    if which == "text":
        return str(message.text)
    ids: Sequence[int] = message.token_ids.ids
    return ids


def sampling_from_message(message: pb.SamplingParams) -> dict[str, Any]:
    """The request's sampling parameters that are set, by the names in SamplingParams. Raises
    InvalidRequest for a list that is too long to check."""
    fields: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name in _LISTS:
            at_most_entries(descriptor.name, len(value), _LISTS[descriptor.name])
        if descriptor.name == "logit_bias":
            fields[descriptor.name] = tuple(sorted(value.items()))
        elif descriptor.name == "grammar":
            fields[descriptor.name] = _grammar(value)
        elif isinstance(value, (bool, int, float)):
            fields[descriptor.name] = value
        else:
            fields[descriptor.name] = tuple(value)
    return fields


def _grammar(message: pb.Grammar) -> Grammar:
    match message.WhichOneof("kind"):
        case "json_schema":
            return Grammar.json_schema(message.json_schema)
        case "regex":
            return Grammar.regex(message.regex)
        case "choice":
            return Grammar.choice(message.choice.texts)
        case "json_object":
            return Grammar.json_object()
    raise InvalidRequest("grammar", "is empty; set json_schema, regex, choice or json_object")


def slo_from_message(message: pb.Slo) -> SLO:
    """The request's own targets. Raises InvalidRequest."""
    return own_targets({descriptor.name: value for descriptor, value in message.ListFields()})


def response_message(request_id: str, delta: Delta) -> pb.GenerateResponse:
    """A message with all of a delta's output."""
    last, ended = delta.last, None
    if last is not None and last.finish_reason is not None:
        ended = finish_message(last.finish_reason, last.usage, last.timings, last.verdict)
    return pb.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        token_ids=delta.token_ids,
        text="".join(delta.text),
        logprobs=map(logprobs_message, delta.logprobs),
        prompt_logprobs=map(logprobs_message, delta.prompt_logprobs),
        finish=ended,
        expected_missed=delta.expected_missed,
    )


def finish_message(
    reason: FinishReason,
    usage: Usage | None,
    timings: Timings | None,
    verdict: Verdict | None = None,
) -> pb.Finish:
    """The message that ends a continuation.

    Args:
        reason: why it ended.
        usage: token counts.
        timings: in seconds; the message has milliseconds.
        verdict: which targets were met; None for a request without any.
    """
    return pb.Finish(
        reason=REASONS[reason],
        usage=None if usage is None else pb.Usage(**asdict(usage)),
        timings=None if timings is None else pb.Timings(**timings_ms(timings)),
        slo=None if verdict is None else verdict_message(verdict),
    )


def verdict_message(verdict: Verdict) -> pb.SloVerdict:
    """Which targets were met."""
    fields = verdict_fields(verdict)
    for problem in fields["problems"]:
        problem["kind"] = PROBLEMS[problem["kind"]]
    before = {f"{name}_met": getattr(verdict, name) for name in TARGETS}  # older fields
    tier = _TIER_VALUES[verdict.tier]
    return pb.SloVerdict(slo_class=verdict.slo_class, tier=tier, **fields, **before)


def server_info_message(
    info: EngineInfo, classes: Mapping[str, ServiceLevel]
) -> pb.GetServerInfoResponse:
    """Every field of `EngineInfo` under its own name, except that the fields of `pooling` are
    inlined; also the server's version and SLO classes."""
    fields = {**asdict(info), "pooling": _POOLING_VALUES[info.pooling.pooling]}
    fields["normalize"] = info.pooling.normalize
    listed = [
        pb.SloClass(
            name=name,
            targets=targets_ms(level.slo),
            tier=_TIER_VALUES[level.tier],
            program_deadline_ms=None
            if level.program_deadline is None
            else 1000 * level.program_deadline,
        )
        for name, level in classes.items()
    ]
    return pb.GetServerInfoResponse(version=__version__, **fields, slo_classes=listed)


def logprobs_message(entry: TokenLogprobs) -> pb.TokenLogprobs:
    """The message for one token's log-probabilities."""
    top = [pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)


def check_length(name: str, text: str, limit: int) -> None:
    """Raises InvalidRequest for more than `limit` characters."""
    if len(text) > limit:
        raise InvalidRequest(name, f"has {len(text)} characters; at most {limit} are allowed")


def cache_key_of(message: pb.GenerateRequest | pb.EmbedRequest | batches_pb2.BatchLine) -> str:
    """The key that routers read. Raises InvalidRequest if it is too long."""
    check_length("prompt_cache_key", message.prompt_cache_key, MAX_CACHE_KEY)
    return str(message.prompt_cache_key)


def check_unknown_fields(name: str, message: Message) -> None:
    """Raises InvalidRequest for unknown fields: without this, a newer client's field would be
    dropped silently."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    size = message.ByteSize() - known.ByteSize()
    if size > _MANY_BYTES:  # finding the first field takes as long as listing all
        raise InvalidRequest(name, f"has {size} bytes of fields that are unknown to this server")
    if size:
        _find_unknown(name, message)


def _find_unknown(name: str, message: Message) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(name, f"field number {number} is unknown to this server")
    for descriptor, value in message.ListFields():
        if isinstance(value, Message):
            _find_unknown(descriptor.name, value)
        elif descriptor.message_type is not None and not isinstance(value, Mapping):
            for item in value:
                _find_unknown(descriptor.name, item)
