"""Log-probabilities of an echoed prompt, as lm-eval's loglikelihood asks for them."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from jaxserve.server.http.openai import choices
from tests.server.fake_engine import INFO, FakeEngine

IDS = [72, 101, 121]  # "Hey"
ECHOED = {"model": INFO.model, "prompt": [IDS], "echo": True, "logprobs": 1}


def logprobs_of(choice: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = choice.logprobs.model_dump()
    return found


def test_the_prompts_come_before_those_of_the_text(
    client: openai.OpenAI, running: FakeEngine
) -> None:
    """Token t of a prompt has -t / 8, see the fake engine; its own tokens have -0.5."""
    (choice,) = client.completions.create(**ECHOED, max_tokens=1).choices
    assert choice.text == "Hey w0"
    assert logprobs_of(choice) == {
        "tokens": ["H", "e", "y", "d"],
        "token_logprobs": [None, -101 / 8, -121 / 8, -0.5],
        "top_logprobs": [
            None,
            {"f": -102 / 8, "e": -101 / 8},
            {"z": -122 / 8, "y": -121 / 8},
            {"d": -0.5},
        ],
        "text_offset": [0, 1, 2, 3],
    }
    assert running.requests[0].sampling.prompt_logprobs == 1


def test_a_long_answer_is_whole(
    client: openai.OpenAI, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made beside the event loop, which has other answers to give."""
    threads, made = set[str](), choices.with_raw

    def seen(*arguments: Any) -> bytes:
        threads.add(threading.current_thread().name[:15])
        return made(*arguments)

    monkeypatch.setattr(choices, "with_raw", seen)
    prompts = ["a" * 3000, "b" * 3000]
    asked = {"model": INFO.model, "prompt": prompts, "echo": True, "max_tokens": 2, "n": 12}
    found = client.completions.create(**asked)
    assert [each.text for each in found.choices] == [
        f"{prompt} w0 w1" for prompt in prompts for _ in range(12)
    ]
    assert {each.logprobs for each in found.choices} == {None}
    chat = client.chat.completions.create(
        model=INFO.model,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=200,
        logprobs=True,
        top_logprobs=20,
    )
    (choice,) = chat.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [20] * 200
    assert choice.message.content == "".join(f" w{k}" for k in range(200))
    assert threads == {"jaxserve-beside"}


@pytest.mark.parametrize("prompt", ["H", [72]])
def test_a_prompt_of_one_token(client: openai.OpenAI, running: FakeEngine, prompt: Any) -> None:
    asked: dict[str, Any] = {**ECHOED, "prompt": prompt, "max_tokens": 1}
    (choice,) = client.completions.create(**asked).choices
    assert logprobs_of(choice)["tokens"] == ["H", "d"]
    assert logprobs_of(choice)["token_logprobs"] == [None, -0.5]


def test_a_special_token_takes_no_place_in_the_text(
    client: openai.OpenAI, running: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the one that begins it: the text has none."""
    decode = running.decode
    monkeypatch.setattr(running, "decode", lambda ids: decode([t for t in ids if t != 72]))
    (choice,) = client.completions.create(**ECHOED, max_tokens=0).choices
    assert choice.text == "ey"
    assert logprobs_of(choice)["tokens"] == ["H", "e", "y"]
    assert logprobs_of(choice)["text_offset"] == [0, 0, 1]


def test_max_tokens_0_is_the_prompt_alone(client: openai.OpenAI, running: FakeEngine) -> None:
    choices = client.completions.create(**ECHOED, max_tokens=0, stop=[" w0"])
    (choice,) = choices.choices
    assert (choice.text, choice.finish_reason) == ("Hey", "length")
    assert logprobs_of(choice)["token_logprobs"] == [None, -101 / 8, -121 / 8]
    assert choices.usage is not None
    assert (choices.usage.prompt_tokens, choices.usage.completion_tokens) == (3, 0)
    plain = client.completions.create(model=INFO.model, prompt="Hey", echo=True, max_tokens=0)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("Hey", None)
    assert running.requests[1].sampling.prompt_logprobs is None


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_each_of_several_in_a_stream(
    client: openai.OpenAI, running: FakeEngine, max_tokens: int
) -> None:
    asked: dict[str, Any] = {**ECHOED, "prompt": [[97, 98, 99], [72]], "n": 2}
    whole = client.completions.create(**asked, max_tokens=max_tokens)
    texts = dict.fromkeys(range(4), "")
    found: dict[int, dict[str, list[Any]]] = {number: {} for number in range(4)}
    for chunk in client.completions.create(**asked, max_tokens=max_tokens, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        for name, values in logprobs_of(choice).items():
            found[choice.index].setdefault(name, []).extend(values)
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert list(found.values()) == [logprobs_of(choice) for choice in whole.choices]
    assert [len(found[number]["tokens"]) for number in range(4)] == [
        3 + max_tokens,
        3 + max_tokens,
        1 + max_tokens,
        1 + max_tokens,
    ]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [5] * 4000, "logprobs": 20}, "logprobs", "half of server.stream_buffer_kib"),
        ({"prompt": [5] * 500, "logprobs": 20, "n": 16}, "logprobs", "n=16 times"),
        ({"prompt": [[5] * 2000] * 66}, "logprobs", "at most 262,144 values"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"max_tokens": 0, "extra_body": {"min_tokens": 1}}, "min_tokens", "at most 0"),
        ({"max_tokens": 0, "echo": False}, "max_tokens", "at least 1"),
    ],
)
def test_what_is_too_much_is_refused(
    client: openai.OpenAI, running: FakeEngine, fields: dict[str, Any], param: str, says: str
) -> None:
    asked: dict[str, Any] = {**ECHOED, "max_tokens": 1, **fields}
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        client.completions.create(**asked)
    assert refused.value.param == param
    assert not running.requests


def test_as_much_as_may_be_asked_for_arrives(client: openai.OpenAI, running: FakeEngine) -> None:
    """It is all there before anybody reads."""
    asked: dict[str, Any] = {**ECHOED, "prompt": [[5] * 2000], "logprobs": 20}
    (choice,) = client.completions.create(**asked, max_tokens=3).choices
    found = logprobs_of(choice)
    assert {len(values) for values in found.values()} == {2003}
    assert found["token_logprobs"][1:2000] == [-5 / 8] * 1999
