"""One connection: uvicorn's protocol, with limits on what clients may do."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.server.http.transport.connections import Place

HEAD_BYTES = 16 << 10
"""A request line and its headers. uvicorn's other parsers have no such limit."""
LOST = "jaxserve.lost"
"""Key in the `state` of a call's scope, set once its connection is lost: asyncio's exception. It is
a TimeoutError if the client has read nothing for server.write_timeout_s."""
PLACE = "jaxserve.place"
"""Key in the same `state`: the connection's Place."""
REQUEST_ID = "jaxserve.x_request_id"
"""Key in the same `state`: the answer's x-request-id."""
ARRIVED = "jaxserve.arrived"
"""Key in the same `state`: when the call's head had been read, by time.monotonic()."""
HEAD_S = 30.0  # to read a head, from its first byte or the connection's beginning
LINGER_S = 2.0  # for a client to read an answer that ends the connection
_LONG_HEAD = f"the head: at most {HEAD_BYTES:,} bytes are taken"
_X_REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[!-~]{1,128}")
_CHUNKS, _CHUNK_BYTES = 4096, 64  # least bytes per chunk if there are many chunks


class _Framing(h11.Connection):
    """h11's parser, stricter about where a request ends (RFC 9112 sections 6.1 and 11.2) and about
    its size, and with x-request-id in every answer. state: state for the scopes of calls. problem:
    message for the client about a malformed request."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self._state = state
        self._chunks = self._bytes = 0
        self.problem = ""

    def next_event(self) -> Any:
        """As h11 has it."""
        heads = self.their_state is h11.IDLE
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._begin(event)
            elif isinstance(event, h11.Data):
                self._count(event)
        except h11.RemoteProtocolError as error:
            long = heads and error.error_status_hint == 431
            self.problem = _LONG_HEAD if long else str(error)
            raise
        return event

    def send(self, event: Any) -> Any:
        """As h11 has it."""
        if isinstance(event, h11.Response):
            headers = list(event.headers)
            if not any(name == _X_REQUEST_ID for name, _ in headers):
                own = self._state.get(REQUEST_ID) or _own_id()
                headers.append((_X_REQUEST_ID, own.encode()))
            if self.their_state is h11.SEND_BODY:  # nobody will read the rest
                headers.append((b"connection", b"close"))
            event = h11.Response(
                status_code=event.status_code, headers=headers, reason=event.reason
            )
        return super().send(event)

    def start_next_cycle(self) -> None:
        """As h11 has it."""
        super().start_next_cycle()
        self._state.pop(REQUEST_ID, None)

    def _begin(self, request: h11.Request) -> None:
        self._state[ARRIVED] = time.monotonic()
        self._chunks = self._bytes = 0
        size, framed, chunked, lengths = len(request.target), 0, False, []
        for name, value in request.headers:
            size += len(name) + len(value) + len(": \r\n")
            framed += name in (b"content-length", b"transfer-encoding")
            chunked |= name == b"transfer-encoding"
            if name == _X_REQUEST_ID:
                lengths.append(value)
        sane = len(lengths) == 1 and _SANE_ID.fullmatch(lengths[0])
        self._state[REQUEST_ID] = lengths[0].decode() if sane else _own_id()
        if size > HEAD_BYTES:
            raise h11.RemoteProtocolError(_LONG_HEAD)
        if framed > 1:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding: only one is taken")
        if chunked and self.their_http_version == b"1.0":
            raise h11.RemoteProtocolError("Transfer-Encoding: HTTP/1.0 has none")

    def _count(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._bytes += len(data.data)
        if self._chunks > _CHUNKS + self._bytes // _CHUNK_BYTES:
            raise h11.RemoteProtocolError("the body: its chunks are too small")


class Connection(H11Protocol):
    """A connection that closes itself if a head takes longer than HEAD_S (uvicorn waits for ever),
    and if an answer ends before its request is complete; the rest of the request is then not read.
    `place` may close it to make room for others."""

    def __init__(self, *arguments: Any, place: Place, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {}  # each call's scope gets a copy
        self.conn: _Framing = _Framing(self.app_state)
        self._place = self.app_state[PLACE] = place
        self._real: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self.lingers = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio has it."""
        self._real = cast(asyncio.Transport, transport)
        self._place.drop = self._real.abort
        super().connection_made(cast(asyncio.Transport, _Lingering(self)))
        self._wait(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        self._place.heard()
        begin = 0
        while begin < len(data):
            if self.transport.is_closing():
                return
            # Feeds heads in pieces, since h11 does not limit a head that comes at once.
            whole = self.conn.their_state is h11.SEND_BODY
            end = len(data) if whole else begin + HEAD_BYTES
            super().data_received(data[begin:end])
            begin = end
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait(HEAD_S)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, but says what is wrong. An answer that has begun is cut off."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.problem[:200] or msg)
        else:
            self._real.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        if self.scope is not None:
            self.scope["state"][LOST] = exc
        super().connection_lost(exc)
        self._stop_waiting()
        self._place.leave()

    def close(self) -> None:
        """Closes once all written bytes were sent. If it closed at once while a client is still
        sending, unread bytes would cause a reset and the client would lose the answer (RFC 9112
        section 9.6)."""
        unread = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if self.lingers or not unread or self._real.is_closing():
            self._real.close()
            return
        self.lingers = True
        self.flow.resume_reading()
        self._stop_waiting()
        if self._real.can_write_eof() and not self._real.get_write_buffer_size():
            try:
                self._real.write_eof()
            except OSError:  # the client has reset it
                self._real.abort()
                return
        self._wait(LINGER_S)

    def _wait(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._real.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Lingering:
    """A connection's transport for uvicorn, with the connection's own `close`."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._real = connection, connection._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def close(self) -> None:
        """As asyncio has it."""
        self._connection.close()

    def is_closing(self) -> bool:
        """As asyncio has it."""
        return self._connection.lingers or self._real.is_closing()


def _own_id() -> str:
    return f"req_{uuid.uuid4().hex}"
