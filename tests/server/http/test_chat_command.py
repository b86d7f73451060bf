"""`jaxserve chat`, against a server without a model."""

from __future__ import annotations

import io
import sys

import pytest

from jaxserve.client.chat import Chat, ChatError, main
from jaxserve.client.records import EXPECTED_MISSED
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def address(server: Server, running: FakeEngine) -> str:
    assert server.http_address is not None
    return server.http_address


def test_one_message(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--address={address}", "hello", "--max_tokens=3"]) == 0
    assert capsys.readouterr().out == " w0 w1 w2\n"


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


def test_the_turns_are_kept(address: str) -> None:
    chat = Chat(address, options={"max_tokens": 1}, system="be brief")
    assert "".join(chat.answers("one")) == " w0"
    with pytest.raises(ChatError, match="at most 4095 can be served"):
        [*chat.answers("x" * 9999)]
    said = [(turn["role"], turn["content"]) for turn in chat._turns]
    assert said == [("system", "be brief"), ("user", "one"), ("assistant", " w0")]


def test_a_refusal_is_one_clear_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--address={address}", "hello", "--temperature=-1"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("jaxserve chat: temperature: must be at least 0")
    assert error.count("\n") == 1


def test_nobody_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address=127.0.0.1:1", "hello"]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("jaxserve chat: no server answers at 127.0.0.1:1")
        and error.count("\n") == 1
    )
