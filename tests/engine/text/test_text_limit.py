"""How long a text may be for its tokens to fit, known from its bytes: never too little."""

from __future__ import annotations

import json
import sys
import threading
import time
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from jaxserve.engine.text.detokenizer import HFTokenizer
from jaxserve.engine.text.text_limit import TextLimit, text_limit
from jaxserve.sched.request import InvalidRequest
from tests.engine.text.tokenizers_for_tests import TEXTS, byte_fallback, byte_level


def limit_of(tokenizer: Tokenizer) -> TextLimit | None:
    return text_limit(json.loads(tokenizer.to_str()))


def changed(tokenizer: Tokenizer, **parts: object) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


def swallowing() -> Tokenizer:
    """With a token that takes the blanks before it."""
    copy = changed(byte_level())
    copy.add_tokens([AddedToken("<mask>", lstrip=True)])
    return copy


MARK = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
LIMITED = {
    "bytes": byte_level(),
    "bytes, composed": changed(byte_level(), normalizer=normalizers.NFC()),
    "bytes, decomposed": changed(byte_level(), normalizer=normalizers.NFD()),
    "bytes, two that become one": changed(
        byte_level(), normalizer=normalizers.Replace("\r\n", "\n")
    ),
    "bytes, swallowing": swallowing(),
    "fallback": changed(byte_fallback(), normalizer=MARK),
}
texts = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(TEXTS), max_size=4).map("".join),
    st.text(alphabet="K\u037e;\u03b9\u0308\u0301\r\n \u212b\U0002f800", max_size=200),
    st.lists(st.sampled_from(["<mask>", " ", "the"]), max_size=40).map("".join),
)


@pytest.mark.parametrize("name", LIMITED)
@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_a_text_that_fits_is_never_too_long(name: str, text: str) -> None:
    tokenizer = LIMITED[name]
    limit = limit_of(tokenizer)
    assert limit is not None
    tokens = len(tokenizer.encode(text).ids)
    assert limit.exceeded(text, tokens) is None
    whole = HFTokenizer(changed(tokenizer))
    assert whole.encode(text, max(tokens, 1)) == tokenizer.encode(text).ids
    if tokens > 1:
        with pytest.raises(InvalidRequest, match=f"prompt: has .*at most {tokens - 1} "):
            whole.encode(text, tokens - 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bytes, swallowing", " " * 10_000 + "<mask>"),
        ("bytes, composed", "\u03b9\u0308\u0301" * 1000),
        ("bytes, decomposed", "\u212a" * 1000),
        ("bytes, two that become one", "\r\n" * 1000),
    ],
)
def test_text_that_shrinks_fits(name: str, text: str) -> None:
    tokens = HFTokenizer(changed(LIMITED[name])).encode(text)
    limit = limit_of(LIMITED[name])
    assert limit is not None and limit.exceeded(text, len(tokens)) is None


@pytest.mark.parametrize("name", sorted(set(LIMITED) - {"bytes, swallowing"}))
def test_no_text_of_ten_times_the_length_is_encoded(name: str) -> None:
    whole = HFTokenizer(changed(LIMITED[name]))
    most = whole.max_bytes(50)
    assert most is not None
    whole._tokenizer = None  # type: ignore[assignment]  # whoever encodes fails
    for text in ("x" * (most + 1), "é" * (most // 2 + 1)):
        with pytest.raises(InvalidRequest, match=f"at most {most} bytes can be served"):
            whole.encode(text, 50)


def with_runs(**parts: object) -> Tokenizer:
    """As large vocabularies are: with long runs of blanks and of signs."""
    copy = changed(byte_level(), **parts)
    spec = json.loads(copy.to_str())
    for run in ("Ġ" * 128, "=" * 128):
        spec["model"]["vocab"][run] = len(spec["model"]["vocab"]) + len(spec["added_tokens"])
    return Tokenizer.from_str(json.dumps(spec))


def words() -> Tokenizer:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "fox": 2, "##es": 3}))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_tokens(["once upon a time"])
    return made


def pieces() -> Tokenizer:
    scores = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("fox", -2.0), ("a", -3.0)]
    made = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


BY_KIND = {
    "runs": with_runs(),
    "runs, composed": with_runs(normalizer=normalizers.NFC()),
    "runs, decomposed": with_runs(normalizer=normalizers.NFD()),
    "swallowing": swallowing(),
    "fallback": changed(byte_fallback(), normalizer=MARK),
    "replaced": changed(byte_level(), normalizer=normalizers.Replace("fox f", "é")),
    "words": words(),
    "pieces": pieces(),
}
spaced = st.lists(st.sampled_from(["once upon a time", " ", "fox f"])).map("".join)
odd = st.text(
    alphabet="aK9=\u0301\u0338\u212a\u037e\u1fef\u2581 \t\n\x0b\x00\u00a0\u4e00\uac00\u11a8",
    max_size=200,
)


