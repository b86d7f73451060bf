"""Calls the frontends in the same process, without a port. Responses come in pieces, each with all
parts that are ready.

A piece is a list of parts. Those of the HTTP frontend are ASGI messages. Those of the gRPC frontend
are serialized messages and, if the call has failed or has trailing metadata, a `Status` at the end.
If an answer can be resumed elsewhere, each piece but the last ends with a mark that says so, or
which tokens all pieces so far stand for (`server/moves/resume_point.py`).
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
from jaxserve.server.moves.passage import PASSAGE, Passage
from jaxserve.server.moves.resume_point import Begun, Cache, Mark, Passed, unmarked

Parts = AsyncGenerator[list[Any], None]
OK = grpc.StatusCode.OK.name
_MARKS = 32  # that wait together if nothing is said between them, as in answers that come whole


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


def call_asgi(app: ASGIApp, scope: Scope, body: bytes, passage: Passage | None = None) -> Parts:
    """The application's response as ASGI messages. Closing the generator hangs up.

    Args:
        app: the application.
        scope: the call's.
        body: all of it.
        passage: by which the answer can go on elsewhere; None if it cannot.
    """

    async def run(say: Callable[[Any], None]) -> None:
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if first:
                return first.pop()
            await asyncio.Event().wait()  # until the call is cancelled
            raise AssertionError("nobody sets it")

        async def send(message: Message) -> None:
            say(message)

        await app({**scope, "state": {**scope.get("state", {}), PASSAGE: passage}}, receive, send)

    return _parts(run, passage)


def call_grpc(
    handler: grpc.GenericRpcHandler,
    method: str,
    message: bytes,
    metadata: Sequence[tuple[str, str | bytes]],
    peer: str,
    passage: Passage | None = None,
) -> Parts:
    """The serialized responses of an RPC, followed by a `Status` if it fails or has trailing
    metadata. Closing the generator cancels the call.

    Args:
        handler: the service.
        method: "/package.Service/Name", a method of the service.
        message: the request, serialized.
        metadata: of the call.
        peer: the client's address.
        passage: as for `call_asgi`.
    """

    async def run(say: Callable[[Any], None]) -> None:
        context = _Context(message, metadata, peer, say)
        setattr(context, PASSAGE, passage)
        setattr(context, ARRIVED, None if passage is None else passage.began)
        found = handler.service(_Details(method, tuple(metadata)))
        assert found is not None and found.stream_stream is not None
        with suppress(grpc.aio.AbortError):
            await found.stream_stream(None, context)

    return _parts(run, passage)


async def _parts(
    run: Callable[[Callable[[Any], None]], Awaitable[None]], passage: Passage | None
) -> Parts:
    """Yields what `run` passes to its callback, and the passage's marks, in pieces."""
    waiting = _Waiting(passage)
    news = waiting.news
    if passage is not None:
        passage.tell = waiting.say

    running = asyncio.ensure_future(run(waiting.say))
    running.add_done_callback(lambda _: news.set())
    try:
        while True:
            await news.wait()
            news.clear()
            over = running.done()
            left = passage is not None and passage.left
            if piece := waiting.take(everything=over and not left):
                yield piece
            if left:
                return
            if over:
                running.result()
                return
    finally:
        running.cancel()
        await asyncio.wait([running])  # a task that cancels this wait cancels the call
        if not running.cancelled():
            running.exception()  # nobody reads on, so nobody would see it


class _Waiting:
    """Parts that nobody has taken yet. news: set if there may be a piece."""

    def __init__(self, passage: Passage | None) -> None:
        self.news = asyncio.Event()
        self._passage, self._parts = passage, list[Any]()

    def say(self, part: Any) -> None:
        """Adds a part, unless the client has it."""
        passage = self._passage
        if passage is not None and passage.left:
            return
        if isinstance(part, Cache):  # what was said without a mark is said again elsewhere
            self._parts = self._parts[: self._marked()]
        if passage is not None and passage.silent and not (_fails(part) or isinstance(part, Mark)):
            return
        self._parts.append(part)
        if passage is None or not passage.begun or self._whole(part):
            self.news.set()

    def _whole(self, part: Any) -> bool:
        """Whether a piece ends with this part, and is worth sending."""
        many = len(self._parts) >= _MARKS
        alone = isinstance(part, Begun | Cache)
        return alone or (isinstance(part, Passed) and (many or bool(unmarked(self._parts))))

    def take(self, *, everything: bool) -> list[Any]:
        """The next piece; empty if there is none yet."""
        end = len(self._parts)
        if not everything and self._passage is not None and self._passage.begun:
            end = self._marked()
        piece, self._parts = self._parts[:end], self._parts[end:]
        return piece

    def _marked(self) -> int:
        """How many parts there are up to the last mark."""
        places = range(len(self._parts), 0, -1)
        return next((i for i in places if isinstance(self._parts[i - 1], Mark)), 0)


def _fails(part: Any) -> bool:
    """Whether a part says that the call has failed before it was answered."""
    if isinstance(part, Status):
        return part.code != OK
    return isinstance(part, dict) and part.get("status", 0) >= 300


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
        say: Callable[[Any], None],
    ) -> None:
        self._message, self._metadata, self._peer, self._say = message, metadata, peer, say

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
