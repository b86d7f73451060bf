"""The common part of responses to completions and to chats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic_core import to_json

from jaxserve.engine.output import Output
from jaxserve.sched.request import Request
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai.multi_prompt import Generating, unless_gone
from jaxserve.server.http.openai.request_options import SERVED_AS
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import Generation
from jaxserve.server.http.openai.sse import EventStream, chunk_events
from jaxserve.server.requests.milliseconds import timings_ms, verdict_fields
from jaxserve.server.requests.output_streams import Delta

GIVEN_UP = {"expected": "missed"}
"""Sent in a stream when its targets are given up; the end of the stream says whether they were
met."""
INLINE_BYTES = 64 << 10
"""Longer answers are encoded off the event loop."""


class LogprobLists:
    """Log-probabilities of one continuation for a response that is sent whole: lists by name, kept
    as JSON. A request may ask for millions of values, which would take a gigabyte as objects, and
    long to encode at once. fields: the other fields of the object."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._lists: dict[str, list[bytes]] = {}
        self.bytes = 0

    def add(self, entries: Mapping[str, Any]) -> None:
        """Appends to the lists, by name."""
        for name in (key for key in entries if key not in self._fields):
            piece = to_json(entries[name], inf_nan_mode="null")[1:-1]
            self._lists.setdefault(name, []).extend([piece] if piece else [])
            self.bytes += len(piece)

    def json(self) -> bytes:
        """The object as JSON."""
        lists = {name: b"[%s]" % b",".join(items) for name, items in self._lists.items()}
        return with_raw(to_json(self._fields), lists)


class Answer(ABC):
    """The response to one call: its continuations, by number. Creating it submits the requests.

    Args:
        context: what the routes need.
        body: the call's body.
        wanted: the call's requests, one per prompt, all with the same n.
        http: the call.

    Attributes:
        kind: the `object` field of a whole response.
        chunk_kind: the `object` field of a chunk of a stream.
        prefix: prefix of the response's id.
        inline_bytes: longer answers are encoded off the event loop.
    """

    inline_bytes = INLINE_BYTES
    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self, context: RouteContext, body: Generation, wanted: Sequence[Request], http: HttpRequest
    ) -> None:
        self._requests, self._http = context.requests, http
        self._model = wanted[0].adapter or context.model
        self._fingerprint = context.requests.info().system_fingerprint
        self._streams, self._options = bool(body.stream), body.stream_options
        self._n = wanted[0].sampling.n
        self._output_tokens = 0
        self._generating = Generating(context.requests, wanted, record_of(http))

    @abstractmethod
    def lists(self) -> LogprobLists | None:
        """Collects the log-probabilities of a continuation; None if they are not asked for."""

    @abstractmethod
    def news(self, number: int, delta: Delta) -> tuple[str, Any, dict[str, Any]]:
        """What a delta adds to a continuation: text, log-probabilities, and the fields that say how
        it ended."""

    @abstractmethod
    def whole_fields(self, text: str, ended: dict[str, Any]) -> dict[str, Any]:
        """All fields of a continuation except its number. ended: the fields that say how it
        ended."""

    @abstractmethod
    def chunk_fields(
        self, number: int, text: str, logprobs: Any, ended: dict[str, Any]
    ) -> dict[str, Any]:
        """All fields of a continuation in a chunk of a stream.

        Args:
            number: the continuation's number.
            text: its next piece.
            logprobs: log-probabilities as `news` makes them.
            ended: the fields that say how it ended; empty while it goes on.
        """

    async def response(self) -> Response:
        """The whole response, or a stream of events."""
        generating = self._generating
        if self._streams:
            events = chunk_events(self._chunks(), generating.record)
            return EventStream(events, generating.end)
        try:
            return await unless_gone(self._http, self._whole())
        finally:
            generating.end()

    async def _whole(self) -> Response:
        numbers = range(self._n * len(self._generating.wanted))
        ends: list[dict[str, Any]] = [{} for _ in numbers]
        texts: list[list[str]] = [[] for _ in numbers]
        lists = [self.lists() for _ in numbers]
        async for number, delta in self._generating.deltas():
            text, logprobs, ended = self.news(number, delta)
            texts[number].append(text)
            ends[number] |= ended
            if (entry := lists[number]) is not None:
                entry.add(logprobs)
        whole = ["".join(pieces) for pieces in texts]
        fields = {**self._head(self.kind), "usage": self._usage()}

        def made() -> bytes:
            choices = [
                with_raw(
                    to_json({"index": number, **self.whole_fields(text, ends[number])}),
                    {"logprobs": b"null" if entry is None else entry.json()},
                )
                for number, (text, entry) in enumerate(zip(whole, lists, strict=True))
            ]
            return with_raw(to_json(fields), {"choices": b"[%s]" % b",".join(choices)})

        size = sum(map(len, whole)) + sum(entry.bytes for entry in lists if entry is not None)
        if size <= self.inline_bytes:
            body = made()
        else:
            tenant = self._generating.record.caller.name
            body = await self._requests.run_beside(tenant, made)
        return Response(body, media_type="application/json")

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """One chunk for each delta."""
        head, options = self._head(self.chunk_kind), self._options
        for choice in self.beginnings():
            yield self._chunk(head, choice)
        async for number, delta in self._generating.deltas():
            text, logprobs, ended = self.news(number, delta)
            piece = self.chunk_fields(number, text, logprobs, ended)
            if delta.expected_missed and "slo" not in piece:
                piece["slo"] = GIVEN_UP
            # Empty: the text is held back, since it may be a stop string or half a character.
            has_news = (
                ended or logprobs or piece.get("slo") or piece.get("text") or piece.get("delta")
            )
            if has_news or (options is not None and options.continuous_usage_stats):
                yield self._chunk(head, {"index": number, **piece})
        if options is not None and options.include_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def beginnings(self) -> Iterable[dict[str, Any]]:
        """The choices that a stream begins with."""
        return ()

    def _chunk(self, head: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        chunk = {**head, "choices": [choice]}
        if self._options is not None and self._options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._options is not None and self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self._generating.record.request_id}",
            "object": kind,
            "created": self._generating.record.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "service_tier": SERVED_AS[self._generating.wanted[0].tier],
        }

    def _usage(self) -> dict[str, Any]:
        record = self._generating.record
        accepted, rejected = record.drafted_tokens
        return usage_fields(
            prompt_tokens=record.prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=record.cached_tokens,
            accepted=accepted,
            rejected=rejected,
            reasoning=self.reasoning_tokens(),
        )

    def reasoning_tokens(self) -> int:
        """Number of output tokens so far that were thought."""
        return 0


