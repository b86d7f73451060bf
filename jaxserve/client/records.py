"""Completions as JSON for files of answers, and verdicts on their targets, also as a line of
text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from jaxserve.client.client import Completion, Embedding
from jaxserve.server.proto import generation_pb2 as pb

TARGETS = tuple(pb.Slo.DESCRIPTOR.fields_by_name)  # ttft_ms, tbt_ms, jct_ms, max_tbt_ms
_LABELS = {name: name.removesuffix("_ms").upper() for name in TARGETS} | {
    "max_tbt_ms": "longest TBT"
}
EXPECTED_MISSED = "slo: the targets are expected to be missed"
_LIMITS = {
    "TTFT_UNREACHABLE": "ttft_ms {} is less than the {} that the prompt takes alone",
    "TBT_UNREACHABLE": "tbt_ms {} is less than the {} that a step takes alone",
    "MAX_TBT_UNREACHABLE": "max_tbt_ms {} is less than the {} that a step takes alone",
    "JCT_UNREACHABLE": "jct_ms {} is less than the {} that the request takes alone at least",
    "JCT_BEFORE_TTFT": "jct_ms {} is less than ttft_ms, {}",
}


def completion_records(completions: Sequence[Completion]) -> dict[str, Any]:
    """`{"completions": [...]}`, one entry each."""
    return {"completions": [_record(completion) for completion in completions]}


def embedding_record(found: Embedding) -> dict[str, Any]:
    """The record of a text's vector."""
    return {
        "embedding": found.embedding,
        "usage": _fields(found.usage),
        "timings": _fields(found.timings),
        "slo": None if found.slo is None else verdict_record(found.slo),
    }


def error_record(code: str, message: str) -> dict[str, Any]:
    """The record of a failed prompt."""
    return {"error": {"code": code, "message": message}}


def _record(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion.logprobs),
        "prompt_logprobs": _logprobs(completion.prompt_logprobs),
        "usage": _fields(completion.usage),
        "timings": _fields(completion.timings),
        "slo": None if completion.slo is None else verdict_record(completion.slo),
    }


def _logprobs(entries: Sequence[pb.TokenLogprobs]) -> list[dict[str, Any]]:
    tops = ([[top.token_id, top.logprob] for top in entry.top] for entry in entries)
    return [{**_fields(e), "top": top} for e, top in zip(entries, tops, strict=True)]


def verdict_record(verdict: pb.SloVerdict) -> dict[str, Any]:
    """The verdict in milliseconds, with only the targets that are set."""
    asked = [name for name in TARGETS if verdict.targets.HasField(name)]
    return {
        "class": verdict.slo_class,
        "tier": pb.Tier.Name(verdict.tier).removeprefix("TIER_").lower(),
        "targets": {name: getattr(verdict.targets, name) for name in asked},
        "targets_met": {name: _met(verdict, name) for name in asked},
        "met": verdict.met,
        "problems": [
            {**_fields(problem), "kind": _kind(problem).lower()} for problem in verdict.problems
        ],
    }


def verdict_line(verdict: pb.SloVerdict, timings: pb.Timings) -> str:
    """A line such as `interactive met: TTFT 31 of 1000 ms, TBT 4 of 187.5 ms`, followed by the
    problems with the targets."""
    got = {**_fields(timings), "jct_ms": timings.total_ms}
    parts = []
    for name in TARGETS:
        if not verdict.targets.HasField(name):
            continue
        label, took = _LABELS[name], got[name]
        had = "none" if took is None else _number(took)
        missed = "" if _met(verdict, name) else ", missed"
        parts.append(f"{label} {had} of {_number(getattr(verdict.targets, name))} ms{missed}")
    notes = [
        "note: "
        + _LIMITS[_kind(problem)].format(_number(problem.target_ms), _number(problem.limit_ms))
        for problem in verdict.problems
        if _kind(problem) in _LIMITS  # a newer server may know others
    ]
    met = "met" if verdict.met else "missed"
    return "; ".join([f"slo {verdict.slo_class} {met}: {', '.join(parts)}", *notes])


def json_verdict_line(slo: Mapping[str, Any], timings: Mapping[str, Any]) -> str:
    """`verdict_line` of the JSON at the end of an HTTP answer."""

    def read(fields: Mapping[str, Any], into: Message) -> Any:
        return ParseDict(dict(fields), into, ignore_unknown_fields=True)  # a newer server's

    problems = slo.get("problems", ())
    known = {f"SLO_PROBLEM_KIND_{p['kind'].upper()}": p for p in problems}
    verdict = pb.SloVerdict(
        slo_class=slo["class"],
        targets=read(slo["targets"], pb.Slo()),
        targets_met=read(slo["targets_met"], pb.TargetsMet()),
        met=slo["met"],
        problems=[
            pb.SloProblem(kind=kind, target_ms=p["target_ms"], limit_ms=p["limit_ms"])
            for kind, p in known.items()
            if kind in pb.SloProblemKind.keys()  # noqa: SIM118
        ],
    )
    return verdict_line(verdict, read(timings, pb.Timings()))


def _fields(message: Message) -> dict[str, Any]:
    """The fields of a message by name; None for an absent field."""
    return {
        field.name: getattr(message, field.name)
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
    }


def _kind(problem: pb.SloProblem) -> str:
    """The enum's name of a kind, or its number if the enum does not have it."""
    known = pb.SloProblemKind.values()
    if problem.kind not in known:
        return str(problem.kind)
    return pb.SloProblemKind.Name(problem.kind).removeprefix("SLO_PROBLEM_KIND_")


def _met(verdict: pb.SloVerdict, target: str) -> bool:
    """Whether a target was met. Servers of the last release send this in older fields."""
    if verdict.HasField("targets_met"):
        return bool(getattr(verdict.targets_met, target))
    return bool(getattr(verdict, f"{target.removesuffix('_ms')}_met"))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
