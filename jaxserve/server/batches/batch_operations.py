"""Batch operations for the frontends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.engine.errors import EngineStopped
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.batches.batch_lines import Line
from jaxserve.server.batches.batch_runner import BatchRunner, DiskThread
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import (
    BatchConflict,
    BatchState,
    NewLine,
    Outcome,
    Quota,
    Status,
)
from jaxserve.server.requests.call_outcome import CallTracker
from jaxserve.server.requests.engine_requests import EngineRequests

PAGE_BYTES = 1 << 20
"""Bytes of results that are read at once."""
_CLEAN_S = 3600.0


@dataclass(frozen=True)
class BatchSettings:
    """The journal and its limits.

    Attributes:
        journal: the open journal; whoever opened it closes it.
        in_flight: most continuations of batches in the engine at once.
        keep_s: seconds after which a batch is deleted if nothing happens to it.
        key_share: share of the journal that an API key may use, unless the key has a limit of its
            own.
        key_files: number of batches that it may have, likewise.
    """

    journal: Journal
    in_flight: int
    keep_s: float
    key_share: float = 0.25
    key_files: int = 10_000


@dataclass(frozen=True)
class Progress:
    """A batch's status, and the number of its lines that the engine is serving now."""

    status: Status
    running: int

    @property
    def waiting(self) -> int:
        """Number of lines still to be served."""
        if self.status.state is BatchState.CANCELLED:
            return 0
        return self.status.num_lines - self.status.done - self.status.failed - self.running