def usage_fields(
    prompt_tokens: int,
    output_tokens: int,
    cached_tokens: int,
    accepted: int,
    rejected: int,
    reasoning: int = 0,
) -> dict[str, Any]:
    """The usage object.

    Args:
        prompt_tokens: tokens of all prompts.
        output_tokens: tokens of all outputs.
        cached_tokens: prompt tokens that were cache hits.
        accepted: output tokens that had been drafted, by any drafter.
        rejected: drafted tokens that were wrong.
        reasoning: output tokens that were thought.
    """
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    details = {
        "reasoning_tokens": reasoning,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }
    return {
        **usage,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": details,
    }


def with_raw(json: bytes, raw: Mapping[str, bytes]) -> bytes:
    """The object as JSON with further fields, which are JSON already."""
    more = [b'"%s":%s' % (name.encode(), value) for name, value in raw.items()]
    return b"{%s}" % b",".join([*filter(None, [json[1:-1]]), *more])


def finish_fields(last: Output) -> dict[str, Any]:
    """The extra fields of a continuation's last piece: why it ended, its times, how often it went
    on at another replica if it did, and whether its targets were met."""
    assert last.finish_reason is not None
    fields: dict[str, Any] = {"finish_reason": str(last.finish_reason)}
    if last.timings is not None:
        fields["timings"] = timings_ms(last.timings)
        if last.timings.moved:
            fields["moved"] = len(last.timings.moved)
    return {**fields, **slo_fields(last)}


def slo_fields(last: Output) -> dict[str, Any]:
    """The fields that say whether its targets were met; none if it has no targets."""
    if (verdict := last.verdict) is None:
        return {}
    about = {"class": verdict.slo_class, "tier": verdict.tier.name.lower()}
    return {"slo": {**about, **verdict_fields(verdict)}}
