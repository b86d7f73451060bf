"""Keys as lines of text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.access.key_file import (
    BEST_EFFORT,
    LIMITS,
    MAX_LIMIT,
    NAME,
    TIERS,
    ApiKey,
    digest_of,
    make_key,
    new_secret,
    parse_line,
    parse_lines,
)

LIMIT = st.integers(0, MAX_LIMIT)
HASH = digest_of(b"a")


ADAPTERS = st.sampled_from(["", "-", "law", "law,sql-2.1"])
OTHERS = {
    "tier": st.sampled_from(TIERS),
    "class": st.sampled_from(["", "chat", "x" * 64]),
    "default_tier": st.sampled_from(["", BEST_EFFORT]),
    "adapters": ADAPTERS,
    "admin": st.integers(0, 1),
}
ANY = st.fixed_dictionaries({each: LIMIT for each in LIMITS} | OTHERS)


@given(st.from_regex(NAME, fullmatch=True), st.binary(), ANY)
def test_what_is_written_is_read(name: str, secret: bytes, limits: dict[str, Any]) -> None:
    key = make_key(name, digest_of(secret), limits)
    assert parse_line(key.line()) == key
    assert parse_line(f"  {key.line()}  # of whom") == key


@given(st.text())
def test_any_text_is_read_or_refused_in_a_line(text: str) -> None:
    try:
        keys = parse_lines(text, "the file")
    except ValueError as error:
        assert re.fullmatch(r"the file, line \d+: .+", str(error))
    else:
        assert all(isinstance(each, ApiKey) for each in keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alice", "line 1: a line is a name, sha256:HASH, and limits"),
        ("\nalice jx-secret", "line 2: alice: the second word must be sha256: and 64 hex digits"),
        (f"al/ice sha256:{HASH}", "a name has 1 to 64 of"),
        (f"alice sha256:{HASH} rate=0", "rate: must be 1 to 1000000, got '0'"),
        (f"alice sha256:{HASH} rate=1000001", "rate: must be 1 to 1000000, got '1000001'"),
        (f"alice sha256:{HASH} rate=0000000199999999", "rate: must be 1 to 1000000"),
        (f"alice sha256:{HASH} rate={'9' * 5000}", "rate: must be 1 to 1000000, got '99"),
        (f"alice sha256:{HASH} tier=gold", "tier: must be realtime or best_effort, got 'gold'"),
        (f"alice sha256:{HASH} class=a/b", "class: must be 1 to 64 of A-Z a-z 0-9 _ -, got 'a/b'"),
        (f"alice sha256:{HASH} class=", "class: must be 1 to 64 of A-Z a-z 0-9 _ -, got ''"),
        (f"alice sha256:{HASH} default_tier=x", "default_tier: must be realtime or best_effort"),
        (
            f"alice sha256:{HASH} tier=best_effort default_tier=realtime",
            "default_tier: realtime contradicts tier=best_effort",
        ),
        (f"alice sha256:{HASH} rate=x", "rate: must be 1 to 1000000, got 'x'"),
        (f"alice sha256:{HASH} admin=2", "admin: must be 1, got '2'"),
        (f"alice sha256:{HASH} rate=1 rate=2", "'rate' is not a limit, or there twice"),
        (f"alice sha256:{HASH} speed=1", "'speed' is not a limit"),
        (f"a sha256:{HASH}\nb sha256:{HASH}", "line 2: b and a have the same hash"),
        (f"a sha256:{HASH}\na sha256:{'0' * 64}", "line 2: there are two keys named a"),
    ],
)
def test_a_line_that_is_wrong_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        parse_lines(text, "the file")
    assert "\n" not in str(error.value) and "jx-secret" not in str(error.value)


def test_the_page_has_every_limit() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    listed = {name for cell in rows for name in re.findall(r"`(\w+)", cell)}
    assert set(LIMITS) <= listed


def test_a_key_is_long_and_another_one_each_time() -> None:
    keys = {new_secret() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"jx-[A-Za-z0-9_-]{43}", key) for key in keys)
