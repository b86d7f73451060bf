"""Keys: who is let in and how often, their lines of text, and `jaxserve keys`."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.commands.keys import main
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.access.api_keys import (
    Keys,
    RateLimited,
    TooManyRequests,
    Unauthenticated,
    authorization,
)
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
from jaxserve.server.access.options import access_settings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str, *limits: Any, **more: Any) -> ApiKey:
    """Its secret is its name."""
    return ApiKey(name, digest_of(name.encode()), *limits, **more)


def known(keys: Keys, name: str) -> bool:
    try:
        return keys.caller(f"Bearer {name}".encode()).name == name
    except Unauthenticated as error:
        assert error.given
        return False


def test_a_key_comes_in_one_of_two_headers() -> None:
    bearer, own = (b"authorization", b"Bearer a"), ("x-api-key", " a ")
    for headers in ([bearer], [own], [bearer, own], [(b"x-other", b"b"), own]):
        assert authorization(headers) == b"Bearer a", headers
    for headers in ([], [bearer, ("x-api-key", "b")], [bearer, bearer], [own, own]):
        assert authorization(headers) is None, headers


def test_without_any_everybody_may_call() -> None:
    keys = Keys()
    assert not keys.needed
    for given in (None, b"Bearer whatever", b"nonsense"):
        caller = keys.caller(given)
        assert caller.name == ""
        with caller.enter(), caller.enter():
            pass


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"",
        b"alice",
        b"Bearer",
        b"Bearer ",
        b"Basic alice",
        b"Bearer bob",
        b"Bearer alice bob",
        b"Bearer " + digest_of(b"alice").encode(),
        b"Bearer \xff\xfe",
    ],
)
def test_whoever_has_no_key_may_not(given: bytes | None) -> None:
    with pytest.raises(Unauthenticated) as error:
        Keys(fixed=[key("alice")]).caller(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [b"Bearer alice", b"bearer alice", b" BEARER  alice "])
def test_whoever_has_one_may(given: bytes) -> None:
    assert Keys(fixed=[key("alice"), key("bob")]).caller(given).name == "alice"


def test_calls_at_once_are_bounded() -> None:
    keys = Keys(fixed=[key("alice", concurrency=2), key("bob", concurrency=1)])
    alice, again = keys.caller(b"Bearer alice"), keys.caller(b"Bearer alice")
    with alice.enter():
        with (
            again.enter(),
            pytest.raises(
                RateLimited, match=r"alice: 2 calls are open; it may have 2 at once"
            ) as error,
        ):
            alice.enter()
        assert error.value.retry_s > 0
        with keys.caller(b"Bearer bob").enter(), alice.enter():
            pass


def test_requests_at_once_are_bounded_whatever_calls_they_come_in() -> None:
    keys = Keys(fixed=[key("alice", concurrency=3), key("bob")])
    caller = keys.caller(b"Bearer alice")
    caller.take_requests(2)
    with pytest.raises(RateLimited, match="alice: 2 requests run, and the call asks for 2; it may"):
        keys.caller(b"Bearer alice").take_requests(2)
    caller.take_requests(1)
    keys.caller(b"Bearer bob").take_requests(10**6)
    caller.give_back_requests(3)
    with pytest.raises(TooManyRequests, match=r"asks for 4 requests .* may have 3 at once"):
        caller.take_requests(4)
    caller.take_requests(3)  # neither refused one counts


def test_a_call_that_no_rate_counts_is_open_all_the_same() -> None:
    caller = Keys(fixed=[key("alice", rate=1, concurrency=1)], clock=Clock()).caller(
        b"Bearer alice"
    )
    with caller.enter(rated=False), pytest.raises(RateLimited, match="1 calls are open"):
        caller.enter()
    caller.enter().close()


def test_calls_a_minute_are_bounded_and_it_says_when_the_next_may_come() -> None:
    clock = Clock()
    keys = Keys(fixed=[key("alice", rate=6)], clock=clock)
    caller = keys.caller(b"Bearer alice")
    for _ in range(6):
        caller.enter().close()
    with pytest.raises(RateLimited, match="alice: 6 calls a minute") as error:
        caller.enter()
    assert error.value.retry_s == pytest.approx(10.0)
    clock.now += 9.9
    with pytest.raises(RateLimited) as error:  # and the refused one took nothing
        caller.enter()
    assert error.value.retry_s == pytest.approx(0.1)
    clock.now += error.value.retry_s
    caller.enter().close()
    clock.now += 1e6
    for _ in range(6):
        caller.enter().close()
    with pytest.raises(RateLimited):
        caller.enter()


def test_a_call_that_is_one_too_many_at_once_takes_none_of_the_rate() -> None:
    keys = Keys(fixed=[key("alice", rate=2, concurrency=1)], clock=Clock())
    caller = keys.caller(b"Bearer alice")
    with caller.enter(), pytest.raises(RateLimited, match="open"):
        caller.enter()
    with caller.enter():
        pass
    with pytest.raises(RateLimited, match="a minute"):
        caller.enter()


def write(path: Path, *keys: ApiKey) -> None:
    path.write_text("".join(each.line() + "\n" for each in keys))


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, key("alice"))
    keys = Keys(path, [key("env")], clock)
    assert known(keys, "alice") and known(keys, "env") and not known(keys, "bob")
    write(path, key("bob"), key("carol"))
    assert known(keys, "alice")  # it is looked at once a second
    clock.now += 1.0
    assert known(keys, "bob") and known(keys, "env") and not known(keys, "alice")
    write(path)
    clock.now += 1.0
    assert keys.needed and not known(keys, "bob") and known(keys, "env")


def test_counts_outlive_a_change(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, key("alice", concurrency=2))
    keys = Keys(path, clock=clock)
    with keys.caller(b"Bearer alice").enter():
        write(path, key("alice", concurrency=1))
        clock.now += 1.0
        with pytest.raises(RateLimited, match="1 calls are open; it may have 1"):
            keys.caller(b"Bearer alice").enter()
    keys.caller(b"Bearer alice").enter().close()


def test_nobody_waits_longer_than_the_minute_for_a_rate_that_was_lowered(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, key("alice", rate=60))
    keys = Keys(path, clock=clock)
    for _ in range(60):
        keys.caller(b"Bearer alice").enter().close()
    write(path, key("alice", rate=1))
    clock.now += 1.0
    with pytest.raises(RateLimited) as error:
        keys.caller(b"Bearer alice").enter()
    assert error.value.retry_s == pytest.approx(60.0)


@pytest.mark.parametrize("how", ["nonsense", "gone", "duplicate", "bytes"])
def test_a_file_that_turns_bad_changes_nothing_but_a_line(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, clock = tmp_path / "keys", Clock()
    write(path, key("alice"))
    keys = Keys(path, [key("env")], clock)
    match how:
        case "nonsense":
            path.write_text("alice secret-of-alice")
        case "gone":
            path.unlink()
        case "duplicate":
            write(path, key("env"))
        case _:
            path.write_bytes(b"\xff\xff")
    for _ in range(3):
        clock.now += 1.0
        assert known(keys, "alice")
    (line,) = caplog.messages
    assert line.startswith("server.api_keys: ") and line.endswith("the keys from before hold")
    assert "secret-of-alice" not in line and "\n" not in line
    write(path, key("bob"))
    os.utime(path, ns=(1, 1))
    clock.now += 1.0
    assert known(keys, "bob") and not known(keys, "alice")


def test_keys_of_a_class_that_there_is_not_change_nothing_but_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, key("alice", slo_class="chat"))
    with pytest.raises(
        ConfigError, match="key alice: class: there is no 'chat'; this server has x"
    ):
        Keys(path, classes=["x", "y"])
    keys = Keys(path, clock=clock, classes=["chat"])
    write(path, key("alice", slo_class="chat"), key("bob", slo_class="gone"))
    clock.now += 1.0
    assert known(keys, "alice") and not known(keys, "bob")
    (line,) = caplog.messages
    assert "key bob: class: there is no 'gone'; this server has chat; the keys from" in line
    write(path, key("carol", slo_class="offline"))
    assert known(settings(api_keys=str(path)), "carol"), "a class of the config"


def settings(**fields: str) -> Keys:
    return access_settings(ServerConfig(**fields)).keys


def test_keys_come_from_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("JAXSERVE_API_KEYS", raising=False)
    assert not settings().needed
    monkeypatch.setenv("JAXSERVE_API_KEYS", f"{key('alice').line()} ; {key('bob', 3).line()}")
    assert known(settings(), "alice") and known(settings(), "bob")
    path = tmp_path / "keys"
    write(path, key("carol"))
    both = settings(api_keys=str(path))
    assert known(both, "alice") and known(both, "carol")
    monkeypatch.delenv("JAXSERVE_API_KEYS")
    write(path)
    assert not caplog.messages
    assert settings(api_keys=str(path)).needed
    assert "has no keys yet: every call is refused" in caplog.text


def test_keys_that_cannot_be_read_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAXSERVE_API_KEYS", raising=False)
    with pytest.raises(ConfigError, match=r"^server\.api_keys: .*/none: No such file") as error:
        settings(api_keys=str(tmp_path / "none"))
    assert "\n" not in str(error.value)
    (tmp_path / "bad").write_text("alice")
    with pytest.raises(ConfigError, match=r"^server\.api_keys: .*/bad, line 1: a line is"):
        settings(api_keys=str(tmp_path / "bad"))
    with pytest.raises(ConfigError, match=r"^server\.api_keys: .*: Is a directory"):
        settings(api_keys=str(tmp_path))
    monkeypatch.setenv("JAXSERVE_API_KEYS", "jx-a-key-itself")
    with pytest.raises(ConfigError, match=r"^JAXSERVE_API_KEYS, line 1: a line is") as error:
        settings()
    assert "itself" not in str(error.value)


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


@hypothesis.given(st.from_regex(NAME, fullmatch=True), st.binary(), ANY)
def test_what_is_written_is_read(name: str, secret: bytes, limits: dict[str, Any]) -> None:
    key = make_key(name, digest_of(secret), limits)
    assert parse_line(key.line()) == key
    assert parse_line(f"  {key.line()}  # of whom") == key


@hypothesis.given(st.text())
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


def test_a_key_opens_the_server_that_has_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    assert main(["new", "alice", "--rate=60", "--files=5", f"--file={path}"]) == 0
    alice = capsys.readouterr().out.strip()
    assert path.stat().st_mode & 0o777 == 0o600 and alice not in path.read_text()
    path.write_text(path.read_text() + "# and a friend")
    path.chmod(0o640)
    assert main(["new", "bob", f"--file={path}"]) == 0
    bob = capsys.readouterr().out.strip()
    keys = Keys(path)
    assert keys.caller(f"Bearer {alice}".encode()).name == "alice"
    assert keys.caller(f"Bearer {bob}".encode()).name == "bob"
    assert main(["list", f"--file={path}"]) == 0
    digest = digest_of(alice.encode())[:8]
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"alice  {digest}...  rate 60, files 5"
    assert re.fullmatch(r"bob    [0-9a-f]{8}\.\.\.  no limits", second)
    assert main(["revoke", "alice", f"--file={path}"]) == 0
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_text().startswith("# and a friend\nbob sha256:")
    with pytest.raises(Unauthenticated):
        Keys(path).caller(f"Bearer {alice}".encode())
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


def test_a_key_has_a_class_and_a_tier_for_who_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    words = ["--class=interactive", "--default_tier=best_effort"]
    assert main(["new", "alice", *words, f"--file={path}"]) == 0
    (key,) = parse_lines(path.read_text(), "keys")
    assert (key.slo_class, key.default_tier, key.tier) == ("interactive", "best_effort", "realtime")
    assert main(["list", f"--file={path}"]) == 0
    assert "class interactive, default_tier best_effort" in capsys.readouterr().out


def test_without_a_file_the_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "alice", "--concurrency=4"]) == 0
    secret, line = capsys.readouterr().out.splitlines()
    key = parse_line(line)
    assert key is not None and (key.name, key.rate, key.concurrency) == ("alice", 0, 4)
    assert key.digest == digest_of(secret.encode())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("new alice --class=a/b", 2, "--class: must be 1 to 64 of A-Z a-z 0-9 _ -, got 'a/b'"),
        ("new alice --tier=best_effort --default_tier=realtime", 2, "contradicts tier=best_effort"),
        ("", 2, "new|list|revoke"),
        ("new", 2, "name"),
        ("new al/ice", 2, "a name has 1 to 64 of"),
        ("new alice --rate=0", 2, "--rate: must be 1 to 1000000, got '0'"),
        ("new alice --rate=", 2, "--rate: must be 1 to 1000000, got ''"),
        ("new alice --file=FOLDER", 2, "is a folder"),
        ("new alice --file=FILE", 1, "two keys named alice; revoke the old one first"),
        ("revoke bob --file=FILE", 1, "has no key named bob"),
        ("list --file=NONE", 1, "No such file"),
        ("list --file=BAD", 1, "BAD, line 1: a line is"),
        ("list", 2, "--file"),
    ],
)
def test_what_is_refused_is_one_line(
    tmp_path: Path, words: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", "alice", f"--file={tmp_path / 'FILE'}"])
    before = (tmp_path / "FILE").read_text()
    (tmp_path / "BAD").write_text("bad")
    (tmp_path / "FOLDER").mkdir()
    capsys.readouterr()
    try:
        got = main([word.replace("--file=", f"--file={tmp_path}/") for word in words.split()])
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        got = stopped.code
    out, error = capsys.readouterr()
    assert (
        (got, out) == (code, "")
        and says in error
        and re.match("jaxserve.keys( new| list)?: ", error)
    )
    assert (tmp_path / "FILE").read_text() == before
    assert len(parse_lines(before, "")) == 1
