"""What goes wrong with a call."""

from __future__ import annotations

from typing import Any

import grpc


class ServerError(RuntimeError):
    """The server refused or ended a call. code: the gRPC status, as "INVALID_ARGUMENT"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unreachable(ServerError):
    """No server answers at that address."""


def explained(error: Any, address: str) -> ServerError:
    """A grpc.RpcError in words."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        problem = f"no server answers at {address}: is it running? (make serve)"
        return Unreachable(code.name, problem)
    return ServerError(code.name, details or code.name.lower().replace("_", " "))
