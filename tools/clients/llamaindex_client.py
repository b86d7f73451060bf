"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from typing import Any, Literal

from checks import ASK, BASE_URL, KEY, MODEL, check, is_weather, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def model(**fields: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=128,
        max_retries=0,
        temperature=0,
        **fields,
    )


def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{city}: sunny for {days} days"


TOOL = FunctionTool.from_defaults(get_weather, fn_schema=Weather)


@check("chat, whole and streamed")
def chats() -> None:
    message = [ChatMessage(role="user", content=ASK)]
    whole = model().chat(message).message.content
    streamed = "".join(chunk.delta or "" for chunk in model().stream_chat(message))
    assert whole and whole == streamed


@check("chat_with_tools(tool_required=True)")
def forced() -> None:
    answer = model().chat_with_tools([TOOL], user_msg=ASK, tool_required=True)
    calls = model().get_tool_calls_from_response(answer)
    assert calls
    for call in calls:
        is_weather(call.tool_kwargs)


@check("predict_and_call()")
def called() -> str:
    answer = model().predict_and_call([TOOL], user_msg=ASK, error_on_no_tool_call=False)
    assert answer.response is not None
    return "it called" if answer.sources else "the model said something else"


@check("as_structured_llm()")
def structured() -> None:
    result = model().as_structured_llm(Weather).complete(ASK).raw
    assert isinstance(result, Weather)


@check("as_structured_llm(), with should_use_structured_outputs")
def by_schema() -> None:
    result = model(should_use_structured_outputs=True).as_structured_llm(Weather).complete(ASK).raw
    assert isinstance(result, Weather)


@check("OpenAILikeEmbedding", needs="/v1/embeddings")
def embeddings() -> None:
    embed = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key=KEY)
    first, second = embed.get_text_embedding_batch(["a fox", "a crow"])
    assert len(first) == len(second) > 8


if __name__ == "__main__":
    main()
