"""Chats with tools for templates that do not support tools."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.arguments import as_json
from jaxserve.server.tools.calls import Call, Tool, as_openai, compact
from jaxserve.server.tools.registry import ToolFormat

Message = Mapping[str, Any]


def has_calls(messages: Sequence[Message]) -> bool:
    """Whether the chat has calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def with_tools_described(
    messages: Sequence[Message], tools: Sequence[Tool], form: ToolFormat
) -> list[Message]:
    """The chat as `in_words` makes it, with a system message that describes the tools.

    Args:
        messages: the chat.
        tools: the tools that may be called; may be empty.
        form: how to write calls.
    """
    chat = in_words(messages, form)
    if not tools:
        return chat
    about = "\n".join(compact(tool["function"]) for tool in as_openai(tools))
    text = f"You can call these functions:\n{about}\n\n{form.instructions}"
    if chat and chat[0]["role"] in ("system", "developer"):
        first = {**chat[0], "content": f"{chat[0]['content']}\n\n{text}".strip()}
        return [first, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def in_words(messages: Sequence[Message], form: ToolFormat, *, calls: bool = True) -> list[Message]:
    """The chat with calls as the assistant's text, and results of tools as the user's.

    Args:
        messages: the chat.
        form: how to write calls.
        calls: whether calls are rewritten, too; else only results are.
    """
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    chat: list[Message] = []
    for role, turns in itertools.groupby(messages, key=lambda message: message["role"]):
        if role == "tool":  # as one turn: many templates want alternating roles
            content = "\n".join(_result(message, names) for message in turns)
            chat.append({"role": "user", "content": content})
            continue
        for message in turns:
            calling = calls and message.get("tool_calls")
            chat.append(_calling(message, form) if calling else message)
    return chat


def _result(message: Message, names: Mapping[str, str]) -> str:
    name = names.get(message.get("tool_call_id", ""), message.get("name", ""))
    which = f"The function {name}" if name else "The function"
    return f"{which} returned:\n{message['content']}"


def _calling(message: Message, form: ToolFormat) -> Message:
    calls = [call["function"] for call in message["tool_calls"]]
    written = form.written([Call(call["name"], as_json(call["arguments"])) for call in calls])
    text = "\n".join(filter(None, (message["content"], written)))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text}
