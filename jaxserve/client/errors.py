"""Errors of calls."""

from __future__ import annotations

from typing import Any

import grpc

_PASSING = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED")
PORTS = (
    "`jaxserve complete` and `jaxserve batch` call a server's gRPC port (--port=50051), "
    "`jaxserve chat`, and `jaxserve batch` with OpenAI's lines, its HTTP port (--http_port=8000)"
)
_NOT_GRPC = "Failed parsing HTTP/2"  # as when HTTP/1.1 answers
_TOO_LARGE = "message larger than max"  # also RESOURCE_EXHAUSTED in gRPC


_RETRY_KEY = "grpc-retry-pushback-ms"


class ServerError(RuntimeError):
    """The server refused or ended a call.

    Args:
        code: name of the gRPC status, such as "INVALID_ARGUMENT".
        message: what the server said.
        retry_s: seconds after which the server wants the call to be retried; None if it did not
            say.
    """

    def __init__(self, code: str, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_s = retry_s

    @property
    def passing(self) -> bool:
        """Whether a retry may succeed: the server is busy or away."""
        return self.code in _PASSING and _TOO_LARGE not in str(self)


class Unreachable(ServerError):
    """No server answers at that address."""


def explained(error: Any, address: str) -> ServerError:
    """The error for a grpc.RpcError, with a hint if the cause is known."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "handshake" in details.lower():
        why = details.rpartition("last error: ")[2]
        return Unreachable(code.name, f"no TLS with {address}: {why}")
    if code is grpc.StatusCode.UNAVAILABLE and _NOT_GRPC in details:
        return Unreachable(code.name, f"{address} does not speak gRPC: {PORTS}")
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        problem = f"no server answers at {address}: is it running? (jaxserve serve)"
        if "socket closed" in details.lower():
            problem = f"{address} hangs up at once: does it speak TLS? (--tls)"
        return Unreachable(code.name, problem)
    said = dict(error.trailing_metadata() or ()).get(_RETRY_KEY, "")
    retry_s = int(said) / 1000 if said.isdecimal() else None
    return ServerError(code.name, details or code.name.lower().replace("_", " "), retry_s)
