"""A proxy that passes calls on to a server, and notes when they came and what came back: no texts.

It is for a while, between clients and a server: a thread for each call, and no more than the
server's own answers.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from jaxserve.bench.http_target import MOST, Address, StreamedTokens
from jaxserve.bench.load_target import clock
from jaxserve.twin.steps import SeenRequest

MAX_BODY = 64 << 20
"""Most bytes of a call."""
_NOT_PASSED_ON = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers"),
    *("transfer-encoding", "upgrade", "host", "content-length", "accept-encoding"),
}
_GENERATES = ("/completions", "/chat/completions")
_CLIENT_PATIENCE_S = 600.0


class Proxy:
    """Listens until it is closed. Use it in a `with`.

    Args:
        address: The server.
        host, port: Where to listen; port 0 for any that is free.

    Attributes:
        unseen: Calls that generated without a stream: when their tokens came is not known.
        failed: Calls for which the server gave no answer, or a torn one.
    """

    def __init__(self, address: Address, host: str = "127.0.0.1", port: int = 0) -> None:
        self.unseen = self.failed = 0
        self._address, self._lock = address, threading.Lock()
        self._seen = list[SeenRequest]()
        self._start = clock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _CLIENT_PATIENCE_S

            def do_GET(self) -> None:
                proxy._pass_on(self)

            do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = do_GET

            def log_message(self, *_: Any) -> None:
                """Says nothing of single calls."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def seen(self) -> list[SeenRequest]:
        """What has ended so far, in order of arrival."""
        with self._lock:
            return sorted(self._seen, key=lambda one: one.arrival)

    def _pass_on(self, call: BaseHTTPRequestHandler) -> None:
        arrival = clock() - self._start
        length = call.headers.get("Content-Length", "0")
        known = length.isdigit() and int(length[:12]) <= MAX_BODY
        if not known or "Transfer-Encoding" in call.headers:
            call.close_connection = True
            call.send_error(413, f"a call needs a Content-Length of at most {MAX_BODY:,}")
            return
        body = call.rfile.read(int(length))
        asked, hides = _asked(call.path, body), False
        if asked is not None and asked.get("stream") is True and "stream_options" not in asked:
            hides = True  # the answer has to say how long its prompt is
            body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
        sent = {name: v for name, v in call.headers.items() if name.lower() not in _NOT_PASSED_ON}
        connection = self._address.connect()
        try:
            path = self._address.base.path + call.path
            connection.request(call.command, path, body or None, sent)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException):
            self._count(failed=1)
            connection.close()
            call.send_error(502, "the server does not answer")
            return
        try:
            self._answer(call, answer, arrival, asked, hides)
        except (OSError, http.client.HTTPException):  # one of both has gone
            self._count(failed=1)
            call.close_connection = True
        finally:
            connection.close()

    def _answer(
        self,
        call: BaseHTTPRequestHandler,
        answer: http.client.HTTPResponse,
        arrival: float,
        asked: dict[str, Any] | None,
        hides: bool,
    ) -> None:
        """Passes an answer on, line by line.

        Args:
            call: The client's call.
            answer: The server's answer.
            arrival: When the call came, seconds since the start.
            asked: The call's fields, if it generates.
            hides: Whether the client has not asked for the event with usage.
        """
        call.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _NOT_PASSED_ON:
                call.send_header(name, value)
        call.send_header("Connection", "close")
        call.end_headers()
        call.close_connection = True
        tokens, times = StreamedTokens(), list[float]()
        streamed = "text/event-stream" in answer.getheader("Content-Type", "")
        hidden = False
        for part in _parts(answer, by_line=streamed):
            if streamed and asked is not None:
                times += [clock() - self._start] * tokens.take(part)
            blank = not part.strip()
            hidden = (hides and tokens.only_usage) or (hidden and blank)
            if not hidden:
                call.wfile.write(part)
                call.wfile.flush()
        if asked is None or answer.status != http.HTTPStatus.OK:
            return
        if not streamed or not tokens.prompt or not times:
            self._count(unseen=1)
            return
        computed = max(tokens.prompt - tokens.cached, 1)
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
        limit = max(limit, len(times)) if type(limit) is int else len(times)
        with self._lock:
            self._seen.append(SeenRequest(arrival, computed, np.array(times), limit))

    def _count(self, *, unseen: int = 0, failed: int = 0) -> None:
        with self._lock:
            self.unseen += unseen
            self.failed += failed


def _parts(answer: http.client.HTTPResponse, *, by_line: bool) -> Iterator[bytes]:
    """The answer's body as it comes."""
    while part := answer.readline(MOST) if by_line else answer.read1(MOST):
        yield part


def _asked(path: str, body: bytes) -> dict[str, Any] | None:
    """The fields of a call that generates one text; None for all others."""
    if not path.partition("?")[0].endswith(_GENERATES):
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
