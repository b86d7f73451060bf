"""What calls say of the prefix cache, and are told of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import openai
import pytest

from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.conftest import Plain

CHAT: Any = [{"role": "user", "content": "Hi"}]


def told(usage: Any) -> int:
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    found: int = usage.prompt_tokens_details.cached_tokens
    return found


def test_usage_says_what_was_found(client: openai.OpenAI, running: FakeEngine) -> None:
    def complete(prompt: Any, n: int = 1) -> int:
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, n=n)
        return told(answer.usage)

    assert complete("hello") == 0
    running.cached_tokens = 4
    assert complete("hello") == 4
    assert complete("hello", n=3) == 4, "a prompt counts once"
    assert complete(["hello", "hi"], n=2) == 4 + 1
    chat = client.chat.completions.create(model="fake", messages=CHAT, max_tokens=2, n=2)
    assert told(chat.usage) == 4


def test_streams_say_it_where_they_say_usage(client: openai.OpenAI, running: FakeEngine) -> None:
    running.cached_tokens = 4
    asked: Any = {"model": "fake", "max_tokens": 2, "n": 2, "stream": True}
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
        asked["stream_options"] = options
        *_, last = client.completions.create(prompt="hello", **asked)
        assert told(last.usage) == 4
        *_, last = client.chat.completions.create(messages=CHAT, **asked)
        assert told(last.usage) == 4


@pytest.mark.parametrize("salt", ["", "me", "\0", "s" * 256, "\U0001f98a" * 256, None])
def test_a_salt_arrives(plain: Plain, running: FakeEngine, salt: str | None) -> None:
    """And a key for caches, which is a hint for routers, changes nothing."""
    own = {"cache_salt": salt, "max_tokens": 1, "prompt_cache_key": "mine"}
    for path, what in (("completions", {"prompt": ["a", "b"]}), ("chat/completions", {})):
        body = {**(what or {"messages": CHAT}), **own}
        assert plain.call("POST", f"/v1/{path}", body)[0] == 200
    assert [request.cache_salt for request in running.requests] == [salt or ""] * 3


def test_a_reset_is_the_engines(plain: Plain, engine: FakeEngine) -> None:
    status, answer, _ = plain.call("POST", "/reset_prefix_cache")
    assert (status, answer["error"]["code"]) == (409, "prefix_caching_off")
    engine.served = dataclasses.replace(INFO, prefix_caching=True)
    for body in (None, {}, b"\xff not JSON"):
        assert plain.call("POST", "/reset_prefix_cache", body)[:2] == (200, None)
    assert engine.resets == 3
    assert plain.call("GET", "/reset_prefix_cache")[0] == 405
    engine.fail(ValueError("gone"))
    status, answer, _ = plain.call("POST", "/reset_prefix_cache")
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert engine.resets == 3
