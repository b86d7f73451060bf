"""Names, bytes and places of tokens beside their log-probabilities; and those of an echoed prompt,
as lm-eval's loglikelihood asks for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from jaxserve.engine.output import TokenLogprobs
from jaxserve.engine.text.detokenizer import HFTokenizer
from jaxserve.server.http.openai import choices
from jaxserve.server.http.openai.logprobs import CompletionLogprobs, chat_logprobs
from tests.engine.text.tokenizers_for_tests import byte_fallback, byte_level
from tests.server.fake_engine import INFO, FakeEngine

FOX = ["<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>"]
FOX_NAMES = ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x8a"]
VOCABULARY = byte_fallback().get_vocab()


def engine_of(tokenizer: HFTokenizer) -> Any:
    return SimpleNamespace(detokenizer=tokenizer.detokenizer, token_bytes=tokenizer.piece)


SENTENCEPIECE = engine_of(HFTokenizer(byte_fallback()))


def ids_of(*tokens: str) -> list[int]:
    return [VOCABULARY[token] for token in tokens]


def entries(ids: list[int], top: list[int] | None = None) -> list[TokenLogprobs]:
    likely = tuple((token, -float(place)) for place, token in enumerate(top or ()))
    return [TokenLogprobs(token, -1.0, likely) for token in ids]


@pytest.mark.parametrize(
    ("prompt", "tokens", "names", "places"),
    [
        # In the text behind a prompt the first space is there, and behind none it is not.
        (["▁a"], ["▁Once", "▁upon"], [" Once", " upon"], [0, 5]),
        (["<s>"], ["▁Once", "▁upon"], [" Once", " upon"], [0, 4]),
        (["▁a"], ["▁", "▁fox", "es"], [" ", " fox", "es"], [0, 1, 5]),
        (["▁a"], [*FOX, "▁fox", "!"], [*FOX_NAMES, " fox", "!"], [0, 0, 0, 0, 1, 5]),
        (["▁a"], ["水", "</s>", "é"], ["水", "</s>", "é"], [0, 1, 1]),
        (["▁a"], ["<0x41>", "!"], ["A", "!"], [0, 1]),
    ],
)
def test_places_are_characters_of_the_text(
    prompt: list[str], tokens: list[str], names: list[str], places: list[int]
) -> None:
    told = CompletionLogprobs(SENTENCEPIECE, ids_of(*prompt))
    pieces = [told.as_dict(entries([token])) for token in ids_of(*tokens)]
    assert [piece["tokens"] for piece in pieces] == [[name] for name in names]
    assert [place for piece in pieces for place in piece["text_offset"]] == places


def test_the_chosen_token_is_among_the_likely_ones() -> None:
    chosen, a, b = ids_of("▁upon", "▁a", "▁fox")
    told = CompletionLogprobs(SENTENCEPIECE, [a])
    found = told.as_dict([*entries([chosen], [a, b]), *entries([a], [a, b]), *entries([chosen])])
    assert found["top_logprobs"] == [
        {" a": 0.0, " fox": -1.0, " upon": -1.0},
        {" a": 0.0, " fox": -1.0},
        {" upon": -1.0},
    ]


def test_places_where_the_text_begins_with_the_prompt() -> None:
    told = CompletionLogprobs(SENTENCEPIECE, ids_of("<s>", "▁Once", *FOX), echo=True)
    found = told.as_dict(entries(ids_of("▁Once", *FOX, "▁upon", "!")))
    assert found["tokens"] == ["<s>", " Once", *FOX_NAMES, " upon", "!"]
    assert found["text_offset"] == [0, 0, 4, 4, 4, 4, 5, 10]
    assert found["token_logprobs"] == [None, *[-1.0] * 7]


def test_places_of_a_byte_level_vocabulary() -> None:
    tokenizer = HFTokenizer(byte_level())
    text = "a 🦊🏡 水 end"
    ids = tokenizer.encode(text, special=False)
    found = CompletionLogprobs(engine_of(tokenizer), ids).as_dict(entries(ids))
    whole = [tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids))]
    assert found["text_offset"] == list(map(len, whole))
    assert found["text_offset"][-1] == text.rindex(found["tokens"][-1])


def test_each_alternative_has_a_name_of_its_own() -> None:
    letter, byte = VOCABULARY["!"], VOCABULARY["<0x21>"]
    top = [letter, byte, *ids_of("▁fox", "fox", *FOX)]
    (found,) = CompletionLogprobs(SENTENCEPIECE, [5]).as_dict(entries([letter], top))[
        "top_logprobs"
    ]
    assert list(found) == ["!", f"token_id:{byte}", " fox", "fox", *FOX_NAMES]
    assert list(found.values()) == [-float(place) for place in range(len(top))]


def test_bytes_of_a_chat() -> None:
    ids = ids_of("▁upon", "▁", *FOX)
    found = chat_logprobs(SENTENCEPIECE, entries(ids, ids))["content"]
    for told in (found, found[0]["top_logprobs"]):
        assert [each["token"] for each in told] == [" upon", " ", *FOX_NAMES]
        assert b"".join(bytes(each["bytes"]) for each in told) == " upon 🦊".encode()


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
