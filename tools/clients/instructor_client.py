"""instructor, over OpenAI's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import instructor
import openai
from checks import ASK, BASE_URL, KEY, MODEL, check, main
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def asks(mode: instructor.Mode) -> Callable[[], str]:
    """Makes the check of a mode."""

    def ask() -> str:
        plain = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
        asked: Any = {
            "model": MODEL,
            "messages": [{"role": "user", "content": ASK}],
            "response_model": Weather,
            "max_tokens": 256,
            "temperature": 0,
            "max_retries": 0,
        }
        try:
            result = instructor.from_openai(plain, mode=mode).chat.completions.create(**asked)
        except (IncompleteOutputException, InstructorRetryException) as error:
            # Any object is valid in this mode; the model must know which object to write.
            if mode is not instructor.Mode.JSON or "Error code" in str(error):
                raise
            return "called; the model's object was another one"
        assert isinstance(result, Weather)
        return ""

    return ask


for name in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"):
    check(f"Mode.{name}")(asks(instructor.Mode[name]))


if __name__ == "__main__":
    main()
