"""Stop strings across borders of tokens, and why a continuation ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.output import FinishReason
from jaxserve.engine.text.detokenizer import HFTokenizer, NullTokenizer
from jaxserve.engine.text.stop_conditions import ContinuationText, StopStrings
from jaxserve.sched.request import InvalidRequest, SamplingParams
from tests.engine.text.tokenizers_for_tests import byte_level

TOKENIZER = HFTokenizer(byte_level())
EOS = byte_level().token_to_id("</s>")
letters = st.text("ab€", max_size=4)
pieces_of_text = st.lists(letters, max_size=12)
stop_sets = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, stops: list[str], after: int = 0) -> str | None:
    """What comes before the first stop string complete after `after` characters, letter by
    letter; None if there is none."""
    for end in range(after + 1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return None


@settings(max_examples=400, deadline=None)
@given(pieces_of_text, stop_sets, st.integers(0, 6))
def test_stop_strings_are_found_however_the_text_is_cut(
    pieces: list[str], stops: list[str], unarmed: int
) -> None:
    matcher, shown, found = StopStrings(stops), "", False
    for i, piece in enumerate(pieces):
        free, found = matcher.feed(piece, armed=i >= unarmed)
        shown += free
        if found:
            break
        held = "".join(pieces[: i + 1])[len(shown) :]
        assert not held or any(len(s) > len(held) and s.startswith(held) for s in stops)
    text, before = "".join(pieces), len("".join(pieces[:unarmed]))
    expected = cut(text, stops, before)
    assert found == (expected is not None) == bool(matcher.found)
    if expected is None:
        assert shown + matcher.flush() == text
        assert matcher.flush() == ""
    else:
        # A match may have begun while unarmed, but what is shown is never taken back.
        assert shown == expected
        assert matcher.found in stops and text.startswith(shown + matcher.found)
        assert len(stops) > 1 or unarmed or shown == text[: text.find(stops[0])]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*TOKENIZER.encode("ab€", special=False), EOS]), max_size=20),
    stop_sets,
    st.integers(0, 8),
    st.integers(1, 20),
    st.booleans(),
)
def test_what_was_said_is_said_again_at_once_as_token_by_token(
    tokens: list[int], stops: list[str], min_tokens: int, max_tokens: int, ignore_eos: bool
) -> None:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop=tuple(stops),
        ignore_eos=ignore_eos,
    )
    one, other = (ContinuationText(TOKENIZER, sampling, (EOS,)) for _ in range(2))
    said, reason, over = "", None, False
    for token in tokens:
        over = reason is not None
        if over:
            break
        more, reason = one.feed(token)
        said += more
    if over:
        with pytest.raises(InvalidRequest, match="goes on after the end"):
            other.replay(tokens)
        return
    assert other.replay(tokens) == (said, reason) and other.stop_string == one.stop_string
    for _ in range(max_tokens if reason is None else 0):
        if reason is None:
            more, reason = one.feed(5)
            assert other.feed(5) == (more, reason)


def test_a_long_answer_is_not_said_again_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waits for it."""
    text, fed = ContinuationText(TOKENIZER, SamplingParams(max_tokens=100_000), (EOS,)), list[int]()
    feed = text._detokenizer.feed

    def noted(tokens: Any) -> str:
        fed.append(len(tokens))
        return feed(tokens)

    monkeypatch.setattr(text._detokenizer, "feed", noted)
    said, _ = text.replay(TOKENIZER.encode("ab€" * 3000, special=False))
    assert said == "ab€" * 3000 and len(fed) <= 3


def run(
    text: str, count: int | None = None, end: bool = False, **sampling: object
) -> tuple[str, FinishReason | None, int]:
    """Feeds the tokens of a text (and EOS) until it ends -> text, reason, tokens used."""
    ids = byte_level().encode(text, add_special_tokens=False).ids[:count] + [EOS] * end
    params = SamplingParams(**{"max_tokens": 1000, **sampling})  # type: ignore[arg-type]
    stream = ContinuationText(TOKENIZER, params, (EOS,))
    shown = ""
    for used, token in enumerate(ids, 1):
        delta, reason = stream.feed(token)
        shown += delta
        if reason is not None:
            return shown, reason, used
    return shown + stream.flush(), None, len(ids)


STORY = "Once upon a time, a fox 🦊 lived near the mill. The end. More."


