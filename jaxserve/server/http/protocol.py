"""One connection: what uvicorn makes of its bytes, with limits on a request's head."""

from __future__ import annotations

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 16 << 10
"""A request line and its headers. uvicorn's other parsers have no such limit."""
LOST = "jaxserve.lost"
"""In the `state` of a call's scope once its connection is lost: why, as asyncio has it. It is a
TimeoutError where the client has taken nothing for server.write_timeout_s."""
HEAD_S = 30.0  # from its first byte, or the connection's beginning, to its last


class Connection(H11Protocol):
    """Closes itself where a head takes longer than HEAD_S. uvicorn waits for ever for the first
    request, and for the rest of one that has begun."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio has it."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        if self.scope is not None:
            self.scope["state"][LOST] = exc
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
