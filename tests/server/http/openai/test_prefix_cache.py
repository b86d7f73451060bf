"""What calls say of the prefix cache and of drafts, and are told of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import openai

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


def test_a_salt_arrives(plain: Plain, running: FakeEngine) -> None:
    """And a key for caches, which is a hint for routers, changes nothing."""
    for salt in ("", "me", "\0", "s" * 256, "\U0001f98a" * 256, None):
        own = {"cache_salt": salt, "max_tokens": 1, "prompt_cache_key": "mine"}
        for path, what in (("completions", {"prompt": ["a", "b"]}), ("chat/completions", {})):
            body = {**(what or {"messages": CHAT}), **own}
            assert plain.call("POST", f"/v1/{path}", body)[0] == 200
        assert [request.cache_salt for request in running.requests[-3:]] == [salt or ""] * 3


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


SPECULATING = dataclasses.replace(INFO, speculates=True)


def drafted(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_usage_says_how_many_drafts_were_right(client: openai.OpenAI, running: FakeEngine) -> None:
    asked: Any = {"model": "fake", "max_tokens": 2}
    assert drafted(client.completions.create(prompt="hello", **asked).usage) == (0, 0)
    running.drafts = 3, 1
    assert drafted(client.completions.create(prompt="hello", n=2, **asked).usage) == (6, 2)
    chat = {**asked, "messages": CHAT}
    assert drafted(client.chat.completions.create(**chat).usage) == (3, 1)
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(**chat)
    assert drafted(last.usage) == (3, 1)


def test_a_prediction_arrives(plain: Plain, running: FakeEngine) -> None:
    running.served = SPECULATING
    long = 3000 * "long "  # encoded off the event loop
    parts = [{"type": "text", "text": "so "}, {"type": "text", "text": "it is"}]
    for content, text in ((parts, "so it is"), ("", ""), ("\0", "\0"), (long, long)):
        body = {"messages": CHAT, "max_tokens": 1}
        body["prediction"] = {"type": "content", "content": content}
        assert plain.call("POST", "/v1/chat/completions", body)[0] == 200
        assert running.requests[-1].prediction == tuple(map(ord, text))
