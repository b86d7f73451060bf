"""What calls say of drafts, and are told of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import openai
import pytest

from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.conftest import Plain

CHAT: Any = [{"role": "user", "content": "Hi"}]
SPECULATING = dataclasses.replace(INFO, speculates=True)


def told(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_usage_says_how_many_drafts_were_right(client: openai.OpenAI, running: FakeEngine) -> None:
    asked: Any = {"model": "fake", "max_tokens": 2}
    assert told(client.completions.create(prompt="hello", **asked).usage) == (0, 0)
    running.drafts = 3, 1
    assert told(client.completions.create(prompt="hello", n=2, **asked).usage) == (6, 2)
    chat = {**asked, "messages": CHAT}
    assert told(client.chat.completions.create(**chat).usage) == (3, 1)
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(**chat)
    assert told(last.usage) == (3, 1)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("so it is", "so it is"),
        ([{"type": "text", "text": "so "}, {"type": "text", "text": "it is"}], "so it is"),
        ("", ""),
        ("\0", "\0"),
        (3000 * "long ", 3000 * "long "),  # encoded off the event loop
    ],
)
def test_a_prediction_arrives(plain: Plain, running: FakeEngine, content: Any, text: str) -> None:
    running.served = SPECULATING
    body = {"messages": CHAT, "max_tokens": 1}
    body["prediction"] = {"type": "content", "content": content}
    assert plain.call("POST", "/v1/chat/completions", body)[0] == 200
    assert running.requests[-1].prediction == tuple(map(ord, text))


def test_half_a_character_predicts_nothing(plain: Plain, running: FakeEngine) -> None:
    running.served = SPECULATING
    body = {"messages": CHAT, "prediction": {"type": "content", "content": "\ud800"}}
    status, answer, _ = plain.call("POST", "/v1/chat/completions", body)
    assert status == 400 and "half a surrogate pair" in answer["error"]["message"]
