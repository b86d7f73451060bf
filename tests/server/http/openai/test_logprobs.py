"""Names, bytes and places of tokens, beside their log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.engine.output import TokenLogprobs
from jaxserve.engine.text.detokenizer import HFTokenizer
from jaxserve.server.http.openai.logprobs import CompletionLogprobs, chat_logprobs
from tests.engine.text.tokenizers_for_tests import byte_fallback, byte_level

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
