"""OpenAI's own client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
from checks import ASK, BASE_URL, CITY, KEY, MODEL, check, is_weather, main
from pydantic import BaseModel, ConfigDict, Field

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": CITY,
        "strict": True,
    },
}
MESSAGES: Any = [{"role": "user", "content": ASK}]
CHOICE: Any = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    """The same schema as CITY."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@check("chat, whole and streamed")
def chats() -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(stream=True, **asked)
    assert whole and whole == "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@check("tools: an agent of three turns, each streamed, with a forced call")
def agent() -> None:
    messages = list(MESSAGES)
    for choice in (CHOICE, "required"):
        with client.chat.completions.stream(
            model=MODEL,
            messages=messages,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=128,
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            is_weather(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
        assert message.tool_calls and not message.content
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=16, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@check("tools: auto, with strict arguments")
def auto() -> str:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 256}
    whole = client.chat.completions.create(**asked, temperature=0).choices[0]
    calls = whole.message.tool_calls or ()
    assert calls or whole.message.content
    if whole.finish_reason == "length":  # stream() would raise
        return "the model did not come to an end"
    assert (whole.finish_reason == "tool_calls") == bool(calls)
    for call in calls:
        is_weather(json.loads(call.function.arguments))
    with client.chat.completions.stream(**asked, temperature=0) as events:
        streamed = events.get_final_completion().choices[0]
    assert streamed.message.content == whole.message.content
    assert len(streamed.message.tool_calls or ()) == len(calls)
    return "it called" if calls else "the model said something else"


@check("structured output: parse() with a pydantic model")
def structured() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, temperature=0, max_tokens=128
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check("tools by pydantic_function_tool() beside a response_format")
def both() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
        response_format=Weather,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=128,
    )
    message = answer.choices[0].message
    objects = [call.function.parsed_arguments for call in message.tool_calls or ()]
    objects += [message.parsed] if message.parsed is not None else []
    assert objects and all(isinstance(item, Weather) for item in objects)


@check("JSON modes do not fill the answer with white space")
def json_modes() -> None:
    schema = {"name": "city", "schema": {"type": "object"}}
    forms: Any = ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema})
    for form in forms:
        for _ in range(4):
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "A JSON object with a city."}],
                response_format=form,
                max_tokens=100,
                logit_bias=white_space(),
            ).choices[0]
            text = answer.message.content or ""
            longest = max(map(len, re.findall(r"\s+", "".join(text.split('"')[::2]))), default=0)
            assert longest <= 8, text
            assert answer.finish_reason == "length" or isinstance(json.loads(text), dict)


def white_space() -> dict[str, int]:
    """A bias that makes the model write only white space, if it is allowed to."""
    root = openai.OpenAI(base_url=BASE_URL.removesuffix("/v1"), api_key=KEY)
    bias: dict[str, int] = {}
    for text in (" ", "  ", "\n", "\n\n", "\t"):
        tokens = root.post("/tokenize", body={"prompt": text}, cast_to=dict[str, Any])["tokens"]
        bias |= {str(token): 20 for token in tokens}
    return bias


@check("embeddings", needs="/v1/embeddings")
def embeddings() -> None:
    for form in ("float", "base64"):
        response = client.embeddings.create(
            model=MODEL, input=["a fox", "a crow"], encoding_format=form
        ).data
        assert len(response) == 2 and len(response[0].embedding) == len(response[1].embedding) > 8


@check("responses: text, then previous_response_id", needs="/v1/responses")
def responses() -> None:
    asked: Any = {"model": MODEL, "max_output_tokens": 24}
    first = client.responses.create(input="My name is Reynard.", **asked)
    assert first.output_text
    then = client.responses.create(input="Who am I?", previous_response_id=first.id, **asked)
    assert then.output_text and then.usage and first.usage
    assert then.usage.input_tokens > first.usage.input_tokens


@check("responses: streamed", needs="/v1/responses")
def streamed_responses() -> None:
    text, last = "", None
    with client.responses.stream(model=MODEL, input=ASK, max_output_tokens=24) as stream:
        for event in stream:  # the last type differs if a limit cuts off the text
            text += event.delta if event.type == "response.output_text.delta" else ""
            last = event
    assert last is not None and last.type in ("response.completed", "response.incomplete")
    assert text and text == last.response.output_text


@check("responses: a forced call, and its result", needs="/v1/responses")
def responses_with_tools() -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    first = client.responses.create(
        model=MODEL,
        input=ASK,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=128,
    )
    (call, *_) = [item for item in first.output if item.type == "function_call"]
    is_weather(json.loads(call.arguments))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    then = client.responses.create(
        model=MODEL, previous_response_id=first.id, input=[result], max_output_tokens=24
    )
    assert then.output_text


@check("responses: parse() with a pydantic model", needs="/v1/responses")
def structured_responses() -> None:
    response = client.responses.parse(
        model=MODEL, input=ASK, text_format=Weather, temperature=0, max_output_tokens=128
    )
    assert isinstance(response.output_parsed, Weather)


if __name__ == "__main__":
    main()
