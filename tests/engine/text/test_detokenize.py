"""Incremental detokenisation against decoding everything at once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from jaxserve.config import ConfigError
from jaxserve.engine.text.detokenizer import HFTokenizer, NullTokenizer, load_tokenizer
from jaxserve.sched.request import InvalidRequest
from tests.engine.text.tokenizers_for_tests import TEXTS, byte_fallback, byte_level

LEVEL, FALLBACK = HFTokenizer(byte_level()), HFTokenizer(byte_fallback())
LEVEL_SIZE, FALLBACK_SIZE = (t.get_vocab_size() for t in (byte_level(), byte_fallback()))
# Hypothesis draws constants of the code at hand too, the names of special tokens among them: those
# are no text, and which are drawn depends on what else the process has loaded.
SPECIAL = ("<unk>", "<pad>", "<s>", "</s>", "<tool é>")
texts = st.one_of(
    st.text(max_size=30), st.lists(st.sampled_from(TEXTS), max_size=2).map("".join)
).filter(lambda text: not any(name in text for name in SPECIAL))


def deltas(tokenizer: HFTokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = tokenizer.detokenizer(prompt or [])
    return [*(stream.feed([token]) for token in ids), stream.flush()]


def fallback_ids(text: str) -> list[int]:
    """Tokens as the model could write them: words it knows, else bytes; longest first. `text` names
    no special token."""
    vocab = byte_fallback().get_vocab()
    ids, text = [], text.replace(" ", "▁")
    while text:
        size = max((n for n in range(1, 6) if text[:n] in vocab), default=0)
        if size:
            ids.append(vocab[text[:size]])
        else:
            ids += [vocab[f"<0x{byte:02X}>"] for byte in text[0].encode()]
        text = text[max(size, 1) :]
    return ids


@pytest.mark.promise(6)
@settings(max_examples=150, deadline=None)
@given(texts, texts)
def test_byte_level_deltas_are_the_text(prompt: str, text: str) -> None:
    ids = byte_level().encode(text, add_special_tokens=False).ids
    said = deltas(LEVEL, ids, LEVEL.encode(prompt))
    assert "".join(said) == text
    assert all("\ufffd" not in delta for delta in said) or "\ufffd" in text
    assert said[-1] == ""


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, LEVEL_SIZE + 3), max_size=40))
def test_byte_level_agrees_with_decoding_at_once_on_any_tokens(ids: list[int]) -> None:
    assert "".join(deltas(LEVEL, ids)) == LEVEL.decode(ids)


@pytest.mark.promise(6)
@settings(max_examples=150, deadline=None)
@example("\ufffd", "")
@example("", "\ufffd\ufffd")
@given(texts, texts)
def test_byte_fallback_deltas_are_the_text(prompt: str, text: str) -> None:
    before, ids = fallback_ids("x" + prompt), fallback_ids(text)
    said = deltas(FALLBACK, ids, before)
    text = text.replace("▁", " ")
    assert "".join(said) == text
    assert all("\ufffd" not in delta for delta in said) or "\ufffd" in text
    assert said[-1] == "" or text.endswith("\ufffd")
    # Without a prompt the first space is the decoder's own, and only the first.
    assert "".join(deltas(FALLBACK, ids)) == FALLBACK.decode(ids) == text.removeprefix(" ")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(259, FALLBACK_SIZE + 2), max_size=20), st.lists(st.integers(0, 2)))
def test_special_and_unknown_tokens_take_no_context_away(ids: list[int], marks: list[int]) -> None:
    mixed = list(ids)
    for i, mark in enumerate(marks):
        mixed.insert((3 * i) % (len(mixed) + 1), mark)
    assert "".join(deltas(FALLBACK, mixed)) == FALLBACK.decode(ids)


@settings(max_examples=100, deadline=None)
@example([3 + byte for byte in b"\xc2\x80\xc2\x80\x80\x00\x00"])
@given(st.lists(st.integers(0, FALLBACK_SIZE - 1), max_size=60))
def test_no_bytes_stall_a_stream(ids: list[int]) -> None:
    stream = FALLBACK.detokenizer()
    text, whole = "".join(stream.feed([token]) for token in ids), FALLBACK.decode(ids)
    # Decoded at once, a byte that fits nowhere spoils the characters right before it. They have
    # been said by then.
    assert len(whole) - len(text) <= 4 or not whole.startswith(text)
    tail = stream.feed([*fallback_ids("!" * 4)])
    assert tail.endswith("!!!!") and stream.flush() == ""


def test_a_character_is_said_when_its_last_byte_has_come() -> None:
    fox = "🦊"
    byte_ids = [byte_fallback().token_to_id(f"<0x{byte:02X}>") for byte in fox.encode()]
    assert deltas(FALLBACK, byte_ids) == ["", "", "", fox, ""]
    assert "".join(deltas(FALLBACK, byte_ids[:2])) == FALLBACK.decode(byte_ids[:2])
    alphabet = {LEVEL.token_bytes(i): i for i in range(LEVEL_SIZE)}
    level_ids = [alphabet[bytes([byte])] for byte in fox.encode()]
    assert deltas(LEVEL, level_ids) == ["", "", "", fox, ""]
    assert deltas(LEVEL, level_ids[2:], level_ids[:2]) == ["", fox, ""]
    assert deltas(FALLBACK, byte_ids[2:], byte_ids * 2 + byte_ids[:2]) == ["", fox, ""]
    assert deltas(LEVEL, level_ids[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_are_silent_and_added_ones_are_not() -> None:
    tool = byte_level().token_to_id("<tool é>")
    ids = LEVEL.encode("a fox")
    assert ids[0] == byte_level().token_to_id("</s>")
    assert "".join(deltas(LEVEL, [*ids, 1, tool, 0, *ids])) == "a fox<tool é>a fox"


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    ids = LEVEL.encode("a fox 🧿", special=False)
    stream = LEVEL.detokenizer([], [1])
    text = (
        "".join(stream.feed((token,)) for token in [1, *ids, 1, 0, *ids[:-1], 1]) + stream.flush()
    )
    assert text == "</s>a fox 🧿</s>a fox " + "\ufffd" + "</s>"
    ids = fallback_ids("Once upon a fox")
    stream = FALLBACK.detokenizer(ids, [2])
    text = "".join(stream.feed((token,)) for token in [*ids, 2, 1, *ids]) + stream.flush()
    assert text == "Once upon a fox</s>Once upon a fox"


def test_a_token_costs_the_same_late_as_early() -> None:
    """Work is counted in tokens handed to the decoder, not in seconds."""

    class Counting(HFTokenizer):
        handed = 0

        def decode(self, token_ids: object) -> str:
            Counting.handed += len(list(token_ids))  # type: ignore[call-overload]
            return super().decode(token_ids)  # type: ignore[arg-type]

    stream = Counting(byte_fallback()).detokenizer()
    per_token = []
    for token in fallback_ids("Once upon a fox 水 🦊 ÿ! " * 200):
        Counting.handed = 0
        stream.feed([token])
        per_token.append(Counting.handed)
    assert max(per_token) <= 12


def test_a_piece_is_what_it_is_behind_other_text() -> None:
    vocabulary = byte_fallback().get_vocab()
    expected = {"▁": b" ", "▁upon": b" upon", "fox": b"fox", "▁fox": b" fox", "<0xF0>": b"\xf0",
                "<0x41>": b"A", "水": "水".encode(), "</s>": b"</s>"}  # fmt: skip
    assert {token: FALLBACK.piece(vocabulary[token]) for token in expected} == expected
    ids = fallback_ids("Once upon a 🦊 水 é")
    assert b"".join(map(FALLBACK.piece, ids)) == "Once upon a 🦊 水 é".encode()
    assert FALLBACK.piece(FALLBACK_SIZE) == b""
    words = Tokenizer(models.WordPiece({"the": 0, "##ing": 1, ".": 2, "[UNK]": 3}))
    words.decoder = decoders.WordPiece()
    pieces = [HFTokenizer(words).piece(i) for i in range(3)]
    assert pieces == [b" the", b"ing", b"."]


def _with(**parts: Any) -> str:
    return json.dumps(json.loads(byte_level().to_str()) | parts)


def _cut(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {**split, "invert": False}


@pytest.mark.parametrize(
    "broken",
    [
        {"pre_tokenizer": _cut(r"(a+)+$")},
        {"pre_tokenizer": _cut("(")},
        *(
            {
                "added_tokens": [],
                "normalizer": {
                    "type": "Precompiled",
                    "precompiled_charsmap": base64.b64encode(charsmap).decode(),
                },
            }
            for charsmap in (b"", b"\x08\0\0\0" + b"\xff" * 8, b"\x10\0\0\0" + b"\1" * 20)
        ),
    ],
)
def test_a_tokenizer_that_panics_is_refused_at_the_start(
    broken: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(_with(**broken))
    with pytest.raises(ConfigError, match=r"^model\.path: cannot read the tokenizer .*json: \S"):
        load_tokenizer(tmp_path)


def test_a_text_that_a_tokenizer_panics_at_ends_that_request_alone(tmp_path: Path) -> None:
    """A pattern that tries every way to cut a run of a letter."""
    (tmp_path / "tokenizer.json").write_text(_with(pre_tokenizer=_cut(r"(c+)+$")))
    found = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match=r"^prompt: the model's tokenizer fails on "):
        found.encode("c" * 50 + "!")
    assert found.decode(found.encode("cat")) == "cat"
    with pytest.raises(UnicodeEncodeError):
        found.encode("half a pair: \ud800")


def test_loading(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"^model\.path: there is no .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"^model\.path: cannot read the tokenizer .*json"):
        load_tokenizer(tmp_path)
    byte_level().save(str(file))
    for path in (tmp_path, str(file)):
        loaded = load_tokenizer(path)
        assert loaded.decode(loaded.encode("ein Füchslein 🦊")) == "ein Füchslein 🦊"
        assert loaded.encode("x") == Tokenizer.from_file(str(file)).encode("x").ids


def test_a_tokenizer_of_another_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was added to a vocabulary has no embedding in some models, and is never used."""
    file, made = tmp_path / "tokenizer.json", byte_level()
    made.save(str(file))
    plain, whole = (
        1 + max(made.get_vocab(with_added_tokens=added).values()) for added in (False, True)
    )
    assert plain < whole
    load_tokenizer(file, whole)
    assert not caplog.records
    load_tokenizer(file, plain)
    (record,) = caplog.records
    assert f"{file} has an id {whole - 1} (" in record.getMessage()
    problem = rf"{file} has an id {plain - 1} \('.+'\), but config.json: vocab_size is {plain - 1}$"
    with pytest.raises(ConfigError, match=r"^model\.path: " + problem):
        load_tokenizer(file, plain - 1)


def test_without_a_tokenizer_there_is_no_text() -> None:
    for path in (None, ""):
        nothing = load_tokenizer(path)
        assert isinstance(nothing, NullTokenizer)
        stream = nothing.detokenizer([1, 2])
        assert stream.feed([5, 6]) == stream.flush() == nothing.decode([5]) == ""
        with pytest.raises(InvalidRequest, match=r"^text: this model has no tokenizer") as error:
            nothing.encode("hello")
        assert error.value.field_name == "text"
