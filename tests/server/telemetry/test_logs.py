"""What the server logs, as text and as JSON, and that nobody waits for who reads it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.key_file import ApiKey
from jaxserve.server.access.options import Access
from jaxserve.server.access.tls import Tls
from jaxserve.server.exposure import exposure_warnings
from jaxserve.server.requests.call_outcome import RateLimitedLog
from jaxserve.server.server import Server
from jaxserve.server.startup import process
from jaxserve.server.telemetry.logs import BackgroundHandler, log_to_stderr
from jaxserve.server.telemetry.request_log import Fields
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.logging_kept import logging_kept


@pytest.fixture
def stderr() -> Iterator[io.StringIO]:
    """What log_to_stderr writes to."""
    with logging_kept():
        yield io.StringIO()


def written(stderr: io.StringIO) -> str:
    (handler,) = (h for h in logging.getLogger().handlers if isinstance(h, BackgroundHandler))
    handler.close()
    return stderr.getvalue()


def fails() -> None:
    raise RuntimeError("it broke\nin two lines")


def test_as_json_each_line_is_an_object(stderr: io.StringIO) -> None:
    with contextlib.redirect_stderr(stderr):
        log_to_stderr()
    log_to_stderr("json")
    logging.getLogger("jaxserve.server").info("stopping: %s", "nothing runs")
    logging.getLogger("some.library").error("of a library")
    logging.getLogger("some.library").info("nobody's news")
    logging.getLogger("jaxserve.calls").info(Fields(message="call ended", tier="realtime"))
    try:
        fails()
    except RuntimeError as error:
        logging.getLogger().exception("GetBatch failed")
        sys.excepthook(RuntimeError, error, error.__traceback__)
    thread = threading.Thread(target=fails, name="worker")
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        log_to_stderr("json")  # pytest's own way of showing warnings is the one it replaces
        warnings.warn("mind the gap", stacklevel=1)
    lines = [json.loads(line) for line in written(stderr).splitlines()]
    assert [(line["level"], line["logger"], line["message"]) for line in lines[:5]] == [
        ("INFO", "jaxserve.server", "stopping: nothing runs"),
        ("ERROR", "some.library", "of a library"),
        ("INFO", "jaxserve.calls", "call ended"),
        ("ERROR", "root", "GetBatch failed"),
        ("CRITICAL", "jaxserve", "it broke\nin two lines"),
    ]
    assert lines[2]["tier"] == "realtime"
    for line in lines[3:6]:
        assert line["exception"].startswith("Traceback") and "in fails" in line["exception"]
    assert lines[5]["message"] == "the thread worker failed"
    assert "mind the gap" in lines[6]["message"]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)


def test_as_text_a_line_begins_with_level_and_time(stderr: io.StringIO) -> None:
    with contextlib.redirect_stderr(stderr):
        log_to_stderr("text")
    logging.getLogger("jaxserve.calls").info(Fields(message="call ended", tier="realtime"))
    text = written(stderr)
    assert text.startswith("INFO ")
    assert text.endswith(" jaxserve.calls: call ended tier=realtime\n")


class Stuck(logging.Handler):
    """Writes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go, self.lines = threading.Event(), threading.Event(), list[str]()

    def handle(self, record: logging.LogRecord) -> bool:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        self.lines.append(record.getMessage())
        return True


def test_where_nobody_reads_lines_are_lost_and_nobody_waits() -> None:
    stuck = Stuck()
    handler = BackgroundHandler(stuck, waiting=3)

    def say(number: int) -> None:
        handler.handle(logging.makeLogRecord({"msg": "line %d", "args": (number,)}))

    say(0)
    assert stuck.begun.wait(PATIENCE)
    for number in range(1, 10):
        say(number)  # it would wait here for ever
    stuck.go.set()
    handler.close()
    assert stuck.lines == [
        "line 0",
        "6 lines came faster than they are read, and are lost",
        *("line 1", "line 2", "line 3"),
    ]


@pytest.mark.parametrize(
    "line", ["x" * 90, {"message": "x" * 40, "prompt": ["x" * 25, "x" * 25]}, {"prompt": (7,) * 90}]
)
def test_what_waits_is_bounded_in_characters(line: Any) -> None:
    """Prompts may be in the lines, and long."""
    stuck = Stuck()
    handler = BackgroundHandler(stuck, chars=200)
    handler.handle(logging.makeLogRecord({"msg": "x" * 1000}))
    assert stuck.begun.wait(PATIENCE)
    for _ in range(5):
        handler.handle(logging.makeLogRecord({"msg": line}))
    stuck.go.set()
    handler.close()
    assert stuck.lines[1:] == ["3 lines came faster than they are read, and are lost"] + 2 * [
        str(line)
    ]


def test_a_line_is_what_it_was_when_it_was_logged() -> None:
    stuck, said = Stuck(), ["a"]
    stuck.go.set()
    handler = BackgroundHandler(stuck)
    record = logging.makeLogRecord({"msg": "%s", "args": (said,)})
    handler.handle(record)
    said[0] = "b"
    handler.close()
    assert stuck.lines == ["['a']"]
    assert record.args == (said,), "other handlers have it as it was"


def test_where_the_log_is_json_nothing_is_said_beside_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    process.announce("ready\nat localhost:1", "json")
    process.complain("serve.py: cannot", "json")
    assert capsys.readouterr() == ("", "")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "ready\nat localhost:1"),
        ("CRITICAL", "serve.py: cannot"),
    ]
    process.complain("serve.py: cannot", "text")
    assert capsys.readouterr() == ("", "serve.py: cannot\n")


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


IN_THE_CLEAR = Access()
TLS = Tls(Path("cert"), Path("key"))
MUTUAL = Tls(Path("cert"), Path("key"), Path("ca"))
KEYS = Keys(fixed=[ApiKey("a", "0" * 64)])


def told(host: str, access: Access, *, on: bool = True) -> list[str]:
    return exposure_warnings(host, access, http=on, metrics=on, batches=on)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "127.8.8.8"])
def test_nothing_is_open_to_others_on_this_machine(host: str) -> None:
    assert told(host, IN_THE_CLEAR) == told(host, Access(KEYS)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_what_is_open_to_others_is_said(host: str) -> None:
    all_of_it = "generate, submit, read and delete batches, watch the console, read the metrics"
    text = f"server.host is {host}: whoever reaches this machine can {{}}: there are no API keys"
    assert told(host, IN_THE_CLEAR) == [text.format(all_of_it) + ", in the clear"]
    assert told(host, IN_THE_CLEAR, on=False) == [text.format("generate") + ", in the clear"]
    assert told(host, Access(tls=TLS)) == [text.format(all_of_it)]
    (line,) = told(host, Access(KEYS))
    assert "API keys and all that is said go over the network in the clear" in line
    assert told(host, Access(tls=MUTUAL)) == told(host, Access(KEYS, TLS)) == []


def test_pages_of_any_site_are_said_wherever_it_listens() -> None:
    (line,) = told("localhost", Access(cors_origins=("*",)))
    assert line.startswith("server.cors_origins is *: pages of any site may call for everybody")
    (line,) = told("::", Access(KEYS, TLS, ("https://a.example", "*")))
    assert line.endswith("may call for whoever has a key")
    assert told("localhost", Access(cors_origins=("https://a.example",))) == []


def test_it_is_said_once_when_the_server_starts(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(engine, host="0.0.0.0", grace_s=0.0):
        pass
    (line,) = caplog.messages
    assert line.startswith("server.host is 0.0.0.0: whoever reaches this machine can generate:")
