"""The answer to one call, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic_core import to_json

from jaxserve.engine.output import FinishReason
from jaxserve.server.http.errors import ApiError, as_api_error, record_of
from jaxserve.server.http.openai.answer_messages import ParsedAnswer, PreparedChat
from jaxserve.server.http.openai.choices import GIVEN_UP, INLINE_BYTES, finish_fields, with_raw
from jaxserve.server.http.openai.logprobs import chat_logprobs
from jaxserve.server.http.openai.responses.conversation import Conversation
from jaxserve.server.http.openai.responses.output_items import (
    Event,
    JsonList,
    OutputItems,
    Status,
    read_items,
)
from jaxserve.server.http.openai.responses.store import ResponseStore, StoredResponse
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.sse import EventStream
from jaxserve.server.requests.output_streams import Delta
from jaxserve.server.tools.calls import Content, Piece

_CUT = "max_output_tokens"


class ResponseAnswer(ParsedAnswer):
    """The response to one call. Creating it submits the request.

    Args:
        context: what the routes need.
        prepared: the call's request, and how to parse its text.
        conversation: the conversation that it continues.
        fields: the response's fields that repeat the call's options.
        store: keeps the finished response; None to not keep it.
        http: the call.
    """

    def __init__(
        self,
        context: RouteContext,
        prepared: PreparedChat,
        conversation: Conversation,
        fields: Mapping[str, Any],
        store: ResponseStore | None,
        http: HttpRequest,
    ) -> None:
        self._conversation, self._store = conversation, store
        self._id, self._head = str(fields["id"]), to_json(fields)
        asked = prepared.wanted[0].sampling.logprobs is not None
        self._logprobs = JsonList() if asked else None
        self._untold: list[Any] = []  # log-probabilities of tokens without text so far
        self._left_out = 0  # log-probabilities of thoughts
        if asked:  # which of them come with which text depends on how the tokens have come
            record_of(http).passage = None
        super().__init__(context, prepared, http)
        self._items = OutputItems(self._new_call_id, self._record.drawn, self._logprobs)

    def stream(self) -> Response:
        """The response as a stream of events."""
        return EventStream(self._stream(), self._generating.end)

    async def _whole(self) -> Response:
        async for _, delta in self._generating.deltas():
            for _ in self._news(delta):
                pass
        return Response(await self._finished(), media_type="application/json")

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """The events of each delta. An error becomes an event, too, since the status has been sent,
        and the response so far ends as failed."""
        events = _Numbered()
        begun = self._response("in_progress")
        yield events.with_response("created", begun)
        yield events.with_response("in_progress", begun)
        try:
            given_up: dict[str, Any] = {}
            async for _, delta in self._generating.deltas():
                if delta.expected_missed:
                    given_up = {"slo": GIVEN_UP}
                for event in self._news(delta):
                    yield events.told(*await self._encoded({**event, **given_up}))
                    given_up = {}
                if delta.replayed and (passage := self._record.passage) is not None:
                    events.next = passage.point.messages
            finished = await self._finished()
        except Exception as error:
            api_error = as_api_error(error)
            if api_error is None:
                raise
            api_error.note(self._record)
            problem = {"code": api_error.code, "message": str(api_error), "param": api_error.param}
            yield events.told("error", to_json({"type": "error", **problem}))
            failed = {"code": _error_code(api_error), "message": str(api_error)}
            yield events.with_response("failed", self._response("failed", error=failed))
            return
        yield events.with_response(self._status, finished)

    def _news(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta."""
        pieces = self._pieces(delta)
        for event in self._items.add(pieces, self._new_logprobs(delta, pieces)):
            item = event.get("item", {})
            if event["type"] == "response.output_item.added" and item["type"] == "function_call":
                self._note_call(item["call_id"], item["name"])
            yield event
        if delta.last is not None:
            if self._logprobs is not None:
                self._logprobs.extend(self._untold)
            yield from self._items.finish(self._status)

    def _new_logprobs(self, delta: Delta, pieces: Sequence[Piece]) -> list[Any]:
        """Log-probabilities of the text in the pieces. Thoughts and their markers have none."""
        if self._logprobs is None:
            return []
        self._untold += chat_logprobs(self._engine, delta.logprobs)["content"]
        if self._thought is not None:  # the text begins with the thought
            thought = min(self._thought.tokens - self._left_out, len(self._untold))
            del self._untold[:thought]
            self._left_out += thought
        entries: list[Any] = []
        if any(isinstance(piece, Content) for piece in pieces):
            entries, self._untold = self._untold, []
        return entries

    @property
    def _status(self) -> Status:
        """The status at the end."""
        assert self._last is not None
        cut = self._last.finish_reason is FinishReason.LENGTH
        return "incomplete" if cut else "completed"

    @property
    def _size(self) -> int:
        return self._characters + (0 if self._logprobs is None else self._logprobs.size)

    async def _encoded(self, event: Event) -> tuple[str, bytes]:
        """The event's type and JSON. An event with all of a long text is encoded off the event
        loop."""
        kind = event["type"]
        if kind.endswith("done") and self._size > INLINE_BYTES:
            return kind, await self._requests.run_beside(self._tenant, self._json, event)
        return kind, self._json(event)

    def _json(self, value: Any) -> bytes:
        json = to_json(value)
        return json if self._logprobs is None else self._logprobs.put_into(json)

    async def _finished(self) -> bytes:
        """The whole response. It is also stored, if the call asks for it."""
        last, status = self._last, self._status
        assert last is not None
        ended = finish_fields(last)
        fields = {
            **{name: value for name, value in ended.items() if name != "finish_reason"},
            "incomplete_details": None if status == "completed" else {"reason": _CUT},
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": self._usage(),
        }

        def made() -> tuple[bytes, bytes]:
            whole = self._response(status, self._items.items, **fields)
            kept = self._store is not None
            return whole, to_json(read_items(self._items.items)) if kept else b""

        if self._size > INLINE_BYTES:
            whole, read = await self._requests.run_beside(self._tenant, made)
        else:
            whole, read = made()
        if self._store is None or self._keep(self._store, whole, read):
            return whole
        self._store = None
        return self._response(status, self._items.items, **fields)

    def _keep(self, store: ResponseStore, whole: bytes, read: bytes) -> bool:
        """Stores the response. False if there is no room."""
        had = self._conversation
        count = had.count + len(self._items.items)
        request = self._generating.wanted[0].id
        turn = StoredResponse(self._id, whole, had.input_items, read, count, had.previous, request)
        return store.put(self._tenant, turn)

    def _response(
        self, status: str, output: Sequence[Mapping[str, Any]] = (), **fields: Any
    ) -> bytes:
        usual = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        more = {"status": status, "store": self._store is not None, **usual, **fields}
        raw = {name: to_json(value) for name, value in more.items()}
        return with_raw(self._head, {**raw, "output": self._json(output)})

    def _usage(self) -> dict[str, Any]:
        record = self._record
        return {
            "input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": record.prompt_tokens + self._output_tokens,
        }


class _Numbered:
    """Makes events, one after the other. next: the next one's number."""

    def __init__(self) -> None:
        self.next = 0

    def told(self, kind: str, json: bytes) -> bytes:
        """An event with this JSON object. kind: its type."""
        number = {"sequence_number": str(self.next).encode()}
        self.next += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), with_raw(json, number))

    def with_response(self, kind: str, response: bytes) -> bytes:
        """An event with this response. kind: its type, without the common prefix."""
        kind = f"response.{kind}"
        return self.told(kind, with_raw(to_json({"type": kind}), {"response": response}))


def _error_code(error: ApiError) -> str:
    """The OpenAI error code for a response that failed."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"
