"""What an operator reads in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.key_file import ApiKey
from jaxserve.server.access.options import Access
from jaxserve.server.access.tls import Tls
from jaxserve.server.exposure import exposure_warnings
from jaxserve.server.requests.call_outcome import RateLimitedLog
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine


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


def lines(host: str, access: Access, *, on: bool = True) -> list[str]:
    return exposure_warnings(host, access, http=on, metrics=on, batches=on)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "127.8.8.8"])
def test_nothing_is_open_to_others_on_this_machine(host: str) -> None:
    assert lines(host, IN_THE_CLEAR) == lines(host, Access(KEYS)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_what_is_open_to_others_is_said(host: str) -> None:
    all_of_it = "generate, submit, read and delete batches, watch the console, read the metrics"
    text = f"server.host is {host}: whoever reaches this machine can {{}}: there are no API keys"
    assert lines(host, IN_THE_CLEAR) == [text.format(all_of_it) + ", in the clear"]
    assert lines(host, IN_THE_CLEAR, on=False) == [text.format("generate") + ", in the clear"]
    assert lines(host, Access(tls=TLS)) == [text.format(all_of_it)]
    (line,) = lines(host, Access(KEYS))
    assert "API keys and all that is said go over the network in the clear" in line
    assert lines(host, Access(tls=MUTUAL)) == lines(host, Access(KEYS, TLS)) == []


def test_pages_of_any_site_are_said_wherever_it_listens() -> None:
    (line,) = lines("localhost", Access(cors_origins=("*",)))
    assert line.startswith("server.cors_origins is *: pages of any site may call for everybody")
    (line,) = lines("::", Access(KEYS, TLS, ("https://a.example", "*")))
    assert line.endswith("may call for whoever has a key")
    assert lines("localhost", Access(cors_origins=("https://a.example",))) == []


def test_it_is_said_once_when_the_server_starts(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(engine, host="0.0.0.0", grace_s=0.0):
        pass
    (line,) = caplog.messages
    assert line.startswith("server.host is 0.0.0.0: whoever reaches this machine can generate:")
