"""The port for Prometheus. It has a thread of its own, so that it answers even if the event loop is
busy."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.access.api_keys import Unauthenticated, authorization
from jaxserve.server.access.browser_origins import NotAllowed
from jaxserve.server.access.options import Access
from jaxserve.server.http.admission_middleware import refusal_of
from jaxserve.server.http.transport.http_server import HttpServer
from jaxserve.server.loop_thread import LoopThread
from jaxserve.server.telemetry.metrics import READER

MAX_CONNECTIONS = 16  # one more closes the longest silent connection
_WRITE_S = 10.0


class MetricsServer:
    """Serves /metrics on a port of its own.

    Args:
        registry: the metrics.
        host: where to listen.
        port: 0 takes a free one.
        access: who may read them, and TLS.

    Attributes:
        address: "host:port".

    Raises:
        ConfigError: If the port is taken.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, access: Access) -> None:
        self._http = HttpServer(
            host, port, access.tls, field="server.metrics_port", connections=MAX_CONNECTIONS
        )
        self.address = self._http.address
        self._loop = LoopThread("jaxserve-metrics")
        app = _guarded(make_asgi_app(registry), access)
        self._loop.call(lambda: self._http.start(app, _WRITE_S))

    def stop(self) -> None:
        """Closes the port and ends the thread."""
        self._loop.run(self._http.stop(patience=0))
        self._loop.close()


def _guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """Asks for an API key; where none is needed, refuses pages of other sites."""
    browsers = access.browsers

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if browsers is not None:
                headers = Headers(scope=scope)
                browsers.check(headers.getlist("host"), headers.getlist("origin"))
            READER.set(access.keys.caller(authorization(scope["headers"])))
        except (NotAllowed, Unauthenticated) as error:
            await refusal_of(error).response()(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guarded
