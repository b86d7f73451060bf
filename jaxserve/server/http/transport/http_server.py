"""The HTTP server, on the caller's event loop."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import socket
from collections.abc import Coroutine
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jaxserve.config import ConfigError
from jaxserve.server.access.tls import Tls
from jaxserve.server.http.transport.connections import Connections
from jaxserve.server.http.transport.protocol import Connection
from jaxserve.server.open_files import connections_of_a_door
from jaxserve.server.requests.addresses import bind_sockets, bracketed_host

log = logging.getLogger(__name__)
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_AT_ONCE = 16  # connections that are accepted in one turn of the loop
_HANDSHAKE_S = 10.0
_AGAIN_S = 1.0  # until the next try if files have run out
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpServer:
    """An application on a port.

    Args:
        host: a name or an address; all addresses of a name get the same port.
        port: 0 takes a free one.
        tls: None listens in the clear.
        field: the config's field with the port, for errors.
        connections: most connections at once; None for as many as open files allow.

    Raises:
        ConfigError: If the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: Tls | None = None,
        *,
        field: str = "server.http_port",
        connections: int | None = None,
    ) -> None:
        self._host = host
        self._context = None if tls is None else tls.context()
        try:  # from now on connections queue until the server takes them
            self._sockets = bind_sockets(host, port, _BACKLOG)
        except OSError as error:
            where = f"cannot listen on {host}:{port} ({error.strerror})"
            raise ConfigError(f"{field}: {where}; 0 takes any free port") from None
        self._connections = Connections(connections or connections_of_a_door())
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._accepting: set[asyncio.Task[None]] = set()  # accepting sockets, and handshakes

    @property
    def address(self) -> str:
        """The address that it listens on, as "host:port"."""
        port = self._sockets[0].getsockname()[1]
        return f"{bracketed_host(self._host)}:{port}"

    def start(self, app: ASGIApp, write_timeout_s: float) -> None:
        """Starts to take calls. write_timeout_s: if the system supports it, connections are dropped
        whose client reads nothing for this long."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            timeout = round(write_timeout_s * 1000)
            for listener in self._sockets:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
        config = uvicorn.Config(
            app,
            loop="none",
            http=Connection,
            lifespan="off",
            ws="none",  # even if a library is installed
            log_config=None,
            log_level="critical",  # errors are logged where they are understood
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        config.load()
        self._server = uvicorn.Server(config)
        # Not `serve`, since the process handles signals. uvicorn gets no sockets either: it would
        # let asyncio accept, which logs and retries thousands of times a second when files run out.
        self._serving = asyncio.create_task(self._server._serve([]))
        for listener in self._sockets:
            self._spawn(self._accept(listener, self._server))

    def close(self) -> None:
        """Frees the port if `start` was never called."""
        for listener in self._sockets:
            listener.close()

    async def stop(self, patience: float) -> None:
        """Takes no more calls; running calls get `patience` seconds to finish."""
        for task in list(self._accepting):
            task.cancel()
        self.close()
        if self._server is None or self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(patience))
        self._server.should_exit = True
        await self._serving

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _accept(self, listener: socket.socket, server: uvicorn.Server) -> None:
        """Accepts connections."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        for accepted in itertools.count(1):
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _NO_FILES:
                    log.warning("nobody can connect: %s", error.strerror)
                # Most other errors concern a single connection.
                await asyncio.sleep(_AGAIN_S if error.errno in _NO_FILES else 0)
                continue
            self._spawn(self._connect(connection, server))
            if not accepted % _AT_ONCE:
                await asyncio.sleep(0)

    async def _connect(self, connection: socket.socket, server: uvicorn.Server) -> None:
        """Makes a connection, with TLS if it is on. Handshakes count as connections, too."""
        task = asyncio.current_task()
        assert task is not None
        place = self._connections.enter(task.cancel)
        limit = None if self._context is None else _HANDSHAKE_S
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(server.config, server.server_state, {}, place=place),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=limit,
            )
        except (OSError, asyncio.CancelledError) as error:
            place.leave()
            if not isinstance(error, OSError):  # an OSError is a failed handshake
                raise
