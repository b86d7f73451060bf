"""Ollama's own client."""

from __future__ import annotations

import json
from typing import Any

import ollama
from checks import ASK, BASE_URL, CITY, MODEL, check, is_weather, main

client = ollama.Client(host=BASE_URL.removesuffix("/v1"))
CHAT = "/api/chat"
MESSAGES: Any = [{"role": "user", "content": ASK}]
OPTIONS: Any = {"temperature": 0, "num_predict": 64, "num_ctx": 2048}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


@check("chat, whole and streamed", needs=CHAT)
def chats() -> None:
    whole = client.chat(MODEL, MESSAGES, options=OPTIONS)
    parts = list(client.chat(MODEL, MESSAGES, options=OPTIONS, stream=True))
    assert whole.message.content
    assert whole.message.content == "".join(part.message.content or "" for part in parts)
    assert whole.done_reason == parts[-1].done_reason and whole.eval_count == parts[-1].eval_count


@check("generate, whole and streamed", needs="/api/generate")
def generates() -> None:
    whole = client.generate(MODEL, "Once upon a time", options=OPTIONS)
    parts = list(client.generate(MODEL, "Once upon a time", options=OPTIONS, stream=True))
    assert whole.response and whole.response == "".join(part.response or "" for part in parts)


@check("format: a JSON Schema", needs=CHAT)
def structured() -> None:
    answer = client.chat(MODEL, MESSAGES, format=CITY, options={**OPTIONS, "num_predict": 128})
    is_weather(json.loads(answer.message.content or ""))


@check("tools, and the history that follows", needs=CHAT)
def tools() -> str:
    first = client.chat(MODEL, MESSAGES, tools=[TOOL], options=OPTIONS).message
    calls = first.tool_calls or ()
    history = [*MESSAGES, first]
    history += [{"role": "tool", "tool_name": "get_weather", "content": "Sunny."} for _ in calls]
    last = client.chat(MODEL, [*history, *MESSAGES], tools=[TOOL], options=OPTIONS)
    assert last.message.content or last.message.tool_calls
    return "it called" if calls else "the model said something else"


@check("embed", needs="/api/embed")
def vectors() -> None:
    first, second = client.embed(MODEL, ["a fox", "a crow"]).embeddings
    assert len(first) == len(second) > 8


@check("list, ps and show", needs="/api/tags")
def models() -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert MODEL in [model.model for model in client.ps().models]
    assert "completion" in (client.show(MODEL).capabilities or ())


if __name__ == "__main__":
    main()
