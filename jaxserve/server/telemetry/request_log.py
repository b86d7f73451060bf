"""One log line per call, once the engine has finished its requests: who asked, for what, how long
it took, and whether its targets were met. docs/operations.md lists the fields."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.engine.output import Timings
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.server.requests.call_outcome import CallOutcome, CallRecord

log = logging.getLogger("jaxserve.calls")

_QUOTES = (
    CallOutcome.INVALID,
    CallOutcome.MALFORMED,
    CallOutcome.DUPLICATE,
    CallOutcome.REFUSED,
    CallOutcome.FAILED,
)
"""Outcomes whose reasons may quote the client."""
_PLAIN = re.compile(r"[\w.:/@+%,\[\]-]+", re.ASCII)


class Fields(dict[str, Any]):
    """The fields of a line by name; the formatter makes JSON of them, and `str` makes text."""

    def __str__(self) -> str:
        words = (f"{name}={_text(value)}" for name, value in self.items() if name != "message")
        return " ".join([self["message"], *words])


class RequestLog:
    """A sink of `CallTracker` on the event loop, so handlers of the log must not block.

    Args:
        decode: makes text of token ids; "" if the model has no tokenizer.
        prompts: whether lines also have prompts, texts and reasons that quote the client.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, prompts: bool = False) -> None:
        self._decode, self._prompts = decode, prompts
        log.setLevel(logging.INFO)  # whatever the root's level

    def __call__(self, record: CallRecord) -> None:
        """Writes the line."""
        line = log_fields(record)
        if self._prompts and record.reason:
            line["reason"] = record.reason
        if self._prompts and record.requests:
            prompts = [
                self._decode(request.prompt) or request.prompt for request in record.requests
            ]
            line["prompt"] = _only(prompts)
            line["text"] = _only(["".join(pieces) for pieces in record.texts.values()])
        log.info(line)


def log_fields(record: CallRecord) -> Fields:
    """The fields of a call, in its log line and its span. With several continuations, the times are
    those of the longest."""
    fields = Fields(
        message="call ended",
        door=record.source,
        method=record.method,
        request_id=record.request_id,
        x_request_id=record.x_request_id,
        peer=record.peer,
        key=record.caller.name,
        batch=record.batch,
        line=record.line,
        ending=record.outcome,
        reason="" if record.outcome in _QUOTES else record.reason,
    )
    fields.update(_asked(record))
    fields.update(_got(record))
    fields.update(open_ms=_ms(record.ended - record.began), trace_id=record.trace_id)
    return Fields((name, value) for name, value in fields.items() if value not in (None, "", []))


def _asked(record: CallRecord) -> Iterator[tuple[str, Any]]:
    if not record.requests:
        return
    first = record.requests[0]
    continuations = sum(request.sampling.n for request in record.requests)
    yield "adapter", first.adapter
    yield "tier", first.tier.name.lower()
    yield "slo_class", first.slo_class
    yield "program", None if first.program is None else first.program.id
    yield "continuations", continuations if continuations > 1 else None
    yield "prompt_tokens", record.prompt_tokens
    yield "output_tokens", record.output_tokens
    targets = first.slo.with_max_tbt()
    for name in ALL_TARGETS:
        yield f"slo_{name}_ms", _ms(getattr(targets, name))


def _got(record: CallRecord) -> Iterator[tuple[str, Any]]:
    usages = [last.usage for last in record.last if last.usage is not None]
    if usages:
        yield "cached_tokens", record.cached_tokens
        yield "preemptions", sum(usage.preemptions for usage in usages)
        for name, drafted in zip(("accepted", "rejected"), record.drafted_tokens, strict=True):
            yield f"{name}_draft_tokens", drafted or None
    reasons = dict.fromkeys(str(last.finish_reason) for last in record.last)
    yield "finish_reason", ",".join(sorted(reasons))
    longest = record.longest
    if longest is not None and longest.timings is not None:
        written = longest.usage is not None and longest.usage.output_tokens > 0
        yield from _times(longest.timings, written=written)
    verdicts = [last.verdict for last in record.last if last.verdict is not None]
    if verdicts:
        missed = [name for name in ALL_TARGETS if any(getattr(v, name) is False for v in verdicts)]
        yield "slo_met", not missed
        yield "slo_missed", ",".join(missed)
    yield "slo_given_up", record.given_up or None


def _times(timings: Timings, *, written: bool) -> Iterator[tuple[str, Any]]:
    """written: whether it has reached its first token."""
    yield "preprocess_ms", _ms(timings.preprocess)
    yield "queue_ms", _ms(timings.queue)
    yield "ttft_ms", _ms(timings.ttft) if written else None
    yield "tbt_mean_ms", _ms(timings.tbt_mean)
    yield "tbt_p99_ms", _ms(timings.tbt)
    yield "tbt_max_ms", _ms(timings.tbt_max)
    yield "jct_ms", _ms(timings.total)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _only(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _text(value: Any) -> str:
    """The value as a single word, whatever a client has put into it."""
    if isinstance(value, bool):
        return str(value).lower()
    plain = str(value)
    if not isinstance(value, (str, int, float)) or not _PLAIN.fullmatch(plain):
        return json.dumps(value)
    return plain
