"""Who is let in, and how often."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.access.api_keys import Keys, RateLimited, TooManyRequests, Unauthenticated
from jaxserve.server.access.key_file import ApiKey, digest_of
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
