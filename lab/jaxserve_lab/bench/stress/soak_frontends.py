"""Clients of a server's frontends for `bench soak`, with streams that can be left."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from jaxserve.client import Client
from jaxserve.client.connection import NO_PROXY
from jaxserve.client.messages import make_request
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve_lab.bench.stress.http_calls import COMPLETIONS


class Refused(Exception):
    """The server ended a call. status: gRPC's, or HTTP's error code."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Asked:
    """A generating call.

    Attributes:
        prompt: Token ids.
        max_tokens: Limit of the output.
        sampling: Fields with the same names in gRPC and HTTP.
        slo, slo_class, tier, request_id: As for `make_request`.
    """

    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, float] = field(default_factory=dict)
    slo_class: str = ""
    tier: str | None = None
    request_id: str = ""

    @property
    def tier_served(self) -> str:
        """The call's effective tier: its own, its class's, or real-time."""
        return self.tier or ("best_effort" if self.slo_class == "offline" else "realtime")


class GrpcDoor:
    """A client of the server's gRPC frontend.

    Attributes:
        name: Name of the frontend.
        method: Name of generating calls in the server's metrics.
    """

    name, method = "gRPC", "Generate"

    def __init__(self, address: str) -> None:
        self.client = Client(address)

    def stream(self, asked: Asked, timeout_s: float | None = None) -> GrpcStream:
        """Sends a call. timeout_s: its deadline, known to the server; None: none."""
        return GrpcStream(self.client.address, asked, timeout_s)

    def close(self) -> None:
        """Closes the connection of its client."""
        self.client.close()


class GrpcStream:
    """A running call over gRPC, on its own channel, so that closing it cuts off only this call.

    Args:
        address: host:port.
        asked: The call.
        timeout_s: The call's deadline; None for none.
    """

    def __init__(self, address: str, asked: Asked, timeout_s: float | None) -> None:
        self._channel = grpc.insecure_channel(
            address, options=(NO_PROXY, ("grpc.use_local_subchannel_pool", 1))
        )
        message = make_request(
            asked.prompt,
            max_tokens=asked.max_tokens,
            request_id=asked.request_id,
            slo=asked.slo,
            slo_class=asked.slo_class,
            tier=asked.tier,
            **asked.sampling,
        )
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._call = stub.Generate(message, timeout=timeout_s)

    def texts(self) -> Iterator[str]:
        """The pieces of the answer as they come. Raises Refused."""
        try:
            for message in self._call:
                yield message.text
        except grpc.RpcError as error:
            raise Refused(error.code().name) from None

    def leave(self, *, vanish: bool) -> None:
        """Ends the call by cancelling it or, to vanish, by closing the connection. Only once."""
        if not vanish:
            self._call.cancel()
        self._channel.close()


class HttpDoor:
    """Like `GrpcDoor`, for the HTTP frontend."""

    name, method = "HTTP", f"http {COMPLETIONS}"

    def __init__(self, address: str) -> None:
        self.address = address

    def stream(self, asked: Asked, timeout_s: float | None = None) -> HttpStream:
        """Like `GrpcDoor.stream`; HTTP has no deadlines, so the client gives up after timeout_s
        without a byte."""
        return HttpStream(self.address, completion(asked, stream=True), timeout_s)

    def connect(self) -> http.client.HTTPConnection:
        """A connection, to be closed."""
        return http.client.HTTPConnection(self.address)


class HttpStream:
    """Like `GrpcStream`, over HTTP, on its own connection.

    Args:
        address: host:port.
        body: The POST's body, a JSON object.
        timeout_s: Limit of the time without a byte; None for no limit.
    """

    def __init__(self, address: str, body: dict[str, Any], timeout_s: float | None) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", COMPLETIONS, json.dumps(body), headers)
        self._answer: http.client.HTTPResponse | None = None

    def texts(self) -> Iterator[str]:
        """Like `GrpcStream.texts`."""
        self._answer = self._connection.getresponse()
        if self._answer.status != http.HTTPStatus.OK:
            raise Refused(error_code(self._answer.status, self._answer.read()))
        while line := self._answer.readline():
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise Refused(str(event["error"]["code"]))
                yield "".join(choice["text"] for choice in event["choices"])
        raise Refused("cut short")

    def leave(self, *, vanish: bool) -> None:
        """Like `GrpcStream.leave`. vanish: by a reset, without ending the connection properly."""
        if vanish and self._connection.sock is not None:
            never = b"\1\0\0\0\0\0\0\0"  # linger on, for 0 s
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, never)
        if self._answer is not None:
            self._answer.close()
        self._connection.close()


Door = GrpcDoor | HttpDoor
Stream = GrpcStream | HttpStream


def completion(asked: Asked, **more: Any) -> dict[str, Any]:
    """The body for HTTP; the temperature is 0 by default, as with gRPC."""
    body = {
        "prompt": asked.prompt,
        "max_tokens": asked.max_tokens,
        "temperature": 0.0,
        **asked.sampling,
        "slo": asked.slo or None,
        "slo_class": asked.slo_class or None,
        "tier": asked.tier,
        "request_id": asked.request_id or None,
        **more,
    }
    return {name: value for name, value in body.items() if value is not None}


def error_code(status: int, body: bytes) -> str:
    """The code in an HTTP error's body, or the status without one."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["code"] or status)
    return str(status)
