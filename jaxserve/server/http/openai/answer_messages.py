"""Reads the answer to a chat in pieces, and makes OpenAI's messages of them, whole or as deltas."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fastapi import Request as HttpRequest
from fastapi import Response

from jaxserve.engine.output import Output
from jaxserve.sched.request import Request
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai.multi_prompt import Generating, unless_gone
from jaxserve.server.http.openai.reasoning_options import ThoughtUse
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.tool_options import ToolUse, call_parser
from jaxserve.server.reasoning.message import MessageParser
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.output_streams import Delta
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.tools.calls import (
    Arguments,
    Call,
    CallBegin,
    Content,
    Piece,
    Reasoning,
    whole,
)

PROMPT_END = 256
"""Last characters of a prompt, which say how its continuation begins."""


class PreparedChat(NamedTuple):
    """A chat's request, and how to read its answer.

    Attributes:
        wanted: the request.
        note: from `parser_note`.
        thought: the thought that the answer may begin with; None for none.
        unenforced: places of the keywords in its schemas that the text is not held to.
    """

    wanted: list[Request]
    note: dict[str, Any]
    thought: ThoughtUse | None
    unenforced: list[str]


class ParsedAnswer(ABC):
    """The answer to a chat with one continuation, in pieces, for APIs that have other messages than
    OpenAI's chats. Creating it submits the request.

    Args:
        context: what the routes need.
        prepared: the chat.
        http: the call.
    """

    def __init__(self, context: RouteContext, prepared: PreparedChat, http: HttpRequest) -> None:
        self._engine, self._requests, self._http = context.engine, context.requests, http
        self._parser = message_parser(context.template, prepared.note)
        self._thought = None if prepared.thought is None else prepared.thought.count()
        self._characters = self._output_tokens = 0
        self._last: Output | None = None
        self._record = record_of(http)
        self._new_call_id = call_ids(context.template, self._record)
        self._record.unenforced = prepared.unenforced
        self._generating = Generating(context.requests, prepared.wanted, self._record)

    async def whole(self) -> Response:
        """The whole response."""
        try:
            return await unless_gone(self._http, self._whole())
        finally:
            self._generating.end()

    @abstractmethod
    async def _whole(self) -> Response:
        """Generates the whole response."""

    def _pieces(self, delta: Delta) -> list[Piece]:
        """The pieces that a delta adds."""
        self._output_tokens += len(delta.token_ids)
        if self._thought is not None:
            self._thought.feed(delta.token_ids)
        text = "".join(delta.text)
        self._characters += len(text)
        pieces = self._parser.feed(text)
        if delta.last is not None:
            self._last = delta.last
            pieces += self._parser.finish()
        return pieces

    def _note_call(self, call_id: str, name: str) -> None:
        """Notes a call of a tool, which the program will answer."""
        self._requests.note_tools(self._generating.wanted[0], {call_id: name})

    @property
    def _thought_tokens(self) -> int:
        return 0 if self._thought is None else self._thought.tokens

    @property
    def _tenant(self) -> str:
        return self._record.caller.name


def parser_note(template: ChatTemplate, use: ToolUse | None, prompt: str) -> dict[str, Any]:
    """What `message_parser` has to know of a chat, as JSON that batches keep.

    Args:
        template: knows the formats of the model.
        use: the tools that may be called; None for none.
        prompt: the prompt's text, as the template has rendered it.

    Returns:
        Empty if all of the text is content.
    """
    thinks, end = template.reasoning_format, prompt[-PROMPT_END:]
    note: dict[str, Any] = {} if use is None else {"calls": use.note()}
    if thinks is not None and thinks.parser(end) is not None:
        note["prompt_end"] = end
    return note


def call_ids(template: ChatTemplate, record: CallRecord, number: int = 0) -> Callable[[], str]:
    """Makes the ids of a continuation's calls of tools.

    Args:
        template: knows the formats of the model.
        record: the call's record.
        number: the continuation's number.
    """
    places = itertools.count()

    def made() -> str:
        return template.tool_format.id_of(record.drawn(f"call {number} {next(places)}")[:12])

    return made


def message_parser(template: ChatTemplate, note: Mapping[str, Any]) -> MessageParser:
    """The parser of one continuation. note: from `parser_note`."""
    thinks, end, calls = template.reasoning_format, note.get("prompt_end"), note.get("calls")
    return MessageParser(
        None if thinks is None or end is None else thinks.parser(end),
        None if calls is None else call_parser(template.tool_format, calls),
    )


def assistant_message(text: str) -> dict[str, Any]:
    """The model's text as a turn of the chat."""
    return {"role": "assistant", "content": text, "refusal": None}


def ended_message(
    template: ChatTemplate,
    note: Mapping[str, Any],
    text: str,
    reason: str,
    new_id: Callable[[], str],
) -> dict[str, Any]:
    """The message and the finish reason of a whole answer.

    Args:
        template: knows the formats of the model.
        note: the chat's `parser_note`.
        text: the answer.
        reason: why it ended.
        new_id: makes ids of calls.
    """
    if not note:
        return {"message": assistant_message(text), "finish_reason": reason}
    parser = message_parser(template, note)
    said = whole([*parser.feed(text), *parser.finish()])
    message = {**assistant_message(said.content), "content": said.content or None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [_tool_call(new_id(), call) for call in said.calls]
    return {"message": message, **with_calls({"finish_reason": reason}, bool(said.calls))}


def with_calls(ended: dict[str, Any], called: bool) -> dict[str, Any]:
    """The fields of an answer with its finish reason, if it has ended. An answer that ended by
    itself and has tool calls ends for those. called: whether it has any."""
    if not called or ended.get("finish_reason") != "stop":
        return ended
    return {**ended, "finish_reason": "tool_calls"}


def _tool_call(call_id: str, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id, "type": "function", "function": function}


class MessageDeltas:
    """The pieces of one message.

    Args:
        parser: parses its text.
        new_id: makes the id of a call.

    Attributes:
        calls: how many calls have begun.
    """

    def __init__(self, parser: MessageParser, new_id: Callable[[], str]) -> None:
        self._parser, self._new_id = parser, new_id
        self.calls = 0

    def delta(self, text: str, *, last: bool) -> dict[str, Any]:
        """The delta for the next text; {} while the text is held back."""
        pieces = self._parser.feed(text)
        if last:
            pieces += self._parser.finish()
        return self._told(pieces)

    def _told(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        texts: dict[str, list[str]] = {}
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Content):
                texts.setdefault("content", []).append(piece.text)
            elif isinstance(piece, Reasoning):
                texts.setdefault("reasoning_content", []).append(piece.text)
            elif isinstance(piece, CallBegin):
                calls.append({"index": self.calls, **_tool_call(self._new_id(), Call(piece.name))})
                self.calls += 1
            else:
                assert isinstance(piece, Arguments)
                index = self.calls - 1
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.text
        message: dict[str, Any] = {name: "".join(said) for name, said in texts.items()}
        return {**message, "tool_calls": calls} if calls else message
