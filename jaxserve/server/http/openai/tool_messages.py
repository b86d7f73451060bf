"""Answers with calls of tools, whole and in pieces, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxserve.server.tools.calls import Arguments, Call, CallBegin, Content, Piece, whole
from jaxserve.server.tools.parser import CallParser


def message_with_calls(
    parser: CallParser, text: str, new_id: Callable[[], str]
) -> tuple[dict[str, Any], bool]:
    """The message that a whole text is, and whether it has calls."""
    content, calls = whole([*parser.feed(text), *parser.finish()])
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    if calls:
        message["tool_calls"] = [_tool_call(new_id(), call) for call in calls]
    return message, bool(calls)


def _tool_call(call_id: str, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id, "type": "function", "function": function}


class MessageDeltas:
    """The pieces of one message.

    Args:
        parser: of its text.
        new_id: makes the id of a call.

    Attributes:
        calls: how many have begun.
    """

    def __init__(self, parser: CallParser, new_id: Callable[[], str]) -> None:
        self._parser, self._new_id = parser, new_id
        self.calls = 0

    def delta(self, text: str, *, last: bool) -> dict[str, Any]:
        """What the next text adds; {} while it is held back."""
        pieces = self._parser.feed(text)
        if last:
            pieces += self._parser.finish()
        return self._told(pieces)

    def _told(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Content):
                content.append(piece.text)
            elif isinstance(piece, CallBegin):
                calls.append({"index": self.calls, **_tool_call(self._new_id(), Call(piece.name))})
                self.calls += 1
            else:
                assert isinstance(piece, Arguments)
                index = self.calls - 1
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.text
        told: dict[str, Any] = {"content": "".join(content)} if content else {}
        return {**told, "tool_calls": calls} if calls else told
