"""Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from checks import ASK, BASE_URL, CITY, KEY, MODEL, check, is_weather, main

client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
MESSAGES = "/v1/messages"
TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": CITY}
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_tokens": 128}
GREEDY: Any = {"extra_body": {"temperature": 0}}


@check("messages, whole and streamed", needs=MESSAGES)
def messages() -> None:
    whole = client.messages.create(**{**ASKED, "max_tokens": 16}, **GREEDY)
    with client.messages.stream(**{**ASKED, "max_tokens": 16}, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text and [text] == [block.text for block in whole.content if block.type == "text"]
    assert whole.stop_reason == streamed.stop_reason
    assert whole.usage.output_tokens == streamed.usage.output_tokens


@check("tools: an agent of five turns, each streamed, with forced calls", needs=MESSAGES)
def agent() -> None:
    turns: list[Any] = list(ASKED["messages"])
    for turn in range(5):
        force: Any = {"type": "tool", "name": TOOL["name"]} if turn % 2 else {"type": "any"}
        asked = {**ASKED, "messages": turns, "tools": [TOOL], "tool_choice": force}
        with client.messages.stream(**asked, **GREEDY) as stream:
            message = stream.get_final_message()
        turns.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        assert uses and message.stop_reason == "tool_use"
        for use in uses:
            is_weather(use.input)
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": f"Sunny, {turn}."}
            for use in uses
        ]
        turns.append({"role": "user", "content": results})
    last = client.messages.create(**{**ASKED, "messages": turns, "tools": [TOOL]}, **GREEDY)
    assert last.usage.cache_read_input_tokens


@check("tools: auto", needs=MESSAGES)
def auto() -> str:
    message = client.messages.create(**ASKED, tools=[{**TOOL, "strict": True}], **GREEDY)
    uses = [block for block in message.content if block.type == "tool_use"]
    for use in uses:
        is_weather(use.input)
    assert message.content
    return "it called" if uses else "the model said something else"


@check("count_tokens", needs=f"{MESSAGES}/count_tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"], tools=[TOOL])
    usage = client.messages.create(**ASKED, tools=[TOOL]).usage
    cached = usage.cache_read_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + cached


@check("structured output: output_config.format", needs=MESSAGES)
def structured() -> None:
    form: Any = {"format": {"type": "json_schema", "schema": CITY}}
    (block,) = client.messages.create(**ASKED, output_config=form, **GREEDY).content
    assert block.type == "text"
    is_weather(json.loads(block.text))


@check("beta.messages, and errors", needs=MESSAGES)
def beta() -> None:
    message = client.beta.messages.create(**ASKED, betas=["interleaved-thinking-2025-05-14"])
    assert message.content
    image: Any = [{"type": "image", "source": {"type": "url", "url": "http://example.com/a"}}]
    try:
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": image}]})
    except anthropic.BadRequestError as error:
        assert error.type == "invalid_request_error" and "'image' blocks" in str(error)
        return
    raise AssertionError("an image was taken")


if __name__ == "__main__":
    main()
