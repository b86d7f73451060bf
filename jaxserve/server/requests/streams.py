"""From the engine's thread to the calls that wait on the event loop.

The engine calls `OutputRouter.on_output` once a row and step. That only appends to a deque; the
loop is woken at most once until it has emptied it. What a call has not sent yet is merged, so a
client that reads slowly costs its pending tokens, not a message for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from jaxserve.engine.output import FinishReason, Output, TokenLogprobs

FAILED = "the engine failed"
MAX_DELTA_TOKENS = 1024
"""Keeps a message with 20 logprobs a token well below the 4 MiB that gRPC clients take."""


class DuplicateRequest(ValueError):
    """A request with that id is still running."""


class StreamFailed(RuntimeError):
    """The engine failed; the message says how."""


@dataclass
class Delta:
    """What one continuation has produced and the client has not been sent.

    index: which of the n continuations. text: pieces, in order. last: the output that ended it,
    None while more is to come.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Output | None = None

    def add(self, output: Output) -> None:
        """Appends what the engine says next of this continuation."""
        self.token_ids.extend(output.token_ids)
        if output.text:
            self.text.append(output.text)
        self.logprobs.extend(output.logprobs)
        if output.finish_reason is not None:
            self.last = output


class Stream:
    """The outputs of one request, for one reader. Lives on the event loop's thread."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self._unfinished = set(range(n))
        self._pending: deque[Delta] = deque()
        self._growing: dict[int, Delta] = {}  # by index, the pending one that more is added to
        self._error: str | None = None
        self._news = asyncio.Event()
        self._abandoned = False

    @property
    def finished(self) -> bool:
        """True once the engine has said its last word on every continuation."""
        return not self._unfinished

    def push(self, output: Output) -> None:
        """Takes in what the engine says next, merged with what the reader has not had yet. An ERROR
        ends the stream as `fail` does."""
        if output.finish_reason is not None:
            self._unfinished.discard(output.index)
        if self._abandoned:
            return
        if output.finish_reason is FinishReason.ERROR:
            self.fail(output.error or FAILED)
            return
        delta = self._growing.get(output.index)
        if delta is None or len(delta.token_ids) >= MAX_DELTA_TOKENS:
            delta = self._growing[output.index] = Delta(output.index)
            self._pending.append(delta)
        delta.add(output)
        self._news.set()

    def fail(self, error: str) -> None:
        """Ends the stream with `StreamFailed` once what is pending has been read."""
        self._unfinished.clear()
        self._error = error
        self._news.set()

    def abandon(self) -> None:
        """Nobody reads any more; the engine may still have a last word."""
        self._abandoned = True
        self._pending.clear()
        self._growing.clear()

    async def next(self) -> Delta | None:
        """What is pending of one continuation, the oldest first; None at the end.

        Raises StreamFailed.
        """
        while True:
            if self._pending:
                delta = self._pending.popleft()
                if self._growing[delta.index] is delta:
                    del self._growing[delta.index]
                return delta
            if self._error is not None:
                raise StreamFailed(self._error)
            if self.finished:
                return None
            self._news.clear()
            await self._news.wait()


class OutputRouter:
    """Hands each output to its request's stream. All but `on_output` run on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inbox: deque[Output] = deque()
        self._wake_pending = False
        self._streams: dict[str, Stream] = {}

    def open(self, request_id: str, n: int) -> Stream:
        """The stream of a new request of n continuations. Raises DuplicateRequest while one of that
        id is open."""
        if request_id in self._streams:
            raise DuplicateRequest(f"request_id: {request_id!r} is already running")
        stream = self._streams[request_id] = Stream(request_id, n)
        return stream

    def forget(self, request_id: str) -> None:
        """Drops the stream of a request that the engine has refused."""
        self._streams.pop(request_id, None)

    def unfinished(self) -> list[str]:
        """Ids of the requests on which the engine has not said its last word."""
        return list(self._streams)

    def fail_all(self, error: str) -> None:
        """Ends every open stream with `StreamFailed(error)`, after what it has pending."""
        self._deliver()
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()

    def on_output(self, output: Output) -> None:
        """For the engine's thread: constant time, at most one wake-up a batch."""
        self._inbox.append(output)
        if not self._wake_pending:
            self._wake_pending = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                self._inbox.clear()
                self._wake_pending = False

    def _deliver(self) -> None:
        # Cleared before the inbox is emptied, so that an output appended meanwhile wakes us again.
        self._wake_pending = False
        while self._inbox:
            output = self._inbox.popleft()
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.push(output)
            if stream.finished:
                del self._streams[output.request_id]
