"""LiteLLM, with the provider openai/."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads prices

import litellm
from checks import ASK, BASE_URL, CITY, KEY, MODEL, check, is_weather, main
from pydantic import BaseModel, Field

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY},
}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def answer(**fields: Any) -> Any:
    fields = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 128, **fields}
    return litellm.completion(
        f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, temperature=0, **fields
    )


@check("completion(), whole and streamed")
def chats() -> None:
    whole = answer(max_tokens=16).choices[0].message.content
    chunks = answer(max_tokens=16, stream=True)
    assert whole and whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("tools, forced, whole and streamed")
def forced() -> None:
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", chosen):
        whole = answer(tools=[TOOL], tool_choice=choice)
        chunks = list(answer(tools=[TOOL], tool_choice=choice, stream=True))
        built = litellm.stream_chunk_builder(chunks)
        for response in (whole, built):
            (call, *_) = response.choices[0].message.tool_calls
            is_weather(json.loads(call.function.arguments))
            assert response.choices[0].finish_reason == "tool_calls"


@check("response_format=Model")
def structured() -> None:
    content = answer(response_format=Weather).choices[0].message.content
    Weather.model_validate_json(content)


@check("embedding()", needs="/v1/embeddings")
def embeddings() -> None:
    response = litellm.embedding(
        f"openai/{MODEL}", input=["a fox", "a crow"], api_base=BASE_URL, api_key=KEY
    )
    assert len(response.data) == 2 and len(response.data[0]["embedding"]) > 8


@check("responses()", needs="/v1/responses")
def responses() -> None:
    where = {"api_base": BASE_URL, "api_key": KEY}
    response = litellm.responses(ASK, f"openai/{MODEL}", max_output_tokens=24, **where)
    assert response.output_text


if __name__ == "__main__":
    main()
