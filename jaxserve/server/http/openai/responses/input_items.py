"""Items of a conversation as they are stored, and the chat that they make."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.http.openai.responses.schema import Item, MessageItem
from jaxserve.server.http.openai.schema import FunctionCall, Message, ToolCall

KeptItem = Mapping[str, Any]
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
"""Prefixes of ids, by the type of the item."""


def new_id(prefix: str) -> str:
    """A new id that cannot be guessed."""
    return f"{prefix}_{secrets.token_hex(16)}"


def kept_items(items: str | Sequence[Item]) -> list[KeptItem]:
    """The items of an input, each with an id."""
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    return [
        {
            "id": item.id or new_id(PREFIXES[item.type]),
            **item.plain(),
            "status": item.status or "completed",
        }
        for item in items
    ]


def messages_of(items: Iterable[KeptItem]) -> list[Message]:
    """The chat that the items make. Consecutive thoughts, texts and calls of an assistant are one
    turn."""
    messages: list[Message] = []
    turn = _AssistantTurn()
    for item in items:
        kind, role = item["type"], item.get("role", "assistant")
        if kind != "function_call_output" and role == "assistant":
            if turn.ends_before(kind):
                messages.append(turn.message())
                turn = _AssistantTurn()
            turn.add(item)
            continue
        if turn.begun:
            messages.append(turn.message())
            turn = _AssistantTurn()
        if kind == "message":
            messages.append(_message(role, _text(item["content"])))
        else:
            messages.append(_message("tool", _text(item["output"]), tool_call_id=item["call_id"]))
    return [*messages, turn.message()] if turn.begun else messages


class _AssistantTurn:
    """Collects the items of one message."""

    def __init__(self) -> None:
        self._thought: list[str] = []
        self._said: list[str] = []
        self._calls: list[ToolCall] = []
        self.begun = False

    def ends_before(self, kind: str) -> bool:
        """Whether an item of this type belongs to the next turn."""
        if kind == "function_call":
            return False
        return bool(self._calls if kind == "reasoning" else self._said and not self._calls)

    def add(self, item: KeptItem) -> None:
        """Adds an assistant's item."""
        self.begun = True
        if item["type"] == "reasoning":
            self._thought += [part["text"] for part in item["content"]]
        elif item["type"] == "message":
            self._said.append(_text(item["content"]))
        elif item["type"] == "function_call":
            function = FunctionCall.model_construct(name=item["name"], arguments=item["arguments"])
            call = ToolCall.model_construct(id=item["call_id"], type="function", function=function)
            self._calls.append(call)

    def message(self) -> Message:
        """The turn as one message."""
        thought, said = "\n".join(self._thought), "".join(self._said)
        return _message("assistant", said, reasoning_content=thought, tool_calls=self._calls)


def check_calls(items: Iterable[KeptItem], first: int) -> None:
    """Raises InvalidRequest for the output of a call that is not in the conversation.

    Args:
        items: the conversation.
        first: index of the input's first item.
    """
    called: set[str] = set()
    for place, item in enumerate(items, -first):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            problem = f"there is no function_call {item['call_id']!r:.80} before its output"
            raise InvalidRequest(f"input.{place}.call_id", problem)


def _message(role: str, content: str, **more: Any) -> Message:
    return Message.model_construct(role=role, content=content, **more)


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)
