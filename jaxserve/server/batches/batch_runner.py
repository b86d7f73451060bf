"""Serves the lines of the journal's batches."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason
from jaxserve.sched.request import InvalidRequest, Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.batches.batch_lines import Completion, Line, LineError, Result
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import Outcome, Position, Work
from jaxserve.server.requests.call_outcome import (
    CallOutcome,
    CallRecord,
    CallSource,
    CallTracker,
    RateLimitedLog,
)
from jaxserve.server.requests.engine_requests import EngineRequests
from jaxserve.server.requests.output_streams import Delta, RequestFailed, Stream, StreamFailed
from jaxserve.server.requests.pooling.pooled_outputs import vector_base64

RETRY_S = 0.5
"""Seconds until the next try after the engine's queue was full or the disk failed."""
_AHEAD = 64  # lines read from the journal at once
_END = Position(2**62, 0)

T = TypeVar("T")


class DiskThread:
    """Runs blocking disk calls one after the other on a thread of their own, so that they hold up
    neither the event loop nor its other threads."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-batches")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Returns or raises what the function does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class BatchRunner:
    """Has the engine serve the journal's waiting lines in order, and records their results. Create
    it on the event loop that serves; all its methods run there.

    A line counts as in flight until its result is on disk. Results that come during a write are
    written together afterwards.

    Args:
        requests: the way to the engine.
        journal: the batches.
        disk: makes the calls to the journal.
        tracker: counts the lines that are served.
        in_flight: most continuations in the engine at once; a single line may have more.
    """

    def __init__(
        self,
        requests: EngineRequests,
        journal: Journal,
        disk: DiskThread,
        tracker: CallTracker,
        in_flight: int,
    ) -> None:
        self._requests, self._tracker, self._limit = requests, tracker, in_flight
        self._journal, self._disk = journal, disk
        self._model = requests.info().model
        self._read: dict[str, Position] = {}  # by owner, the last line that was read
        self._starting: set[str] = set()  # owners with lines that were read and wait to start
        self._turns = asyncio.Lock()  # owners take turns at the room in the engine; fair
        self._in_flight: dict[tuple[int, int], int] = {}  # continuations by (batch, line)
        self._streams: dict[tuple[int, int], Stream] = {}
        self._dropped: set[int] = set()  # batches whose lines are not to start any more
        self._finished: list[Outcome] = []
        self._work, self._freed, self._results = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = RateLimitedLog()  # a disk may be full for hours
        self.failure: str | None = None

    def start(self) -> None:
        """Starts with the first line that has no result."""
        self._spawn(self._feed())
        self._spawn(self._write())

    async def stop(self) -> None:
        """Writes the results of finished lines and cancels the other lines, which wait for the next
        server."""
        for stream in self._streams.values():
            self._requests.end_stream(stream)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(sqlite3.Error):  # lines without a stored result are served again
            await self._disk.run(self._journal.record, self._finished)
        self.announce()

    def wake(self) -> None:
        """Tells the runner that the journal has new lines."""
        self._work.set()

    def drop(self, batch: int) -> None:
        """Cancels the running lines of a cancelled batch, given by its key."""
        self._dropped.add(batch)
        for (key, _), stream in self._streams.items():
            if key == batch:
                self._requests.cancel_stream(stream)
        self.announce()

    def running(self, batch: int) -> int:
        """Number of a batch's lines in the engine. The batch is given by its key."""
        return sum(key == batch for key, _ in self._streams)

    def news(self) -> asyncio.Event:
        """An event that is set once any batch has something new to read. Take it before reading."""
        return self._news

    def announce(self) -> None:
        """Wakes all who wait for `news`."""
        self._news.set()
        self._news = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.error("batches are not served any more", exc_info=error)
            self.failure = f"batches are not served any more: {error!r}"
            self.announce()

    async def _feed(self) -> None:
        """Starts the lines of each owner in a task of their own. A line may have to wait for its
        grammar or for its owner's share of the queue; it must not hold up other owners' lines."""
        while True:
            self._work.clear()
            after = self._read | dict.fromkeys(self._starting, _END)
            batch_lines = await self._on_disk(self._journal.waiting, self._model, after, _AHEAD)
            ahead: dict[str, list[Work]] = {}
            for work in batch_lines:
                ahead.setdefault(work.owner, []).append(work)
                self._read[work.owner] = work.position
            for owner, lines in ahead.items():
                self._starting.add(owner)
                self._spawn(self._start_lines(owner, lines))
            if len(batch_lines) < _AHEAD:
                await self._work.wait()

    async def _start_lines(self, owner: str, lines: Sequence[Work]) -> None:
        for work in lines:
            line = Line.from_json(work.request)
            await self._room(line.continuations)
            if work.batch not in self._dropped:
                try:
                    await self._start(work, line)
                except EngineStopped:  # the remaining lines wait for the next server, too
                    return
            await asyncio.sleep(0)  # lets the next owner's task run
        self._starting.discard(owner)
        self.wake()

    async def _start(self, work: Work, line: Line) -> None:
        """Submits the line once the engine takes it. Raises EngineStopped if it never will."""
        record, key = self._begin(work), (work.batch, work.line)
        outcome = CallOutcome.SHUTTING_DOWN  # if this task is cancelled
        request: Request | None = None
        try:
            while work.batch not in self._dropped:
                try:
                    if request is None:
                        request = await self._requests.make_request(line.fields(record.caller))
                        record.charge((request,))
                    elif not self._fits(request.sampling.n):  # other lines have started meanwhile
                        await self._room(request.sampling.n)
                    else:
                        stream = self._requests.open_stream(request, bounded=False, record=record)
                        self._in_flight[key], self._streams[key] = request.sampling.n, stream
                        self._spawn(self._collect(work, line, stream, record))
                        return
                except (QueueFull, EngineStopped) as error:
                    if isinstance(error, EngineStopped) and not self._requests.stalled:
                        raise
                    await _wait(self._freed, RETRY_S)
            outcome = CallOutcome.CANCELLED
        except EngineStopped:
            if self._requests.failure is not None:
                outcome = CallOutcome.ENGINE_FAILED
            raise
        except Exception as error:
            if isinstance(error, InvalidRequest):  # another model is served under the same name
                outcome = CallOutcome.INVALID
            else:
                outcome = CallOutcome.FAILED
                logging.exception("line %d of batch %r fails", work.line, work.batch_id)
            self._finish(_outcome(work, Result(line.name, error=LineError.from_error(error))))
        finally:
            if key not in self._streams:
                self._over(record, outcome)

    def _fits(self, n: int) -> bool:
        return not self._in_flight or sum(self._in_flight.values()) + n <= self._limit

    async def _room(self, n: int) -> None:
        async with self._turns:  # no line overtakes one that needs much room
            while not self._fits(n):
                self._freed.clear()
                await self._freed.wait()

    def _begin(self, work: Work) -> CallRecord:
        record = self._tracker.begin(CallSource.BATCH, "batch line")
        record.of(Caller(name=work.owner))
        record.batch, record.line = work.batch_id, work.line
        return record

    def _over(self, record: CallRecord, outcome: CallOutcome) -> None:
        record.outcome = outcome
        self._tracker.ended(record)

    async def _collect(self, work: Work, line: Line, stream: Stream, record: CallRecord) -> None:
        outcome, failed = CallOutcome.SHUTTING_DOWN, None
        try:
            whole = await _whole(stream)
            if whole is not None:
                outcome = CallOutcome.OK
            elif work.batch in self._dropped:
                outcome = CallOutcome.CANCELLED
        except RequestFailed as error:
            whole, outcome, failed = None, CallOutcome.FAILED, LineError.from_error(error)
        except (StreamFailed, EngineStopped):  # the line waits for the next server
            whole, outcome = None, CallOutcome.ENGINE_FAILED
        finally:  # or this task is cancelled, when the server stops
            self._over(record, outcome)
        del self._streams[work.batch, work.line]
        if failed is not None:
            self._finish(_outcome(work, Result(line.name, error=failed)))
        elif whole is None:
            self._release(work.batch, work.line)
        else:
            # With log-probabilities of all tokens, it takes long.
            self._finish(
                await self._requests.run_beside(
                    work.owner,
                    lambda: _outcome(
                        work, Result(line.name, tuple(map(_completion, whole)), note=line.note)
                    ),
                )
            )

    def _finish(self, outcome: Outcome) -> None:
        self._finished.append(outcome)
        self._results.set()

    async def _write(self) -> None:
        while True:
            await self._results.wait()
            self._results.clear()
            count = len(self._finished)
            await self._on_disk(self._journal.record, self._finished[:count])
            for outcome in self._finished[:count]:
                self._release(outcome.batch, outcome.line)
            del self._finished[:count]
            self.announce()

    def _release(self, batch: int, line: int) -> None:
        self._in_flight.pop((batch, line), None)
        self._freed.set()

    async def _on_disk(self, function: Callable[..., T], *arguments: Any) -> T:
        while True:
            try:
                return await self._disk.run(function, *arguments)
            except sqlite3.Error as error:
                self._log.warning("disk", "%s: %s; trying again", self._journal.path, error)
                await asyncio.sleep(RETRY_S)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    event.clear()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def _whole(stream: Stream) -> list[Delta] | None:
    """The whole output of a stream by index; None if it was cancelled. Raises StreamFailed."""
    whole: dict[int, Delta] = {}
    while (delta := await stream.next()) is not None:
        known = whole.setdefault(delta.index, delta)
        if known is not delta:
            known.extend(delta)
    deltas = [whole_delta for _, whole_delta in sorted(whole.items())]
    lasts = [whole_delta.last for whole_delta in deltas]
    if any(last is None or last.finish_reason in (None, FinishReason.CANCELLED) for last in lasts):
        return None
    return deltas


def _completion(whole: Delta) -> Completion:
    last = whole.last
    assert last is not None and last.finish_reason and last.usage and last.timings
    return Completion(
        index=whole.index,
        text="".join(whole.text),
        token_ids=tuple(whole.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timings=dataclasses.replace(last.timings, preempted=()),  # there may be any number of them
        logprobs=tuple(whole.logprobs),
        prompt_logprobs=tuple(whole.prompt_logprobs),
        pooled="" if last.pooled is None else vector_base64(last.pooled),
    )


def _outcome(work: Work, result: Result) -> Outcome:
    failed, text = result.error is not None, result.to_json()
    no_room = "" if failed else Result(result.name, error=LineError.no_room(len(text))).to_json()
    return Outcome(work.batch, work.line, text, failed, no_room)