class Batches:
    """The journal and its runner, on the event loop that serves. All methods run there.

    Methods raise BatchRefused if the journal refuses the operation, and sqlite3.Error if the disk
    fails. Their `owner` is the name of the calling API key, which sees its own batches only; ""
    sees all.

    Args:
        requests: the way to the engine.
        settings: the journal and its limits.
        tracker: counts the lines that are served.

    Attributes:
        keep_s: as in the settings.
    """

    def __init__(
        self, requests: EngineRequests, settings: BatchSettings, tracker: CallTracker
    ) -> None:
        self._requests = requests
        self._journal, self._settings, self.keep_s = settings.journal, settings, settings.keep_s
        self._disk = DiskThread()
        self._runner = BatchRunner(
            requests, settings.journal, self._disk, tracker, settings.in_flight
        )
        self._cleaning: asyncio.Task[None] | None = None
        self._shrinking: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Path:
        """The journal's directory."""
        return self._journal.path.parent

    @property
    def max_bytes(self) -> int:
        """Largest size of the journal, in bytes."""
        return self._journal.max_bytes

    def quota(self, caller: Caller) -> Quota:
        """Quota of the caller's batches; its files have the same quota again."""
        settings, key = self._settings, caller.key
        if key is None:
            return Quota(self.max_bytes, settings.key_files)
        share = int(settings.key_share * self.max_bytes)
        return Quota(key.files_mib << 20 or share, key.files or settings.key_files)

    def start(self) -> None:
        """Starts serving lines and deleting old batches."""
        self._runner.start()
        self._cleaning = asyncio.create_task(self._clean())

    async def stop(self) -> None:
        """Stops both. Lines that are running are served by the next server."""
        for task in (self._cleaning, self._shrinking):
            if task is not None:
                task.cancel()
        await self._runner.stop()

    def closed(self) -> None:
        """Wakes the readers that wait for results, since the engine takes no more requests."""
        self._runner.announce()

    async def checked(
        self, lines: Iterable[tuple[Line, InvalidRequest | None]], owner: str
    ) -> list[NewLine]:
        """The owner's lines for `submit`, each with the problem that its frontend found, if any. A
        problem becomes the line's result."""
        requests = self._requests
        return await requests.read_lines(
            owner, lambda given: given[0].checked(requests, owner, given[1]), lines
        )

    async def submit(
        self,
        batch_id: str,
        first: int,
        lines: Sequence[NewLine],
        *,
        commit: bool,
        caller: Caller | None = None,
        note: str = "",
    ) -> Progress:
        """`Journal.append`, for the model that is served.

        Args:
            batch_id: the batch's id; empty generates one.
            first: number of the first of the lines.
            lines: from `checked`.
            commit: whether the batch is complete.
            caller: the batch's owner, whose quota applies.
            note: text to keep with a new batch.

        Raises:
            EngineStopped: If the server takes no more requests.
        """
        self._requests.check_open()
        name, model = batch_id or uuid.uuid4().hex, self._requests.info().model
        caller = caller or Caller()
        owner, quota = caller.name, self.quota(caller)
        status = await self._disk.run(
            lambda: self._journal.append(
                name, model, first, lines, commit=commit, owner=owner, note=note, quota=quota
            )
        )
        self._runner.wake()
        return self._progress(status)

    async def status(self, batch_id: str, owner: str = "") -> Progress:
        """Status of a batch."""
        return self._progress(await self._disk.run(self._journal.status, batch_id, owner))

    async def noted(self, owner: str, *, after: str | None, limit: int) -> list[Progress]:
        """`Journal.noted`."""
        batches = await self._disk.run(lambda: self._journal.noted(owner, after=after, limit=limit))
        return [self._progress(status) for status in batches]

    async def results(
        self, batch_id: str, first: int, *, follow: bool, owner: str = ""
    ) -> AsyncGenerator[tuple[Progress, list[Outcome]], None]:
        """Yields pages of the batch's status and results in the order of lines. The last page has
        no results.

        Args:
            batch_id: the batch's id.
            first: number of the first line to get a result of.
            follow: whether to wait for every line's result until the batch is over. A page without
                results then says that something has changed.
            owner: as for all methods.

        Raises:
            EngineStopped: If `follow` is set and the server stops first.
            BatchConflict: If `follow` is set and the batch is for another model than the server's.
        """
        while True:
            news = self._runner.news()
            status, page = await self._disk.run(self._page, batch_id, first, follow, owner)
            yield self._progress(status), page
            if page:
                first = page[-1].line + 1
            elif not follow or status.over:
                return
            else:
                self._check_served(status)
                await news.wait()

    async def cancel(self, batch_id: str, owner: str = "") -> Progress:
        """Cancels a batch. Lines without a result get none."""
        status = await self._disk.run(self._journal.cancel, batch_id, owner)
        self._runner.drop(status.key)
        return self._progress(status)

    async def delete(self, batch_id: str, owner: str = "") -> None:
        """Deletes a batch with its results. Their space is free when this returns."""
        await self._disk.run(self._journal.delete, batch_id, owner)
        self._runner.announce()
        await self._in_turns(self._journal.sweep)
        if self._shrinking is None or self._shrinking.done():
            self._shrinking = asyncio.create_task(self._shrink())

    def _page(
        self, batch_id: str, first: int, gapless: bool, owner: str
    ) -> tuple[Status, list[Outcome]]:
        # In this order: if the batch was over when its status was read, all its results are there.
        status = self._journal.status(batch_id, owner)
        page = self._journal.results(
            batch_id, first, max_bytes=PAGE_BYTES, gapless=gapless, owner=owner
        )
        return status, page

    def _progress(self, status: Status) -> Progress:
        return Progress(status, self._runner.running(status.key))

    def _check_served(self, status: Status) -> None:
        stopped = self._requests.closed or self._runner.failure
        if stopped is not None:
            raise EngineStopped(stopped)
        served = self._requests.info().model
        if status.model != served:
            problem = f"is for the model {status.model!r}; this server serves {served!r}"
            raise BatchConflict(f"batch_id: batch {status.batch_id!r} {problem}")

    async def _in_turns(self, step: Callable[[], bool]) -> None:
        """Repeats a step until it returns False. Other calls may use the disk in between."""
        while await self._disk.run(step):
            pass

    async def _shrink(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # `_clean` tries again
            await self._in_turns(self._journal.shrink)

    async def _clean(self) -> None:
        while True:
            try:
                if await self._disk.run(self._journal.clean, self.keep_s):
                    self._runner.announce()
                await self._in_turns(self._journal.sweep)
                await self._in_turns(self._journal.shrink)
            except sqlite3.Error as error:
                logging.warning("%s: %s", self._journal.path, error)
            await asyncio.sleep(_CLEAN_S)
