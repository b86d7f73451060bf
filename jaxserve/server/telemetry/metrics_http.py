"""Prometheus' HTTP server with a bound on its connections: idle ones make room for new ones."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import OrderedDict
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from jaxserve.server.access.api_keys import Unauthenticated
from jaxserve.server.access.browser_origins import NotAllowed
from jaxserve.server.access.options import Access

MAX_CONNECTIONS = 16
_TIMEOUT_S = 10.0  # without a byte
_MOST_S = 30.0  # that a connection is there
_AGAIN_S = 1.0  # after there was no file for one


class MetricsHttp:
    """Serves a registry, to those whom `access` lets in, from a thread of its own, and from one
    more for each of at most MAX_CONNECTIONS connections, for _MOST_S each; one more closes the
    oldest. Raises OSError if the port is taken."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, access: Access) -> None:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = info[0]
        context = None if access.tls is None else access.tls.context()
        kind = type("_Server", (_Server,), {"address_family": family, "context": context})
        app = _guarded(make_wsgi_app(registry), access)
        self._http: Any = make_server(str(address[0]), port, app, kind, handler_class=_Handler)
        self.port: int = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, name="jaxserve-metrics")
        self._thread.daemon = True
        self._thread.start()

    def stop(self) -> None:
        """Closes the port and ends the thread."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _guarded(app: Any, access: Access) -> Any:
    """The WSGI application, for those who have a key; where none is needed, for no other site's
    pages."""
    browsers = access.browsers

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        given = environ.get("HTTP_AUTHORIZATION")
        host, origin = (environ.get(name) for name in ("HTTP_HOST", "HTTP_ORIGIN"))
        try:
            if browsers is not None:
                browsers.check([host] if host else [], [origin] if origin else [])
            access.keys.caller(None if given is None else given.encode("latin-1"))
        except NotAllowed as error:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [f"{error}\n".encode()]
        except Unauthenticated as error:
            headers = [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")]
            start_response("401 Unauthorized", headers)
            return [f"{error}\n".encode()]
        return app(environ, start_response)

    return guarded


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Server(ThreadingWSGIServer):
    context: ssl.SSLContext | None = None
    request_queue_size = 128  # with the default of 5 bursts are tried again for seconds

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._open: OrderedDict[int, tuple[Any, float]] = OrderedDict()  # and since when
        self._lock = threading.Lock()
        super().__init__(*arguments, **named)

    def get_request(self) -> Any:
        """A connection; its own thread shakes hands, so that nobody waits for it."""
        try:
            request, address = super().get_request()
        except OSError:
            time.sleep(_AGAIN_S)  # it waits there still, and would be tried again at once
            raise
        if self.context is not None:
            request = self.context.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, once there is room for it."""
        with self._lock:
            self._open[id(request)] = (request, time.monotonic())
        self._drop(MAX_CONNECTIONS)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Twice a second: closes those that take too long."""
        with self._lock:
            begun = time.monotonic() - _MOST_S
            left = sum(since > begun for _, since in self._open.values())
        self._drop(left)

    def _drop(self, left: int) -> None:
        """The oldest, until so many are left."""
        with self._lock:
            over = [self._open.popitem(last=False)[1] for _ in range(len(self._open) - left)]
        for request, _ in over:
            with contextlib.suppress(OSError):  # its thread finds it closed, and ends
                request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """At the end of its thread."""
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a scraper that has gone is not the server's trouble."""
