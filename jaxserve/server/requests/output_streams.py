"""Hands outputs from the engine's thread to the calls that wait on the event loop.

The engine calls `OutputRouter.on_output` once per row and step. That only appends to a deque, and
the loop is woken at most once until it has emptied it. Output that a call has not sent yet is
merged, so a slow client costs its pending tokens, not a message for each. A request whose pending
output exceeds the stream's buffer is ended.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.engine.output import FinishReason, Output, TokenLogprobs
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.logprob_arrays import LogprobArrays

FAILED = "the engine failed"
BUFFER_BYTES = 1 << 20
MAX_DELTA_BYTES = 64 << 10
"""A message is closed beyond this size, so that it stays well below the 4 MiB that gRPC clients
accept, and an unread message is small."""
_TOKEN_BYTES = 48  # an int, and its place and its time's in a list


class DuplicateRequest(ValueError):
    """A request with that id is still running."""


class StreamFailed(RuntimeError):
    """The engine failed; the message says how."""


class RequestFailed(StreamFailed):
    """The request failed, but the engine goes on; the message says how."""


class RequestCancelled(RuntimeError):
    """The request was cancelled, though its reader is still there."""


class SlowReader(RuntimeError):
    """More output waits for the reader than is allowed, or it waits for too long."""


@dataclass
class Delta:
    """Output of one continuation that was not sent to the client yet.

    Attributes:
        index: which of the n continuations.
        token_ids: new tokens, in order.
        text: new pieces of text, in order.
        last: the output that finished the continuation; None while more is to come.
        expected_missed, replayed: as `Output`.
        times: when each token came, in seconds on the engine's clock.
        size: its approximate memory in bytes.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    last: Output | None = None
    expected_missed: bool = False
    replayed: bool = False
    times: list[float] = field(default_factory=list)
    size: int = 0
    _logprobs: LogprobArrays = field(default_factory=LogprobArrays)
    _prompt_logprobs: LogprobArrays = field(default_factory=LogprobArrays)

    def add(self, output: Output) -> None:
        """Appends the engine's next output for this continuation."""
        self.token_ids.extend(output.token_ids)
        self.times.extend(output.token_times)
        self.size += _TOKEN_BYTES * len(output.token_ids)
        if output.text:
            self.text.append(output.text)
            self.size += sys.getsizeof(output.text)
        self.size += self._logprobs.add(output.logprobs)
        self.size += self._prompt_logprobs.add(output.prompt_logprobs)
        self.expected_missed |= output.expected_missed
        if output.finish_reason is not None:
            self.last = output

    def extend(self, later: Delta) -> None:
        """Appends a later delta of the same continuation."""
        self.token_ids += later.token_ids
        self.times += later.times
        self.text += later.text
        self._logprobs.extend(later._logprobs)
        self._prompt_logprobs.extend(later._prompt_logprobs)
        self.size += later.size
        self.expected_missed |= later.expected_missed
        self.last = later.last

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One entry per token, if asked for."""
        return self._logprobs.entries()

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """One entry for each further prompt token, from the second token on, if asked for."""
        return self._prompt_logprobs.entries()


class Stream:
    """The outputs of one request, for one reader. Used on the event loop's thread only.

    Args:
        request_id: the request's id in the engine.
        n: number of its continuations.
        buffer_bytes: output that may wait for the reader, in bytes.
        cancel: cancels the request in the engine.
        record: the call's record, which is told of every output; None keeps none.
    """

    def __init__(
        self,
        request_id: str,
        n: int,
        *,
        buffer_bytes: float = BUFFER_BYTES,
        cancel: Callable[[], None] = lambda: None,
        record: CallRecord | None = None,
    ) -> None:
        self.request_id = request_id
        self._record = record
        self._unfinished = set(range(n))
        self._pending: deque[Delta] = deque()
        self._growing: dict[int, Delta] = {}  # by index, the pending delta that grows
        self._size, self._most = 0, buffer_bytes
        self._cancel = cancel
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._abandoned = False

    @property
    def finished(self) -> bool:
        """Whether the engine has finished every continuation."""
        return not self._unfinished

    def push(self, output: Output) -> None:
        """Adds the engine's next output, merged with what the reader has not read yet. An ERROR
        ends the stream as `fail` does; a full buffer ends it at once."""
        if self._record is not None:
            self._record.heard(output)
        if output.finish_reason is not None:
            self._ended({output.index})
        if self._abandoned:
            return
        if output.finish_reason is FinishReason.ERROR:
            if not self.finished:  # the request's other continuations end with it
                self._cancel()
            kind = StreamFailed if output.engine_failed else RequestFailed
            self.fail(output.error or FAILED, kind)
            return
        delta = self._growing.get(output.index)
        replayed = output.replayed
        if delta is None or delta.size >= MAX_DELTA_BYTES or delta.replayed != replayed:
            delta = self._growing[output.index] = Delta(output.index, replayed=replayed)
            self._pending.append(delta)
        before = delta.size
        delta.add(output)
        if replayed:  # nobody reads it
            delta.size = 0
        self._size += delta.size - before
        # One message may always wait, however large a step's text is.
        if self._size > self._most and len(self._pending) > 1:
            self._overflow()
        self._news.set()

    def _overflow(self) -> None:
        limit = f"{self._size >> 10} KiB wait, more than server.stream_buffer_kib"
        self._error = SlowReader(f"the call is read too slowly: {limit}")
        self.abandon()
        if not self.finished:
            self._cancel()

    def fail(self, error: str, kind: type[Exception] = StreamFailed) -> None:
        """Ends the stream with kind(error) once the reader has read what is pending."""
        self._ended(set(self._unfinished))
        self._error = self._error or kind(error)
        self._news.set()

    def _ended(self, indices: set[int]) -> None:
        if not self._unfinished:
            return
        self._unfinished -= indices
        if not self._unfinished and self._record is not None:
            self._record.closed()

    def abandon(self) -> None:
        """Drops what is pending: there is no reader any more. The engine may still have output for
        it."""
        self._abandoned = True
        self._size = 0
        self._pending.clear()
        self._growing.clear()

    async def next(self) -> Delta | None:
        """The oldest pending delta of any continuation; None at the end.

        Raises the error that the stream failed with, such as SlowReader.
        """
        while True:
            if self._pending:
                delta = self._pending.popleft()
                self._size -= delta.size
                if self._growing[delta.index] is delta:
                    del self._growing[delta.index]
                return delta
            if self._error is not None:
                raise self._error
            if self.finished:
                return None
            self._news.clear()
            await self._news.wait()


class OutputRouter:
    """Hands each output to its request's stream. All methods but `on_output` run on the loop's
    thread.

    Args:
        loop: the event loop that serves.
        buffer_bytes: output that may wait for the reader of one stream, in bytes.
        cancel: cancels the request with that id in the engine.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        buffer_bytes: float = BUFFER_BYTES,
        cancel: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._loop = loop
        self._buffer_bytes, self._cancel = buffer_bytes, cancel
        self._inbox: deque[Output] = deque()
        self._wake_pending = False
        self._streams: dict[str, Stream] = {}

    def open_stream(
        self, request_id: str, n: int, *, bounded: bool = True, record: CallRecord | None = None
    ) -> Stream:
        """Opens the stream of a new request.

        Args:
            request_id: the request's id in the engine.
            n: number of its continuations.
            bounded: whether to limit what waits for the reader.
            record: the call's record, which is told of every output.

        Raises:
            DuplicateRequest: If a stream with this id is open.
        """
        if request_id in self._streams:
            own_id = request_id if record is None else record.caller.own(request_id)
            raise DuplicateRequest(f"request_id: {own_id!r} is already running")
        stream = self._streams[request_id] = Stream(
            request_id,
            n,
            buffer_bytes=self._buffer_bytes if bounded else math.inf,
            cancel=lambda: self._cancel(request_id),
            record=record,
        )
        return stream

    def forget(self, request_id: str) -> None:
        """Drops the stream of a request that the engine has refused."""
        self._streams.pop(request_id, None)

    def unfinished(self) -> list[str]:
        """Ids of the requests that the engine has not finished."""
        return list(self._streams)

    def fail_all(self, error: str, kind: type[Exception] = StreamFailed) -> None:
        """Ends every open stream with kind(error), after what is pending."""
        self._deliver()
        for stream in self._streams.values():
            stream.fail(error, kind)
        self._streams.clear()

    def on_output(self, output: Output) -> None:
        """Queues an output, on the engine's thread. Takes constant time; wakes the loop at most
        once for many."""
        self._inbox.append(output)
        if not self._wake_pending:
            self._wake_pending = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: no reader is left
                self._inbox.clear()
                self._wake_pending = False

    def _deliver(self) -> None:
        # Cleared before the inbox is emptied, so that an output appended meanwhile wakes the loop
        # again.
        self._wake_pending = False
        while self._inbox:
            output = self._inbox.popleft()
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.push(output)
            if stream.finished:
                del self._streams[output.request_id]
