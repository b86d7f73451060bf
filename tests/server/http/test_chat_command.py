"""`jaxserve chat`, against a server without a model."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.client.chat import COMMANDS, Chat, main
from jaxserve.client.cli import complete
from jaxserve.client.errors import PORTS, ServerError
from jaxserve.client.records import EXPECTED_MISSED
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def address(server: Server, running: FakeEngine) -> str:
    assert server.http_address is not None
    return server.http_address


def test_targets_that_are_given_up_are_told_once(
    address: str, running: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    running.gives_up = True
    assert main([f"--address={address}", "hello", "--max_tokens=3"]) == 0
    out, error = capsys.readouterr()
    assert out == " w0 w1 w2\n" and error.strip() == EXPECTED_MISSED


def test_lines_of_input_are_a_conversation(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand now?\n"))
    assert main([f"--address={address}", "--max_tokens=2"]) == 0
    assert capsys.readouterr().out == " w0 w1\n w0 w1\n"


def test_what_came_of_targets_follows_the_answer(
    address: str, running: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["--ttft_ms=60000", "--tbt_ms=50000"]
    assert main([f"--address={address}", "hello", "--max_tokens=3", *targets]) == 0
    out, error = capsys.readouterr()
    assert out == " w0 w1 w2\n"
    assert error.startswith("slo default met: TTFT ") and " of 60000 ms, TBT " in error
    assert main([f"--address={address}", "hello", "--max_tokens=3", "--slo_class=offline"]) == 0
    assert capsys.readouterr().err.startswith("slo offline ")
    with pytest.raises(SystemExit):
        main([f"--address={address}", "hello", "--ttft_ms=0"])


def test_reset_begins_anew(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    plain = Chat._stream

    def noted(chat: Chat, body: dict[str, Any]) -> Iterator[str]:
        asked.append([turn["content"] for turn in body["messages"]])
        return plain(chat, body)

    monkeypatch.setattr(Chat, "_stream", noted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/reset\nthree\n"))
    assert main([f"--address={address}", "--max_tokens=1", "--system=brief"]) == 0
    assert asked == [["brief", "one"], ["brief", "one", " w0", "two"], ["brief", "three"]]


def test_help_and_exit(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that there is not is no message; what only begins like one is."""
    said = "/help\n/halp\n/etc/hosts\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert main([f"--address={address}", "--max_tokens=1"]) == 0
    out, error = capsys.readouterr()
    assert out == " w0\n"  # of /etc/hosts
    listed = "".join(f"{name:<8}{does}\n" for name, does in COMMANDS.items())
    assert error == f"{listed}/halp is not a command.\n{listed}"


def test_what_listens_is_named(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--address={server.address}", "hello"]) == 1
    problem = f"{server.address} does not speak HTTP: {PORTS}"
    assert capsys.readouterr().err == f"jaxserve chat: {problem}\n"
    assert complete([f"--address={server.http_address}", "hi"]) == 1
    problem = f"{server.http_address} does not speak gRPC: {PORTS}"
    assert capsys.readouterr().err == f"jaxserve complete: {problem}\n"
    assert main(["--address=127.0.0.1:1", "hello"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxserve chat: no server answers at 127.0.0.1:1")
    assert error.count("\n") == 1


def test_the_turns_are_kept(address: str) -> None:
    chat = Chat(address, options={"max_tokens": 1}, system="be brief")
    assert "".join(chat.answers("one")) == " w0"
    with pytest.raises(ServerError, match="at most 4095 can be served"):
        [*chat.answers("x" * 9999)]
    said = [(turn["role"], turn["content"]) for turn in chat._turns]
    assert said == [("system", "be brief"), ("user", "one"), ("assistant", " w0")]


def test_a_refusal_is_one_clear_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--address={address}", "hello", "--temperature=-1"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("jaxserve chat: temperature: must be at least 0")
    assert error.count("\n") == 1
