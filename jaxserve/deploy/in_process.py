"""Calls the frontends in the same process, without a port. Responses come in pieces, each with all
parts that are ready.

A piece is a list of parts. Those of the HTTP frontend are ASGI messages. Those of the gRPC frontend
are serialized messages and, if the call has failed or has trailing metadata, a `Status` at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from starlette.types import ASGIApp, Message, Scope

from jaxserve.server.grpc.calls import ARRIVED

Parts = AsyncGenerator[list[Any], None]
OK = grpc.StatusCode.OK.name


@dataclass(frozen=True)
class Status:
    """How a gRPC call has ended.

    Attributes:
        code: the name of a grpc.StatusCode.
        details: the message, for people.
        trailing: trailing metadata.
    """

    code: str
    details: str
    trailing: list[tuple[str, str]] = field(default_factory=list)


def call_asgi(app: ASGIApp, scope: Scope, body: bytes) -> Parts:
    """The application's response as ASGI messages. Closing the generator hangs up."""

    async def run(say: Callable[[Any], None]) -> None:
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if first:
                return first.pop()
            await asyncio.Event().wait()  # until the call is cancelled
            raise AssertionError("nobody sets it")

        async def send(message: Message) -> None:
            say(message)

        await app(scope, receive, send)

    return _parts(run)


def call_grpc(
    handler: grpc.GenericRpcHandler,
    method: str,
    message: bytes,
    metadata: Sequence[tuple[str, str | bytes]],
    peer: str,
    arrived: float,
) -> Parts:
    """The serialized responses of an RPC, followed by a `Status` if it fails or has trailing
    metadata. Closing the generator cancels the call.

    Args:
        handler: the service.
        method: "/package.Service/Name", a method of the service.
        message: the request, serialized.
        metadata: of the call.
        peer: the client's address.
        arrived: when it came, in seconds of time.monotonic().
    """

    async def run(say: Callable[[Any], None]) -> None:
        context = _Context(message, metadata, peer, arrived, say)
        found = handler.service(_Details(method, tuple(metadata)))
        assert found is not None and found.stream_stream is not None
        with suppress(grpc.aio.AbortError):
            await found.stream_stream(None, context)

    return _parts(run)


async def _parts(run: Callable[[Callable[[Any], None]], Awaitable[None]]) -> Parts:
    """Yields what `run` passes to its callback, in pieces."""
    waiting: list[Any] = []
    news = asyncio.Event()

    def say(part: Any) -> None:
        waiting.append(part)
        news.set()

    running = asyncio.ensure_future(run(say))
    running.add_done_callback(lambda _: news.set())
    try:
        while True:
            await news.wait()
            news.clear()
            if waiting:
                piece = list(waiting)
                waiting.clear()
                yield piece
            elif running.done():
                running.result()
                return
    finally:
        running.cancel()
        await asyncio.wait([running])  # a task that cancels this wait cancels the call
        if not running.cancelled():
            running.exception()  # nobody reads on, so nobody would see it


@dataclass(frozen=True)
class _Details(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Any


class _Context:
    """As much of grpc.aio.ServicerContext as `jaxserve.server.grpc.calls` needs."""

    def __init__(
        self,
        message: bytes,
        metadata: Sequence[tuple[str, str | bytes]],
        peer: str,
        arrived: float,
        say: Callable[[Any], None],
    ) -> None:
        self._message, self._metadata, self._peer, self._say = message, metadata, peer, say
        setattr(self, ARRIVED, arrived)

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        """None: the proxy that passes the call on enforces its deadline."""
        return None

    async def read(self) -> bytes:
        return self._message

    async def write(self, message: Any) -> None:
        self._say(message.SerializeToString())

    def set_trailing_metadata(self, trailing: Sequence[tuple[str, str]]) -> None:
        """Sent last: the caller has written all messages by then."""
        self._say(Status(OK, "", list(trailing)))

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> NoReturn:
        self._say(Status(code.name, details, list(trailing)))
        raise grpc.aio.AbortError(details)