@pytest.mark.parametrize("stop", ["🦊", " fox 🦊 li", "The end.", "O"])
def test_text_ends_before_a_stop_string(stop: str) -> None:
    text, reason, _ = run(STORY, stop=("nowhere", stop))
    assert text == STORY[: STORY.find(stop)]
    assert reason is FinishReason.STOP


def test_without_a_match_nothing_is_lost() -> None:
    assert run(STORY, stop=("More!", "end. Morf"))[:2] == (STORY, None)
    size = len(byte_level().encode(STORY, add_special_tokens=False).ids)
    text, reason, used = run(STORY, stop=("More!",), max_tokens=size)
    assert (text, reason, used) == (STORY, FinishReason.LENGTH, size)


def test_end_tokens_count_and_say_nothing() -> None:
    size = len(byte_level().encode("a fox", add_special_tokens=False).ids)
    assert run("a fox", end=True) == ("a fox", FinishReason.STOP, size + 1)
    assert run("a fox", end=True, ignore_eos=True) == ("a fox", None, size + 1)
    assert run("a fox", end=True, max_tokens=size + 1)[1] is FinishReason.STOP
    assert run("a fox", end=True, max_tokens=size) == ("a fox", FinishReason.LENGTH, size)
    fox = byte_level().encode(" fox", add_special_tokens=False).ids
    stopped = run("a fox", stop_token_ids=(fox[0],), ignore_eos=True)
    assert stopped == ("a", FinishReason.STOP, size - len(fox) + 1)
    assert run("a fo", end=True, stop=("fox",))[:2] == ("a fo", FinishReason.STOP), "it was held"


def test_an_unfinished_character_ends_as_one_replacement() -> None:
    mark = byte_level().encode("🦊", add_special_tokens=False).ids
    if len(mark) == 1:  # learnt whole: take its bytes
        mark = [next(i for i in range(500) if TOKENIZER.token_bytes(i) == b"\xf0")]
    stream = ContinuationText(TOKENIZER, SamplingParams(max_tokens=1), (EOS,))
    assert stream.feed(mark[0]) == ("\ufffd", FinishReason.LENGTH)


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_min_tokens_holds_for_stop_strings_and_tokens(min_tokens: int) -> None:
    text, reason, used = run("a" * 7 + "b" * 60, stop=("b",), min_tokens=min_tokens)
    assert reason is FinishReason.STOP
    assert used > min_tokens
    assert text.startswith("a" * 7)
    ids = byte_level().encode("a" * 7 + "b" * 60, add_special_tokens=False).ids
    assert text in TOKENIZER.decode(ids)
    _, reason, used = run("", end=True, min_tokens=min_tokens)
    assert (reason is FinishReason.STOP) == (min_tokens == 0)


def test_text_goes_on_after_a_stop_string_within_min_tokens() -> None:
    size = len(byte_level().encode("x. y", add_special_tokens=False).ids)
    text, reason, _ = run("x. y. z", stop=(".",), min_tokens=size)
    assert (text, reason) == ("x. y", FinishReason.STOP)


def test_flush_gives_what_is_held_when_ended_from_outside() -> None:
    ids = byte_level().encode("the en", add_special_tokens=False).ids
    stream = ContinuationText(TOKENIZER, SamplingParams(stop=("the end",)), (EOS,))
    assert [stream.feed(token) for token in ids] == [("", None)] * len(ids)
    assert stream.flush() == "the en"
    assert stream.flush() == ""


def test_a_continuation_keeps_its_leading_space_after_a_prompt() -> None:
    prompt = TOKENIZER.encode("Once")
    stream = ContinuationText(TOKENIZER, SamplingParams(), (EOS,), prompt)
    ids = byte_level().encode(" upon", add_special_tokens=False).ids
    assert "".join(stream.feed(token)[0] for token in ids) == " upon"


def test_without_a_tokenizer_ends_are_found_all_the_same() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(8,), stop=("x",))
    stream = ContinuationText(NullTokenizer(), params, (EOS,))
    assert stream.feed(5) == ("", None)
    assert stream.feed(8) == ("", FinishReason.STOP)
    stream = ContinuationText(NullTokenizer(), params, (EOS,))
    assert [stream.feed(5)[1] for _ in range(3)] == [None, None, FinishReason.LENGTH]
