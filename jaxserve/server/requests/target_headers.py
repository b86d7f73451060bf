"""Targets in the headers or gRPC metadata of calls and answers, by the names that gateways use.

`x-slo-ttft-ms` and `x-slo-tpot-ms` are the names of the Gateway API's Inference Extension; llm-d's
own names for the same override them, as in its router. Answers use the names without `llm-d`. A
call's program may be named there, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

from jaxserve.sched.request import SLO, InvalidRequest, Program
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.milliseconds import timings_ms

TARGET_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "x-slo-ttft-ms",
        "tbt": "x-slo-tpot-ms",
        "jct": "x-slo-jct-ms",
        "max_tbt": "x-slo-max-tbt-ms",
    }
)
"""The headers of a target, by the field of `SLO`."""
_LLM_D = {"ttft": "x-llm-d-slo-ttft-ms", "tbt": "x-llm-d-slo-tpot-ms"}
_CLASS, _TIER, _MET, _TIMING = "x-slo-class", "x-slo-tier", "x-slo-met", "server-timing"
_UNENFORCED, _MAX_UNENFORCED = "x-schema-not-enforced", 1000
_MOVED = "x-jaxserve-moved"
ANSWER_HEADERS = (*TARGET_HEADERS.values(), _CLASS, _TIER, _MET, _TIMING, _UNENFORCED, _MOVED)
_TARGETS = {*TARGET_HEADERS.values(), *_LLM_D.values()}
_PROGRAM, DEADLINE_HEADER = "x-program-id", "x-program-deadline-ms"
_NAMES = {*_TARGETS, _PROGRAM, DEADLINE_HEADER}
MAX_MS = 1_000_000_000
"""Longest time that a header, or a program, has: 11 days."""
_NUMBER = re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?")

Headers = Sequence[tuple[str, str]]


class HeaderTargets(NamedTuple):
    """The targets in headers. names: the header that set each target, by the field of `SLO`."""

    slo: SLO
    names: Mapping[str, str]


def target_headers(headers: Iterable[tuple[str | bytes, str | bytes]]) -> Headers:
    """The headers of a call that set targets or name its program, unparsed, with names in lower
    case."""
    pairs = ((_text(name), value) for name, value in headers)
    return [(name, _text(value)) for name, value in pairs if name in _NAMES]


def header_targets(headers: Headers) -> HeaderTargets:
    """Parses the targets. Raises InvalidRequest, which names the header, for a header that occurs
    twice or is not a time."""
    given = _once(headers)
    targets = {name: _seconds(name, value) for name, value in given.items() if name in _TARGETS}
    names = {
        target: name
        for wins in (TARGET_HEADERS, _LLM_D)
        for target, name in wins.items()
        if name in targets
    }
    return HeaderTargets(SLO(**{target: targets[n] for target, n in names.items()}), names)


def header_program(headers: Headers) -> Program | None:
    """The program that headers name, with its deadline; None if they name none. Raises
    InvalidRequest, which names the header."""
    given = _once(headers)
    time = given.get(DEADLINE_HEADER)
    deadline = None if time is None else _seconds(DEADLINE_HEADER, time)
    if _PROGRAM not in given:
        if deadline is not None:
            raise InvalidRequest(DEADLINE_HEADER, f"is of a program: {_PROGRAM} has to name it")
        return None
    try:
        return Program(given[_PROGRAM], deadline)
    except InvalidRequest as error:
        raise error.renamed(_PROGRAM) from None


def _once(headers: Headers) -> dict[str, str]:
    """The headers by name. Raises InvalidRequest for one that occurs twice."""
    given: dict[str, str] = {}
    for name, value in headers:
        if name in given:
            raise InvalidRequest(name, "is there twice; at most one is taken")
        given[name] = value
    return given


def _seconds(name: str, value: str) -> float:
    """The time in a header. Raises InvalidRequest."""
    if not (_NUMBER.fullmatch(value) and 0 < float(value) <= MAX_MS):
        limits = f"a number of milliseconds, above 0 and at most {MAX_MS:,}"
        raise InvalidRequest(name, f"must be {limits}, got {value!r:.80}")
    return float(value) / 1000


def answer_headers(record: CallRecord, *, ended: bool) -> Iterator[tuple[str, str]]:
    """The answer's headers about its requests' targets: which were in force, and at the end which
    were met. Also the schema's keywords that the text is not held to, and how often the call moved
    to another replica. Empty for a call without requests.

    Args:
        record: the call's record.
        ended: whether all its continuations have ended.
    """
    if not record.requests:
        return
    first = record.requests[0]  # all requests have the same targets
    yield _CLASS, first.slo_class
    yield _TIER, first.tier.name.lower()
    slo = first.slo.with_max_tbt()
    for target, name in TARGET_HEADERS.items():
        if (seconds := getattr(slo, target)) is not None:
            yield name, f"{1000 * seconds:.15g}"
    if record.unenforced:
        # Places may have any length, and there may be thousands.
        few = record.unenforced[:_MAX_UNENFORCED]
        places = [quote(place[:_MAX_UNENFORCED], safe="$") for place in few]
        yield _UNENFORCED, ", ".join(places)[:_MAX_UNENFORCED]
    if record.passage is not None and (moved := len(record.passage.point.moved)):
        yield _MOVED, str(moved)
    if not ended:
        return
    verdicts = [last.verdict for last in record.last if last.verdict is not None]
    if verdicts:
        yield _MET, str(all(verdict.met for verdict in verdicts)).lower()
    longest = record.longest
    if longest is not None and longest.timings is not None:  # https://www.w3.org/TR/server-timing
        times = timings_ms(longest.timings).items()
        timings = [f"{n.removesuffix('_ms')};dur={t:.3f}" for n, t in times if t is not None]
        yield _TIMING, ", ".join(timings)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
