"""Responses of a real engine: what a conversation finds in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.server.server import Server
from tests.engine.harness import engine as small_engine
from tests.server.http.conftest import SETTINGS

BOX = Path(__file__).parents[4] / "jaxserve" / "assets" / "tiny-stories"
STORY = "Tell me a story about a fox and a bear who live in the woods."


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        small_engine(BOX, model__load_format="auto", cache__prefix_caching=True) as engine,
        Server(engine, grace_s=0.0, http=SETTINGS) as server,
    ):
        yield openai.OpenAI(
            base_url=f"http://{server.http_address}/v1", api_key="none", max_retries=0
        )


@pytest.mark.slow
def test_each_turn_finds_the_turns_before(client: openai.OpenAI) -> None:
    """And its text is what a chat of the same turns says."""
    asked: Any = {"model": "tiny-stories", "temperature": 0}
    last, messages, before = None, [], 0
    for turn in range(3):
        question = f"{STORY} Part {turn}."
        made = client.responses.create(
            input=question, previous_response_id=last, max_output_tokens=12, **asked
        )
        assert made.usage is not None
        found = made.usage.input_tokens_details.cached_tokens
        assert found >= before // 4 * 4, "all whole blocks of the prompt before"
        assert bool(found) == bool(turn)
        before, last = made.usage.input_tokens, made.id
        messages.append({"role": "user", "content": question})
        chat = client.chat.completions.create(
            messages=messages, max_tokens=12, **asked, extra_body={"cache_salt": "other"}
        )
        assert made.output_text == chat.choices[0].message.content
        messages.append({"role": "assistant", "content": made.output_text})
