"""An agent of OpenAI's client with a real chat model: it asks for tools, whose answers it gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from jaxserve import LLM
from jaxserve.config import SchedulerConfig
from jaxserve.server.http.options import HttpSettings
from jaxserve.server.server import Server

pytestmark = pytest.mark.slow
TURNS = 5
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": CITY,
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": SUM,
            "strict": True,
        },
    },
]
SCHEMAS = {"get_weather": CITY, "add": SUM}


def get_weather(city: str) -> str:
    return f"{city}: sunny, 21 degrees"


def add(a: int, b: int) -> str:
    return str(a + b)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    small = {
        "engine__max_model_len": 2048,
        "scheduler__max_rows": 4,
        "cache__memory_gib": 0.3,
    }
    with LLM("smollm2", **small) as llm:
        settings = HttpSettings(0, llm._template, SchedulerConfig(max_rows=4))
        with Server(llm.engine, grace_s=0.0, http=settings) as server:
            yield openai.OpenAI(
                base_url=f"http://{server.http_address}/v1", api_key="none", max_retries=0
            )


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_agent_of_five_turns(client: openai.OpenAI, choice: Any) -> None:
    """Each turn is streamed. Those that are forced ask for a tool; those that are not may."""
    messages: list[Any] = [
        {"role": "system", "content": "You are an assistant who uses functions."},
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    called: list[str] = []
    questions = iter(["What is 3 plus 4?", "And in Rome?", "And 20 plus 22?", "Thanks! And Oslo?"])
    for turn in range(TURNS):
        with client.chat.completions.stream(
            model="smollm2",
            messages=messages,
            tools=TOOLS,
            tool_choice=choice if turn < TURNS - 1 else "none",
            temperature=0,
            max_tokens=200,
        ) as stream:
            whole = stream.get_final_completion()
        (answer,) = whole.choices
        message = answer.message
        messages.append(message)
        calls = message.tool_calls or []
        assert (answer.finish_reason == "tool_calls") == bool(calls) or (
            answer.finish_reason == "length"
        )
        if turn < TURNS - 1 and choice == "required":
            assert calls and not message.content
        for call in calls:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, SCHEMAS[call.function.name])
            called.append(call.function.name)
            result = {"get_weather": get_weather, "add": add}[call.function.name](**arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if turn == TURNS - 1:
            assert not calls and message.content
        else:
            messages.append({"role": "user", "content": next(questions)})
    if choice == "required":
        assert len(called) >= TURNS - 1
