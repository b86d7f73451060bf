"""The answer to one call, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic_core import to_json

from jaxserve.engine.output import FinishReason
from jaxserve.server.http.anthropic.schema import MessagesRequest
from jaxserve.server.http.errors import as_api_error
from jaxserve.server.http.openai.answer_messages import ParsedAnswer, PreparedChat
from jaxserve.server.http.openai.choices import GIVEN_UP, INLINE_BYTES, finish_fields, with_raw
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.sse import EventStream
from jaxserve.server.tools.arguments import as_json
from jaxserve.server.tools.calls import Arguments, CallBegin, Content, Piece, Reasoning

Event = dict[str, Any]
_SIGNATURE = "unsigned"
"""Of all thoughts: clients leave out those without any when they send them back."""
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_KINDS: dict[type[Piece], str] = {Content: "text", Reasoning: "thinking", Arguments: "tool_use"}


class MessageAnswer(ParsedAnswer):
    """The message that answers one call. Creating it submits the request.

    Args:
        context: what the routes need.
        body: the call's body.
        prepared: the call's request, and how to parse its text.
        http: the call.
    """

    def __init__(
        self,
        context: RouteContext,
        body: MessagesRequest,
        prepared: PreparedChat,
        http: HttpRequest,
    ) -> None:
        (request,) = prepared.wanted
        self._model = request.adapter or context.model
        shows = body.thinking is None or body.thinking.display != "omitted"
        self._shortened = request.sampling.max_tokens < body.max_tokens
        super().__init__(context, prepared, http)
        self._blocks = ContentBlocks(self._new_call_id, shows_thoughts=shows)

    def stream(self) -> Response:
        """The message as a stream of events."""
        return EventStream(self._stream(), self._generating.end)

    async def _whole(self) -> Response:
        async for _, delta in self._generating.deltas():
            for event in self._blocks.add(self._pieces(delta)):
                self._note(event)

        def made() -> bytes:
            head = {**self._head(), **self._ended(), "usage": self._usage(), **self._told()}
            content = b",".join(self._blocks.whole())
            return with_raw(to_json(head), {"content": b"[%s]" % content})

        if self._characters <= INLINE_BYTES:
            return Response(made(), media_type="application/json")
        body = await self._requests.run_beside(self._tenant, made)
        return Response(body, media_type="application/json")

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """The events of each delta. An error becomes an event, too, since the status has been
        sent."""
        begun: Event = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        yield _sent({"type": "message_start", "message": {**self._head(), **begun}})
        ping: Event | None = {"type": "ping"}
        try:
            async for _, delta in self._generating.deltas():
                if delta.expected_missed:
                    ping = {"type": "ping", "slo": GIVEN_UP}
                events = list(self._blocks.add(self._pieces(delta)))
                if events and ping is not None:
                    events.insert(events[0]["type"] == "content_block_start", ping)
                    ping = None
                for event in events:
                    self._note(event)
                if events:
                    yield b"".join(map(_sent, events))
            ends = {"delta": self._ended(), "usage": self._usage(), **self._told()}
            last = {"type": "message_delta", **ends}, {"type": "message_stop"}
            yield b"".join(map(_sent, (*self._blocks.finish(), *last)))
        except Exception as error:
            api_error = as_api_error(error)
            if api_error is None:
                raise
            api_error.note(self._record)
            yield _sent(api_error.shaped(self._http.scope["path"])[1])

    def _note(self, event: Event) -> None:
        block = event.get("content_block", {})
        if block.get("type") == "tool_use":
            self._note_call(block["id"], block["name"])

    def _head(self) -> dict[str, Any]:
        about = {"id": f"msg_{self._record.request_id}", "type": "message", "role": "assistant"}
        return {**about, "model": self._model}

    def _ended(self) -> dict[str, Any]:
        """Why the answer has ended."""
        last = self._last
        assert last is not None
        if last.finish_reason is FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if self._shortened else "max_tokens"
        elif self._blocks.calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if last.stop_string else "end_turn"
        stop = last.stop_string if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}

    def _told(self) -> dict[str, Any]:
        """The fields about its times and targets."""
        assert self._last is not None
        ended = finish_fields(self._last)
        return {name: value for name, value in ended.items() if name != "finish_reason"}

    def _usage(self) -> dict[str, Any]:
        cached = self._record.cached_tokens
        return {
            "input_tokens": self._record.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"thinking_tokens": self._thought_tokens},
        }


def _sent(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event))


class ContentBlocks:
    """The blocks of one message.

    Args:
        new_call_id: makes the id of a call.
        shows_thoughts: whether thoughts have their text.

    Attributes:
        calls: how many calls have begun.
    """

    def __init__(self, new_call_id: Callable[[], str], *, shows_thoughts: bool) -> None:
        self._new_call_id, self._shows_thoughts = new_call_id, shows_thoughts
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []  # with the pieces of its text
        self.calls = 0

    def add(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        """The events for the next pieces."""
        for piece in pieces:
            if isinstance(piece, CallBegin):
                self.calls += 1
                call = {"id": self._new_call_id(), "name": piece.name, "input": {}}
                yield from self._begin({"type": "tool_use", **call})
                continue
            kind = _KINDS[type(piece)]
            if kind != self._open:
                more = {"signature": ""} if kind == "thinking" else {}
                yield from self._begin({"type": kind, kind: "", **more})
            if kind == "thinking" and not self._shows_thoughts:
                continue
            self._blocks[-1][1].append(piece.text)
            name, field = _DELTAS[kind]
            yield self._event("delta", delta={"type": name, field: piece.text})

    def finish(self) -> Iterator[Event]:
        """The events at the end."""
        if self._blocks:
            if self._open == "thinking":
                signed = {"type": "signature_delta", "signature": _SIGNATURE}
                yield self._event("delta", delta=signed)
            yield self._event("stop")

    def whole(self) -> Iterator[bytes]:
        """The whole blocks, as JSON."""
        for block, pieces in self._blocks:
            text = "".join(pieces)
            if block["type"] == "tool_use":
                fields = {name: value for name, value in block.items() if name != "input"}
                yield with_raw(to_json(fields), {"input": as_json(text).encode()})
            elif block["type"] == "thinking":
                yield to_json({**block, "thinking": text, "signature": _SIGNATURE})
            else:
                yield to_json({**block, "text": text})

    @property
    def _open(self) -> str:
        """The type of the block that grows; "" before the first."""
        return str(self._blocks[-1][0]["type"]) if self._blocks else ""

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.finish()
        self._blocks.append((block, []))
        yield self._event("start", content_block=block)

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"content_block_{name}", "index": len(self._blocks) - 1, **fields}
