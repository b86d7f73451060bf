"""What an operator reads in the log."""

from __future__ import annotations

import logging
import re

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.server.requests.endings import Endings, RateLimitedLog
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.runner import Server
from jaxserve.server.transport import exposure
from tests.server.fake_engine import FakeEngine


@pytest.mark.parametrize("on", [False, True])
def test_the_request_log_is_a_line_a_call_without_what_was_said(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, on: bool
) -> None:
    engine.text = lambda k: f" answer{k}"
    options = ServerOptions(request_log=on)
    with Server(engine, grace_s=0.0, options=options) as server, Client(server.address) as client:
        engine.run()
        client.complete("secret", max_tokens=3, request_id="mine")
        with pytest.raises(ServerError):
            client.complete("secret", max_tokens=0)
    if not on:
        assert caplog.messages == []
        return
    first, second = caplog.messages
    times = r"queue 100\.0 ms, ttft 200\.0 ms, total 300\.0 ms; [\d.]+ ms open"
    assert re.fullmatch(r"Generate mine from \S+: ok; 6 \+ 3 tokens; " + times, first)
    assert re.fullmatch(r"Generate - from \S+: invalid; 0 \+ 0 tokens; [\d.]+ ms open", second)


def test_the_request_log_is_shown_whatever_the_other_loggers_show() -> None:
    Endings((), log_calls=True)
    assert logging.getLogger("jaxserve.calls").isEnabledFor(logging.INFO)


def test_of_a_kind_a_few_lines_a_minute_are_written(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = RateLimitedLog(clock=lambda: now)
    for number in range(1000):
        log.warning("a", "%d of a", number)
    log.warning("b", "b")
    assert caplog.messages == [*(f"{number} of a" for number in range(10)), "b"]
    now = 60.0
    log.warning("a", "again")
    log.warning("a", "and again")
    assert caplog.messages[11:] == ["again (and 990 more like it before)", "and again"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "127.8.8.8"])
def test_nothing_is_open_to_others_on_this_machine(host: str) -> None:
    assert exposure(host, 9464, batches=True) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_what_is_open_to_others_is_said(host: str) -> None:
    all_of_it = "generate, submit, read and delete batches, read the metrics"
    text = "whoever reaches this machine can {}: there is no authentication"
    assert exposure(host, 9464, batches=True) == text.format(all_of_it)
    assert exposure(host, -1, batches=False) == text.format("generate")


def test_it_is_said_once_when_the_server_starts(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(engine, host="0.0.0.0", grace_s=0.0):
        pass
    (line,) = caplog.messages
    assert line.startswith("server.host is 0.0.0.0: whoever reaches this machine can generate:")
