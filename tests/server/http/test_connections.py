"""Connections that are silent, too many, or say two things at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.client import Client
from jaxserve.server import open_files
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.http.transport import http_server, protocol
from jaxserve.server.http.transport.connections import Connections, Place, Standing
from jaxserve.server.requests.admission import Overloaded
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.http.test_endings import begin

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNREAD = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
PLACES = 8


@pytest.fixture
def server(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(http_server, "connections_of_a_door", lambda: PLACES)
    options = ServerOptions(request_log=True)
    with Server(engine, grace_s=0.0, http=SETTINGS, options=options) as server:
        yield server


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has hung up, as far as it is known yet."""
    connection.setblocking(False)
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(PATIENCE)


def answers(connection: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            told += piece
    return told


def answer(connection: socket.socket) -> bytes:
    """The next one, whole."""
    told = b""
    while b"\r\n\r\n" not in told:
        piece = connection.recv(1 << 16)
        assert piece, told
        told += piece
    head, _, body = told.partition(b"\r\n\r\n")
    (length,) = re.findall(rb"\r\ncontent-length: (\d+)", head)
    while len(body) < int(length):
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


# Timers.


@pytest.mark.parametrize("drips", [False, True])
def test_an_answer_before_the_body_is_read_is_the_last(
    plain: Plain, drips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes then is not waited for, however often."""
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    with plain.socket() as connection:
        connection.sendall(UNREAD % 100)
        told = answers(connection)
        assert told.startswith(b"HTTP/1.1 405 ") and b"\r\nconnection: close\r\n" in told.lower()

        def is_gone() -> bool:
            with contextlib.suppress(BlockingIOError):
                if drips:
                    connection.send(b"x")
            return not plain.open()

        with contextlib.suppress(ConnectionError):
            until(is_gone, "the connection stays")


def test_who_still_sends_hears_the_answer(shared: Plain) -> None:
    """Not that the connection was reset."""
    size = 4 << 20
    with shared.socket() as connection:
        connection.sendall(UNREAD % size)
        connection.sendall(b"x" * size)
        assert answers(connection).startswith(b"HTTP/1.1 405 ")


# Places.


def test_the_silent_make_room(plain: Plain, engine: FakeEngine) -> None:
    """A call that runs stays, as does who has asked for health, and the newest."""
    stream = begin(plain, stream=True)
    engine.wait(lambda: engine.live)
    with contextlib.ExitStack() as stack:
        prober = stack.enter_context(plain.socket())
        prober.sendall(HEALTH)
        assert answer(prober).startswith(b"HTTP/1.1 200 ")
        silent = [stack.enter_context(plain.socket()) for _ in range(5 * PLACES)]
        newest = PLACES - 2  # beside the stream and the prober
        until(lambda: all(map(is_closed, silent[:-newest])), "the silent stay")
        assert plain.call("GET", "/health")[0] == 200
        prober.sendall(HEALTH)
        assert answer(prober).startswith(b"HTTP/1.1 200 ")
        assert not is_closed(silent[-1])
    engine.step(50)
    response = stream.getresponse()
    assert response.status == 200 and b"[DONE]" in response.read()
    stream.close()


def test_those_who_are_known_do_not_keep_others_out(plain: Plain) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(PLACES):
            known = stack.enter_context(plain.socket())
            known.sendall(HEALTH)
            assert answer(known).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            assert plain.call("GET", "/v1/models")[0] == 200


def test_who_reads_what_was_asked_for_is_not_silent(plain: Plain) -> None:
    """A stream of the console, as a file that is read, says nothing after its first words."""
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(plain.socket())
        reader.sendall(b"GET /console/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reader.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        for _ in range(2 * PLACES):
            known = stack.enter_context(plain.socket())
            known.sendall(HEALTH)
            assert answer(known).startswith(b"HTTP/1.1 200 ")
        reader.settimeout(PATIENCE)
        seen = b""
        while seen.count(b"data: ") < 2:
            piece = reader.recv(1 << 16)
            assert piece, "the stream was cut off"
            seen += piece


def test_calls_leave_places_for_others(plain: Plain, engine: FakeEngine) -> None:
    most = PLACES - PLACES // 4
    running = [begin(plain, stream=True) for _ in range(most)]
    engine.wait(lambda: len(engine.live) == most)
    status, answer, headers = plain.call("POST", "/v1/completions", {"prompt": "a"})
    assert status == 429 and "ulimit -n" in answer["error"]["message"]
    assert "retry-after" in headers
    assert plain.call("GET", "/health")[0] == 200
    engine.step(50)
    for connection in running:
        assert b"[DONE]" in connection.getresponse().read()
        connection.close()


@pytest.mark.parametrize("path", [b"/v1/models", b"/metrics"])
def test_a_key_is_worth_a_place(
    engine: FakeEngine, path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "connections_of_a_door", lambda: PLACES)
    access = Access(Keys(fixed=[key("alice")]))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        plain = Plain(server)
        with contextlib.ExitStack() as stack:
            mine, other = (stack.enter_context(plain.socket()) for _ in range(2))
            for connection, name, status in ((mine, b"alice", 200), (other, b"bob", 401)):
                head = b"GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n"
                connection.sendall(head % (path, name))
                assert answer(connection).startswith(b"HTTP/1.1 %d " % status)
            silent = [stack.enter_context(plain.socket()) for _ in range(PLACES)]
            until(lambda: is_closed(other) and is_closed(silent[0]), "strangers stay")
            assert not is_closed(mine)


def test_no_place_is_kept(plain: Plain) -> None:
    for sent in (b"", b"GET", b"\r\n", HEALTH, UNREAD % 5, b"\x16\x03\x01"):
        with plain.socket() as connection:
            connection.sendall(sent)
    until(lambda: not plain.open(), "a connection stays")


def test_a_place_changes_hands() -> None:
    connections, dropped = Connections(4), list[str]()

    def enter(name: str) -> Place:
        return connections.enter(lambda: dropped.append(name))

    known, first, second, third = map(enter, ("known", "first", "second", "third"))
    known.known()
    first.heard()
    enter("fourth")
    assert dropped == ["second"] and len(connections) == 4
    second.known()  # it is closed, and stays so
    assert len(connections) == 4
    with first.calling(), third.calling():
        assert first.standing is Standing.CALLING
        enter("fifth")
        assert dropped == ["second", "fourth"]
        with known.calling(), pytest.raises(Overloaded), Place(connections).calling():
            pass
    first.leave()
    assert len(connections) == 3


@pytest.mark.parametrize(("soft", "places"), [(1024, 384), (1 << 20, 4096), (-1, 4096), (2, 1)])
def test_files_are_left_for_all_else(
    soft: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (soft, soft))
    assert open_files.connections_of_a_door() == places


def test_no_files_are_a_line_a_second(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a traceback for each attempt; and then whoever has waited is let in."""
    monkeypatch.setattr(http_server, "_AGAIN_S", 0.01)
    failing, accept = [errno.EMFILE] * 3, asyncio.SelectorEventLoop.sock_accept

    async def sock_accept(loop: Any, listener: socket.socket) -> Any:
        if failing:
            raise OSError(failing[0], os.strerror(failing.pop()))
        return await accept(loop, listener)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", sock_accept)
    with Server(engine, host="127.0.0.1", grace_s=0.0, http=SETTINGS) as server:
        assert Plain(server).call("GET", "/health")[0] == 200
    lines = [each.getMessage() for each in caplog.records if "nobody can connect" in each.message]
    assert lines == ["nobody can connect: Too many open files"] * 3
    assert "Traceback" not in caplog.text


def test_a_connection_that_cannot_be_accepted_holds_nobody_up(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that goes on, the loop does other things in between."""
    fails, accept = True, asyncio.SelectorEventLoop.sock_accept

    async def sock_accept(loop: Any, listener: socket.socket) -> Any:
        if fails:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return await accept(loop, listener)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", sock_accept)
    with Server(engine, host="127.0.0.1", grace_s=0.0, http=SETTINGS) as server:
        assert Client(server.address).info(timeout=PATIENCE).model == "fake"
        fails = False
        assert Plain(server).call("GET", "/health")[0] == 200


# Where a request ends.

LENGTH, CHUNKED = "Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (LENGTH + CHUNKED, "Content-Length and Transfer-Encoding: only one is taken"),
        (CHUNKED + LENGTH, "Content-Length and Transfer-Encoding: only one is taken"),
        (LENGTH + "Content-Length: 6\r\n", "conflicting Content-Length headers"),
        ("Content-Length: 5, 6\r\n", "conflicting Content-Length headers"),
        ("Content-Length: +5\r\n", "bad Content-Length"),
        ("Content-Length: 5_0\r\n", "bad Content-Length"),
        (CHUNKED + CHUNKED, "multiple Transfer-Encoding headers"),
        ("Transfer-Encoding: chunked, identity\r\n", "Only Transfer-Encoding: chunked"),
        ("Transfer-Encoding: xchunked\r\n", "Only Transfer-Encoding: chunked"),
        ("Transfer-Encoding : chunked\r\n", "illegal header line"),
        ("X-Long: " + "x" * (60 << 10) + "\r\n", "the head: at most 16,384 bytes are taken"),
        ("A: b\r\n" * (10 << 10), "the head: at most 16,384 bytes are taken"),
    ],
)
def test_a_request_that_may_end_in_two_places_is_refused(
    shared: Plain, head: str, problem: str
) -> None:
    """And so is whatever follows on the connection."""
    with shared.socket() as connection:
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n0\r\n\r\n".encode()
        )
        with contextlib.suppress(ConnectionError):
            connection.sendall(request + HEALTH)
        told = answers(connection)
    assert told.count(b"HTTP/1.1 ") == 1 and told.startswith(b"HTTP/1.1 400 "), told
    assert problem.encode() in told and b"\r\nconnection: close\r\n" in told.lower()


def test_http_1_0_has_no_chunks(shared: Plain) -> None:
    with shared.socket() as connection:
        request = f"POST /health HTTP/1.0\r\nHost: localhost\r\n{CHUNKED}\r\n0\r\n\r\n".encode()
        connection.sendall(request + HEALTH)
        told = answers(connection)
    assert told.startswith(b"HTTP/1.1 400 ") and told.count(b"HTTP/1.1 ") == 1


def test_a_head_of_nearly_16_kib_is_taken(shared: Plain) -> None:
    with shared.socket() as connection:
        long = b"X-Long: %s\r\n" % (b"x" * (protocol.HEAD_BYTES - 100))
        connection.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\n" + long + b"\r\n"))
        assert connection.recv(64).startswith(b"HTTP/1.1 200 ")


def test_a_body_in_tiny_chunks_is_refused(shared: Plain) -> None:
    """Each costs as much as a large one."""
    with shared.socket() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{CHUNKED}"
        head += "Content-Type: application/json\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            connection.sendall(head.encode() + b"1\r\n \r\n" * 50_000)
        told = answers(connection)
    assert told.startswith(b"HTTP/1.1 400 ") and b"its chunks are too small" in told


def test_a_body_that_breaks_its_framing_under_an_answer(
    shared: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no second answer, and no traceback."""
    with shared.socket() as connection:
        head = f"GET /console/events HTTP/1.1\r\nHost: localhost\r\n{CHUNKED}\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"no chunk\r\n")
        assert b"HTTP/1.1 400" not in answers(connection)
    until(lambda: not shared.open(), "the connection stays")
    assert "Traceback" not in caplog.text


def test_who_has_gone_hears_of_no_trouble(
    shared: Plain, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset that comes between a request and its answer."""

    def write_eof(_: Any) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write_eof", write_eof)
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    with shared.socket() as connection:
        connection.sendall(UNREAD % 5 + b"no")
        assert answers(connection).startswith(b"HTTP/1.1 405 ")
    with shared.socket() as connection:
        connection.sendall(b"POST /x HTTP/1.1\r\nHost: localhost\r\n\r\nno request\r\n\r\n")
        assert answers(connection).count(b"HTTP/1.1 ") == 2
    assert "Traceback" not in caplog.text


# x-request-id.


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ([b"mine-1"], True),
        ([b"!" * 128], True),
        ([b"!" * 129], False),
        ([b"a b"], False),
        ([b"\xc3\xbc"], False),
        ([b""], False),
        ([b"a", b"b"], False),
        ([], False),
    ],
)
def test_every_answer_has_an_id(shared: Plain, given: list[bytes], echoed: bool) -> None:
    with shared.socket() as connection:
        lines = b"".join(b"X-Request-Id: %s\r\n" % each for each in given)
        for path, status in ((b"/health", 200), (b"/nothing", 404), (b"/health", 200)):
            head = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path, lines)
            connection.sendall(head)
            told = answer(connection)
            assert told.startswith(b"HTTP/1.1 %d " % status)
            (said,) = re.findall(rb"\r\nx-request-id: (\S+)\r\n", told)
            assert said == given[0] if echoed else re.fullmatch(rb"req_[0-9a-f]{32}", said)
        connection.sendall(b"no request\r\n\r\n")
        told = answers(connection)
        (said,) = re.findall(rb"\r\nx-request-id: (\S+)\r\n", told)
        assert told.startswith(b"HTTP/1.1 400 ") and said.startswith(b"req_")
