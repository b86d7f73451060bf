"""Calls of a server over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator

from jaxserve.client.connection import Tls, key_metadata
from jaxserve.client.errors import PORTS, ServerError, Unreachable

DEFAULT_HTTP_ADDRESS = "localhost:8000"
_PASSING = (429, 502, 503, 504)


class HttpCalls:
    """Calls of one server, each on a connection of its own.

    Args:
        address: "host:port" of the server's HTTP.
        api_key: API key for servers that need one; None takes the environment's JAXSERVE_API_KEY,
            if set.
        tls: TLS settings; None connects in the clear.
        timeout: seconds that the server may be silent; None for any number.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout: float | None = None,
    ) -> None:
        self.address = address
        self._tls, self._timeout = _context(tls), timeout
        self._headers = dict(key_metadata(api_key, address, tls))

    @contextlib.contextmanager
    def call(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> Iterator[http.client.HTTPResponse]:
        """The response, whose body is still to be read.

        Args:
            method: the HTTP method.
            path: the path with its query.
            body: bytes of the body, if any.
            kind: the body's Content-Type.

        Raises:
            ServerError: As the server says; UNAVAILABLE if the same call may succeed later.
                Unreachable if no server answers, or the connection breaks while the body is read.
        """
        connection = (
            http.client.HTTPConnection(self.address, timeout=self._timeout)
            if self._tls is None
            else http.client.HTTPSConnection(self.address, timeout=self._timeout, context=self._tls)
        )
        try:
            connection.connect()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # A server that refuses may answer before it has read all of the body.
                connection.request(method, path, body, {**self._headers, "Content-Type": kind})
            response = connection.getresponse()
            if response.status != 200:
                problem = _problem(response.read()) or f"HTTP {response.status}"
                passing = response.status in _PASSING
                raise ServerError("UNAVAILABLE" if passing else str(response.status), problem)
            yield response
        except ConnectionRefusedError:
            problem = f"no server answers at {self.address}: is it running? (jaxserve serve)"
            raise Unreachable("UNAVAILABLE", problem) from None
        except (OSError, http.client.HTTPException) as error:
            if type(error) is http.client.BadStatusLine:
                problem = f"{self.address} does not speak HTTP: {PORTS}"
                raise ServerError("UNIMPLEMENTED", problem) from None
            problem = f"{self.address}: {error or type(error).__name__}"
            raise Unreachable("UNAVAILABLE", problem) from None
        finally:
            connection.close()


def _context(tls: Tls | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _problem(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
