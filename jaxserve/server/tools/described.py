"""Chats with tools for templates that say nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.tools.calls import Call, Tool, as_openai, compact
from jaxserve.server.tools.registry import ToolFormat

Message = Mapping[str, Any]


def with_tools_described(
    messages: Sequence[Message], tools: Sequence[Tool], form: ToolFormat
) -> list[Message]:
    """The chat in words only: a system message describes the tools, calls stand in the assistant's
    text, and what tools have answered is said by the user.

    Args:
        messages: the chat.
        tools: those that may be called; none are described where there are none.
        form: how to write calls.
    """
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    told = [_in_words(message, names, form) for message in messages]
    if not tools:
        return told
    about = "\n".join(compact(each["function"]) for each in as_openai(tools))
    text = f"You can call these functions:\n{about}\n\n{form.instructions}"
    if told and told[0]["role"] in ("system", "developer"):
        first = {**told[0], "content": f"{told[0]['content']}\n\n{text}".strip()}
        return [first, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _in_words(message: Message, names: Mapping[str, str], form: ToolFormat) -> Message:
    if message["role"] == "tool":
        name = names.get(message.get("tool_call_id", ""), message.get("name", ""))
        which = f"The function {name}" if name else "The function"
        return {"role": "user", "content": f"{which} returned:\n{message['content']}"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return message
    written = form.written([Call(call["name"], _object(call["arguments"])) for call in calls])
    text = "\n".join(filter(None, (message["content"], written)))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text}


def _object(arguments: str) -> str:
    """Arguments that are no JSON object are shown as a string in one."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return arguments if isinstance(found, dict) else compact({"": arguments})
