"""pydantic-ai's agents."""

from __future__ import annotations

from typing import Any, Literal

from checks import ASK, BASE_URL, KEY, MODEL, check, main
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MOST = UsageLimits(request_limit=4)


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def agent(**fields: Any) -> Agent[None, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
    return Agent(model, model_settings={"max_tokens": 256, "temperature": 0}, retries=2, **fields)


@check("an agent that answers with text, streamed")
async def text() -> None:
    async with agent().run_stream(ASK, usage_limits=MOST) as stream:
        assert await stream.get_output()


@check("output_type=Model, by default a forced call")
def structured() -> None:
    assert isinstance(agent(output_type=Weather).run_sync(ASK, usage_limits=MOST).output, Weather)


@check("output_type=NativeOutput(Model)")
def native() -> None:
    result = agent(output_type=NativeOutput(Weather)).run_sync(ASK, usage_limits=MOST).output
    assert isinstance(result, Weather)


@check("output_type=Model beside a tool of its own")
def with_a_tool() -> str:
    called: list[str] = []
    asked = agent(output_type=Weather)

    @asked.tool_plain
    def days_left(month: Literal["May", "June"]) -> int:
        """How many days of a month are left."""
        called.append(month)
        return 3

    assert isinstance(asked.run_sync(ASK, usage_limits=MOST).output, Weather)
    return "the tool was called" if called else "the model answered at once"


if __name__ == "__main__":
    main()
