"""The HTTP server, on the event loop of whoever starts it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jaxserve.engine.errors import ConfigError
from jaxserve.server.access.tls import Tls
from jaxserve.server.http.protocol import HEAD_BYTES, Connection
from jaxserve.server.requests.addresses import bind

_BACKLOG = 2048
_KEEP_ALIVE_S = 75


class HttpServer:
    """A port, and the application on it. host: as for gRPC; port: 0 takes a free one; tls: None is
    in the clear. Raises ConfigError if it is taken."""

    def __init__(self, host: str, port: int, tls: Tls | None = None) -> None:
        self._host, self._tls = host, tls
        self._sockets = _bind(host, port)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"."""
        port = self._sockets[0].getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def start(self, app: ASGIApp, write_timeout_s: float) -> None:
        """Takes calls from now on. write_timeout_s: connections whose client takes nothing for so
        long are dropped, where the system does that."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            timeout = round(write_timeout_s * 1000)
            for listener in self._sockets:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
        config = uvicorn.Config(
            app,
            loop="none",
            http=Connection,
            h11_max_incomplete_event_size=HEAD_BYTES,
            lifespan="off",
            ws="none",  # whatever is installed
            log_config=None,
            log_level="critical",  # what goes wrong is logged by whoever knows what it is
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            **_tls_options(self._tls),
        )
        self._server = uvicorn.Server(config)
        # Not `serve`: signals are the process's affair.
        self._serving = asyncio.create_task(self._server._serve(self._sockets))

    def close(self) -> None:
        """Frees the port where `start` was never called."""
        for listener in self._sockets:
            listener.close()

    async def stop(self, patience: float) -> None:
        """Takes no more calls; those that run get `patience` seconds for their last words."""
        if self._server is None or self._serving is None:
            self.close()
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(patience))
        self._server.should_exit = True
        await self._serving


def _tls_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
    if tls.client_ca is not None:
        options |= {"ssl_ca_certs": tls.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _bind(host: str, port: int) -> list[socket.socket]:
    try:
        return bind(host, port, _BACKLOG)  # from now on callers wait, until the server takes them
    except OSError as error:
        where = f"cannot listen on {host}:{port} ({error.strerror})"
        raise ConfigError(f"server.http_port: {where}; 0 takes any free port") from None
