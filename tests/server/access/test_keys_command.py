"""`jaxserve keys`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxserve.commands.keys import main
from jaxserve.server.access.api_keys import Keys, Unauthenticated
from jaxserve.server.access.key_file import digest_of, parse_line, parse_lines


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