@pytest.mark.promise(42)
@pytest.mark.parametrize("name", BY_KIND)
@settings(max_examples=50, deadline=None)
@given(text=st.one_of(texts, odd, spaced))
def test_a_text_that_fits_has_not_too_much_of_any_kind(name: str, text: str) -> None:
    limit = limit_of(BY_KIND[name])
    assert limit is not None and any(limit.most)
    own = sum(BY_KIND[name].encode(text, add_special_tokens=False).attention_mask)
    assert limit.exceeded(text, own) is None


FLOODS = {
    "words": "x y ",
    "letters": "a",
    "digits": "7",
    "ideographs": "水",
    "Cyrillic": "лиса ",
    "marks": "e\u0301 ",
}


@pytest.mark.parametrize(
    ("name", "floods"),
    [
        ("runs", FLOODS),
        ("runs, composed", FLOODS),
        ("swallowing", FLOODS),
        ("words", ["words"]),
        ("pieces", ["words"]),
    ],
)
def test_floods_are_refused_before_they_are_encoded(name: str, floods: Sequence[str]) -> None:
    """Though by the longest token alone, or by none, they might fit."""
    whole, tokens = HFTokenizer(changed(BY_KIND[name])), 1000
    whole._tokenizer = None  # type: ignore[assignment]  # whoever encodes fails
    for flood in floods:
        text = FLOODS[flood] * (100_000 // len(FLOODS[flood].encode()))
        if name == "swallowing":
            text += "<mask>"
        with pytest.raises(InvalidRequest, match=f"prompt: has more than {tokens} tokens in"):
            whole.encode(text, tokens)


def test_long_runs_that_are_tokens_fit() -> None:
    whole = HFTokenizer(with_runs())
    for run in (" " * 128, "=" * 128):
        assert len(whole.encode(run * 900, special=False)) > 0
        limit = limit_of(with_runs())
        assert limit is not None and limit.exceeded(run * 900, 1000) is None


def test_the_longest_token_is_what_counts() -> None:
    longest = max(byte_level().get_vocab(), key=len)
    assert limit_of(byte_level()) == TextLimit(len(longest))
    assert limit_of(swallowing()) == TextLimit(len(longest), ("<mask>",))
    longer = changed(byte_level())
    longer.add_tokens(["<|a token of forty-one bytes, all told-|>"])
    assert limit_of(longer) == TextLimit(41)


def unknown_words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))


@pytest.mark.parametrize(
    "tokenizer",
    [
        unknown_words(),
        changed(byte_fallback(), model=models.BPE({"a": 0}, [], unk_token="a")),
        changed(byte_level(), normalizer=normalizers.StripAccents()),
        changed(byte_level(), normalizer=normalizers.Strip()),
        changed(byte_level(), normalizer=normalizers.Replace("  ", "")),
        changed(byte_level(), pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        changed(
            byte_level(),
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
            ),
        ),
        changed(swallowing(), normalizer=normalizers.NFC()),
    ],
)
def test_where_text_may_vanish_there_is_no_limit(tokenizer: Tokenizer) -> None:
    assert limit_of(tokenizer) is None
    assert HFTokenizer(changed(tokenizer)).max_bytes(1) is None


def test_unicode_shrinks_no_more_than_is_assumed() -> None:
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        size, apart = len(char.encode()), unicodedata.normalize("NFD", char)
        assert size <= 3 * len(apart.encode())
        assert len(apart.encode()) <= 3 * size


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """Of the time that a text takes, this thread stands still for a part at most: in one of
    several tries, for others may want the processor, too."""
    whole, text = HFTokenizer(changed(byte_level())), "".join(TEXTS) * 1000
    tries: list[tuple[float, float]] = []

    def encode() -> None:
        for _ in range(5):
            begin = time.perf_counter()
            whole.encode(text)
            tries.append((begin, time.perf_counter()))

    thread = threading.Thread(target=encode)
    gaps, last = [], time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        if now - last > 1e-3:
            gaps.append((last, now))
        last = now
    still = [
        max((min(end, until) - max(begin, since) for since, until in gaps), default=0)
        / (end - begin)
        for begin, end in tries
    ]
    assert len(still) == 5 and min(still) < 0.6
