"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import ASK, BASE_URL, KEY, MODEL, check, is_weather, main
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field

COUNT = 50


def model(**fields: Any) -> ChatOpenAI:
    fields = {"max_tokens": 128, "max_retries": 0, "temperature": 0, **fields}
    return ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, **fields)


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@tool(args_schema=Weather)
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{city}: sunny for {days} days"


@check("bind_tools(tool_choice=...), and the history that follows")
def forced() -> None:
    for choice in ("any", "get_weather"):
        answer = model().bind_tools([get_weather], tool_choice=choice).invoke(ASK)
        assert answer.tool_calls and not answer.invalid_tool_calls
        for call in answer.tool_calls:
            is_weather(call["args"])
    call = answer.tool_calls[0]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    asked = AIMessage(content="", tool_calls=[call])
    history = [HumanMessage(ASK), asked, result]
    assert (
        model(max_tokens=16).bind_tools([get_weather], tool_choice="none").invoke(history).content
    )


@check("bind_tools(), auto, streamed")
def auto() -> str:
    whole = None
    for chunk in model().bind_tools([get_weather], strict=True).stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and (whole.content or whole.tool_calls)
    if whole.response_metadata["finish_reason"] == "tool_calls":
        for call in whole.tool_calls:
            is_weather(call["args"])
    return "it called" if whole.tool_calls else "the model said something else"


@check('with_structured_output(method="function_calling")')
def by_function() -> None:
    result = model().with_structured_output(Weather, method="function_calling").invoke(ASK)
    assert isinstance(result, Weather)


@check('with_structured_output(method="json_schema")')
def by_schema() -> None:
    result = model().with_structured_output(Weather, method="json_schema").invoke(ASK)
    assert isinstance(result, Weather)


@check('with_structured_output(method="json_mode")')
def by_json_mode() -> str:
    asked = model(max_tokens=256).with_structured_output(method="json_mode", include_raw=True)
    try:
        result = asked.invoke("Say a JSON object with the keys city and days.")
    except LengthFinishReasonError as error:
        assert " " * 9 not in (error.completion.choices[0].message.content or "")
        return "the model did not come to an end"
    assert isinstance(result["parsed"], dict), result
    return ""


@check(f"{COUNT} calls at once, and {COUNT} streams")
async def many() -> None:
    chat = model(max_tokens=8)

    def asked(number: int, salt: str) -> dict[str, Any]:
        fields = {"cache_salt": f"{salt}{number}"}  # so that each prompt is computed
        return {"input": f"Count to {number}.", "extra_body": fields}

    answers = await asyncio.gather(*(chat.ainvoke(**asked(k, "whole")) for k in range(COUNT)))
    assert len(answers) == COUNT
    assert all(
        answer.response_metadata["finish_reason"] in ("stop", "length") for answer in answers
    )

    async def streamed(number: int) -> str:
        stream = chat.astream(**asked(number, "streamed"))
        return "".join([str(chunk.content) async for chunk in stream])

    texts = await asyncio.gather(*(streamed(k) for k in range(COUNT)))
    same = sum(text == answer.content for text, answer in zip(texts, answers, strict=True))
    assert same == COUNT, f"{COUNT - same} of {COUNT} streams have another text"


@check(f"{COUNT} streams with tools that are cancelled, and then one more")
async def cancelled() -> None:
    chat = model(max_tokens=512).bind_tools([get_weather])

    async def hang_up(number: int) -> None:
        async for _ in chat.astream(f"Tell me {number} stories."):
            return

    await asyncio.gather(*(hang_up(k) for k in range(COUNT)))
    tasks = [asyncio.create_task(chat.ainvoke(ASK)) for _ in range(COUNT)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in ended)
    assert (await model(max_tokens=8).ainvoke("Hello")).content


@check("OpenAIEmbeddings", needs="/v1/embeddings")
def embeddings() -> None:
    embed = OpenAIEmbeddings(
        model=MODEL, base_url=BASE_URL, api_key=KEY, check_embedding_ctx_length=False
    )
    first, second = embed.embed_documents(["a fox", "a crow"])
    assert len(first) == len(second) > 8


@check("use_responses_api=True", needs="/v1/responses")
def responses() -> None:
    chat = model(use_responses_api=True)
    assert chat.invoke(ASK).text
    answer = chat.bind_tools([get_weather], tool_choice="any").invoke(ASK)
    assert answer.tool_calls
    for call in answer.tool_calls:
        is_weather(call["args"])


if __name__ == "__main__":
    main()
