"""The answer to one call, whole or as lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from datetime import UTC, datetime
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic_core import to_json

from jaxserve.server.http.errors import as_api_error
from jaxserve.server.http.openai.answer_messages import ParsedAnswer, PreparedChat
from jaxserve.server.http.openai.choices import GIVEN_UP, INLINE_BYTES, finish_fields, with_raw
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.sse import NDJSON, EventStream
from jaxserve.server.tools.arguments import as_json
from jaxserve.server.tools.calls import Arguments, Call, CallBegin, Piece, Said, whole


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(ParsedAnswer):
    """The answer to /api/chat or /api/generate. Creating it submits the request.

    Args:
        context: what the routes need.
        prepared: the request, and how to parse its text.
        http: the call.
        chats: whether the answer is a message, and not a text.
    """

    def __init__(
        self, context: RouteContext, prepared: PreparedChat, http: HttpRequest, *, chats: bool
    ) -> None:
        self._model = prepared.wanted[0].adapter or context.model
        self._chats, self._calls = chats, 0
        self._open: Call | None = None
        super().__init__(context, prepared, http)

    def stream(self) -> Response:
        """The answer as lines."""
        return EventStream(self._stream(), self._generating.end, NDJSON)

    async def _whole(self) -> Response:
        pieces: list[Piece] = []
        async for _, delta in self._generating.deltas():
            pieces += self._pieces(delta)

        def made() -> bytes:
            return self._line(whole(pieces), **self._done())

        if self._characters <= INLINE_BYTES:
            return Response(made(), media_type="application/json")
        body = await self._requests.run_beside(self._tenant, made)
        return Response(body, media_type="application/json")

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """A line for each delta, with whole calls only. An error becomes a line, too, since the
        status has been sent."""
        told: dict[str, Any] = {}
        try:
            async for _, delta in self._generating.deltas():
                if delta.expected_missed:
                    told = {"slo": GIVEN_UP}
                said = self._said(self._pieces(delta), last=delta.last is not None)
                if said != Said():
                    yield self._line(said, done=False, **told) + b"\n"
                    told = {}
            yield self._line(Said(), **self._done()) + b"\n"
        except Exception as error:
            api_error = as_api_error(error)
            if api_error is None:
                raise
            api_error.note(self._record)
            yield to_json(api_error.shaped(self._http.scope["path"])[1]) + b"\n"

    def _said(self, pieces: Iterable[Piece], *, last: bool) -> Said:
        """The pieces put together, without the call that goes on."""
        found: list[Piece] = []
        ended: list[Call] = []
        for piece in pieces:
            if isinstance(piece, Arguments):
                assert self._open is not None
                self._open.arguments += piece.text
                continue
            if self._open is not None:
                ended.append(self._open)
            self._open = Call(piece.name) if isinstance(piece, CallBegin) else None
            if self._open is None:
                found.append(piece)
        if last and self._open is not None:
            ended.append(self._open)
        said = whole(found)
        said.calls = ended
        return said

    def _line(self, said: Said, **fields: Any) -> bytes:
        head = {"model": self._model, "created_at": now(), **fields}
        thought = {"thinking": said.reasoning} if said.reasoning else {}
        if not self._chats:
            return to_json({**head, "response": said.content, **thought})
        message = to_json({"role": "assistant", "content": said.content, **thought})
        if said.calls:
            calls = b",".join(map(self._call, said.calls))
            message = with_raw(message, {"tool_calls": b"[%s]" % calls})
        return with_raw(to_json(head), {"message": message})

    def _call(self, call: Call) -> bytes:
        call_id, index = self._new_call_id(), self._calls
        self._calls += 1
        self._note_call(call_id, call.name)
        arguments = {"arguments": as_json(call.arguments).encode()}
        function = with_raw(to_json({"index": index, "name": call.name}), arguments)
        return with_raw(to_json({"id": call_id}), {"function": function})

    def _done(self) -> dict[str, Any]:
        """The fields of the end. Times are in nanoseconds."""
        last = self._last
        assert last is not None
        ended = finish_fields(last)
        fields = {"done": True, "done_reason": ended.pop("finish_reason")}
        if last.timings is not None:
            times = last.timings
            fields |= {
                "total_duration": _ns(times.total),
                "load_duration": 0,
                "prompt_eval_duration": _ns(times.ttft - times.queue),
                "eval_duration": _ns(times.total - times.ttft),
            }
        counts = {"prompt_eval_count": self._record.prompt_tokens}
        return {**fields, **counts, "eval_count": self._output_tokens, **ended}


def _ns(seconds: float) -> int:
    return round(1e9 * max(seconds, 0.0))
