"""`jaxserve.client --file`: no prompt is lost, and no answer, whatever happens meanwhile."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client import Client, ServerError, many
from jaxserve.client.cli import complete
from jaxserve.server.requests import admission
from jaxserve.server.server import Server
from jaxserve.writable import PARTIAL
from tests.server.batches.relay import Relay
from tests.server.fake_engine import FakeEngine

PATIENCE = 60


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks again at once."""
    monkeypatch.setattr(many, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(many, "_LONGEST_WAIT_S", 0.01)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "p.txt"
    path.write_text("".join(f"prompt {i}\n" for i in range(6)))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines(path: Path) -> list[int]:
    return [record["line"] for record in records(path)]


def run(server: Server, *flags: str) -> int:
    return complete([f"--address={server.address}", "--max_tokens=1", *flags])


@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_the_prompts_are_never_written_over(
    server: Server, source: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = source.read_text()
    for out in (source, source.parent / "." / "p.txt"):
        with pytest.raises(SystemExit) as caught:
            run(server, f"--file={source}", f"--out={out}", *flags)
        assert caught.value.code == 2
        assert "would be written over the prompts" in capsys.readouterr().err
    assert source.read_text() == before


LINES = [
    ("a\u2028b\n\fc\x0bd\x1ce\x85\n", {1: "a\u2028b", 2: "\fc\x0bd\x1ce\x85"}),
    ("\ufeffone\r\n \t\r\ntwo\rthree", {1: "one", 3: "two", 4: "three"}),
    ("\n  last", {2: "  last"}),
]


@pytest.mark.parametrize("through", ["file", "stdin"])
def test_a_line_ends_where_editors_say(
    server: Server,
    engine: FakeEngine,
    through: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.run()
    source = tmp_path / "p.txt"
    for text, prompts in LINES:
        source.write_bytes(text.encode())
        if through == "stdin":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert run(server, f"--file={source if through == 'file' else '-'}") == 0
        said = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
        assert {record["line"]: record["prompt"] for record in said} == prompts


def test_a_file_without_prompts_is_said(
    server: Server, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "\n \n", "\ufeff"):
        source.write_text(text)
        assert run(server, f"--file={source}") == 1
        problem = f"jaxserve complete: {source}: there are no prompts in it\n"
        assert capsys.readouterr().err == problem


def test_what_a_full_queue_refuses_is_asked_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(max_requests=1)
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    source.write_text("".join(f"prompt {i}\n" for i in range(60)))
    out = tmp_path / "a.jsonl"
    with Server(engine.run(), grace_s=0.0) as server:
        assert run(server, f"--file={source}", f"--out={out}", "--concurrency=8") == 0
    assert lines(out) == list(range(1, 61))
    assert all("completions" in record for record in records(out))


def test_a_queue_that_stays_full_is_waited_for_within_the_timeout(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    with Server(FakeEngine(max_requests=0), grace_s=0.0) as server:
        flags = (f"--file={source}", f"--out={out}", "--timeout=0.2")
        assert run(server, *flags) == 1
        assert "6 of 6 prompts failed" in capsys.readouterr().err
    codes = {record["error"]["code"] for record in records(out)}
    assert codes <= {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}


def test_the_server_says_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_S", 8.0)
    with Server(FakeEngine(max_requests=0), grace_s=0.0) as server:
        with Client(server.address) as client, pytest.raises(ServerError) as caught:
            client.complete("hi")
        assert caught.value.retry_s is not None and 4 <= caught.value.retry_s <= 12
        with Client(server.address) as client, pytest.raises(ServerError) as caught:
            client.complete("hi", temperature=-1.0)
        assert caught.value.retry_s is None


@pytest.mark.parametrize(
    ("code", "message", "passing"),
    [
        ("RESOURCE_EXHAUSTED", "3 continuations are queued", True),
        ("RESOURCE_EXHAUSTED", "Sent message larger than max (9 vs. 8)", False),
        ("UNAVAILABLE", "Socket closed", True),
        ("INVALID_ARGUMENT", "top_p: must be at least 0", False),
        ("INTERNAL", "the engine has failed", False),
    ],
)
def test_what_passes(code: str, message: str, passing: bool) -> None:
    assert ServerError(code, message).passing is passing


class InThread:
    """A call of the client that goes on while the test does."""

    def __init__(self, *argv: str) -> None:
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(argv,), daemon=True)
        self._thread.start()

    def _run(self, argv: tuple[str, ...]) -> None:
        self.code = complete(["--max_tokens=1", "--concurrency=2", *argv])

    def wait(self) -> int | None:
        self._thread.join(PATIENCE)
        return self.code


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


def test_a_server_that_comes_back_is_waited_for(
    engine: FakeEngine, server: Server, relay: Relay, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    relay.target = server.address
    client = InThread(f"--address={relay.address}", f"--file={source}", f"--out={out}")
    engine.wait(lambda: len(engine.live) == 2)
    relay.cut()
    engine.wait(lambda: not engine.live)
    relay.target = server.address
    engine.run()
    assert client.wait() == 0
    assert lines(out) == [1, 2, 3, 4, 5, 6]


def test_a_server_that_stays_away_costs_nobody_an_answer(
    engine: FakeEngine,
    server: Server,
    relay: Relay,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(many, "PATIENCE_S", 0.1)
    out = tmp_path / "a.jsonl"
    relay.target = server.address
    client = InThread(f"--address={relay.address}", f"--file={source}", f"--out={out}")
    engine.wait(lambda: len(engine.live) == 2)
    engine.step()
    engine.wait(lambda: len(engine.requests) == 4)
    relay.cut()
    assert client.wait() == 1
    assert lines(out) == [1, 2], "what was not answered is no error"
    error = capsys.readouterr().err.splitlines()[-1]
    assert "(2 of 6 prompts done; the same command with --resume goes on)" in error
    engine.wait(lambda: not engine.live)

    flags = (f"--file={source}", f"--out={out}")
    with pytest.raises(SystemExit):
        run(server, *flags)
    assert "--resume goes on with it, or name another" in capsys.readouterr().err
    asked = len(engine.requests)
    engine.run()
    assert run(server, *flags, "--resume") == 0
    assert lines(out) == [1, 2, 3, 4, 5, 6]
    assert len(engine.requests) == asked + 4
    assert run(server, *flags, "--resume") == 0, "there is nothing left to do"
    assert len(engine.requests) == asked + 4


def test_resuming_drops_errors_and_half_a_line_and_puts_all_in_order(
    engine: FakeEngine, server: Server, source: Path, tmp_path: Path
) -> None:
    engine.run()
    out = tmp_path / "a.jsonl"
    flags = (f"--file={source}", f"--out={out}")
    assert run(server, *flags) == 0
    first = out.read_text()
    whole = first.splitlines(keepends=True)
    whole[2] = '{"line": 3, "prompt": "prompt 2", "error": {"code": "X", "message": ""}}\n'
    out.write_text("".join(whole[:5]) + whole[5][:20])
    asked = len(engine.requests)
    assert run(server, *flags, "--resume") == 0
    assert len(engine.requests) == asked + 2
    assert out.read_text() == first
    assert [*tmp_path.glob(f"*{PARTIAL}")] == []


def test_resuming_with_something_else_changes_nothing(
    server: Server, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    problem = "holds something else: line 1 is not the answer to one of these prompts"
    for text in (
        "hello\n",
        '{"line": [1], "prompt": "x"}\n',
        '{"line": 8, "prompt": null}\n',
        '{"line": 1, "prompt": "another"}\n',
        "3\n",
    ):
        out.write_text(text)
        assert run(server, f"--file={source}", f"--out={out}", "--resume") == 1
        assert f"--resume: {out} {problem}" in capsys.readouterr().err
        assert out.read_text() == text


# Where the tests run in the background, SIGINT is ignored, and so it is in what they start.
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxserve.client.cli import complete
sys.exit(complete())
"""


def test_an_interrupted_run_says_how_far_it_got(
    engine: FakeEngine, server: Server, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    command = [sys.executable, "-c", INTERRUPTED, f"--address={server.address}"]
    command += [f"--file={source}", f"--out={out}", "--max_tokens=1", "--concurrency=2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            engine.wait(lambda: len(engine.live) == 2)
            engine.step()
            engine.wait(lambda: len(engine.requests) == 4)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "2/6" in error and "100%" not in error and "6/6" not in error
    assert error.splitlines()[-1] == (
        "jaxserve complete: interrupted; the same command with --resume goes on"
    )
    assert lines(out) == [1, 2]
