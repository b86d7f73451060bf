"""OpenAI's batches, on the same journal as gRPC's batches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sqlite3
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from jaxserve.server.access.api_keys import Caller
from jaxserve.server.batches.batch_lines import Result
from jaxserve.server.batches.batch_operations import Batches, Progress
from jaxserve.server.batches.records import BatchRefused, BatchState, NewLine, Outcome, UnknownBatch
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai.batch_file_lines import jsonl_line, read_line, written_line
from jaxserve.server.http.openai.files import FileStore
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import Body, Metadata, Text

_STATUS = {
    BatchState.OPEN: "validating",
    BatchState.COMMITTED: "in_progress",
    BatchState.ENDED: "completed",
    BatchState.CANCELLED: "cancelled",
}
OUTPUT, ERRORS = "output", "errors"


class BatchRequest(Body):
    """POST /v1/batches. completion_window is accepted as asking for best-effort service."""

    input_file_id: Text
    endpoint: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class CallerBatches:
    """The batch operations of one caller. Methods raise BatchRefused, and sqlite3.Error if the disk
    fails.

    Args:
        context: what the routes need.
        batches: all batches.
        store: the caller's view of the uploaded files.
        caller: the client.
    """

    def __init__(
        self, context: RouteContext, batches: Batches, store: FileStore, caller: Caller
    ) -> None:
        self._context, self._batches, self._store = context, batches, store
        self._caller, self._owner = caller, caller.name

    async def create(self, asked: BatchRequest) -> dict[str, Any]:
        """Creates a batch of a file's lines. A malformed line fails by itself. Raises ApiError if
        two lines have the same custom_id, since their results could not be told apart."""
        name, first, seen = f"batch-{uuid.uuid4().hex}", 0, dict[str, int]()
        note = json.dumps({**asked.model_dump(), "created": int(time.time())})
        submit = functools.partial(self._batches.submit, name, caller=self._caller, note=note)
        read = functools.partial(read_line, self._context, asked.endpoint, tenant=self._owner)
        pieces = self._store.lines(asked.input_file_id)
        try:
            while piece := await asyncio.to_thread(next, pieces, None):
                lines = await self._context.requests.read_lines(self._owner, read, piece)
                _check_names(lines, first, seen)
                await submit(first, lines, commit=False)
                first += len(lines)
            if not first:
                raise ApiError(400, "input_file_id: the file has no lines", param="input_file_id")
            return _described(await submit(first, [], commit=True))
        except BaseException:
            await self._forget(name)
            raise

    async def get(self, name: str) -> dict[str, Any]:
        """The batch with this id."""
        return _described(await self._noted(name))

    async def page(self, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """At most `limit` batches, the latest first, starting behind the one with the id `after`;
        and whether there are more."""
        batches = await self._batches.noted(self._owner, after=after, limit=limit + 1)
        return [_described(batch) for batch in batches[:limit]], len(batches) > limit

    async def cancel(self, name: str) -> dict[str, Any]:
        """Cancels a batch. Lines without a result get none."""
        await self._noted(name)
        return _described(await self._batches.cancel(name, self._owner))

    async def delete(self, name: str) -> None:
        """Deletes a batch that is not being served, with its results."""
        await self._noted(name)
        await self._batches.delete(name, self._owner)

    async def results(self, name: str, which: str) -> AsyncGenerator[bytes, None]:
        """Yields the results so far as JSONL, either of lines that succeeded or of lines that
        failed."""
        note = json.loads((await self._noted(name)).status.note)
        pages = self._batches.results(name, 0, follow=False, owner=self._owner)
        async for _, page in pages:
            wanted = [outcome for outcome in page if outcome.failed == (which == ERRORS)]
            if wanted:
                yield await asyncio.to_thread(self._written, note, name, wanted)

    async def _noted(self, name: str) -> Progress:
        """The status and note of a batch that was created here."""
        status = await self._batches.status(name, self._owner)
        if not status.status.note:
            raise UnknownBatch(name)
        return status

    async def _forget(self, name: str) -> None:
        """Deletes what was stored of an incomplete batch. If that fails too, it is deleted by age
        later."""
        with contextlib.suppress(BatchRefused, sqlite3.Error):
            await self._batches.cancel(name, self._owner)
            await self._batches.delete(name, self._owner)

    def _written(self, note: dict[str, Any], name: str, page: Sequence[Outcome]) -> bytes:
        results = ((outcome.line, Result.from_json(outcome.result)) for outcome in page)
        lines = (written_line(self._context, note, name, *result) for result in results)
        return b"".join(map(jsonl_line, lines))


def result_file(file_id: str) -> tuple[str, str] | None:
    """Batch and kind of a results file; None for an upload."""
    for which in (OUTPUT, ERRORS):
        if file_id.endswith("-" + which):
            return file_id.removesuffix("-" + which), which
    return None


def _check_names(lines: Sequence[NewLine], first: int, seen: dict[str, int]) -> None:
    """Checks that further lines have new custom_ids, and adds them to `seen`, with their line
    numbers."""
    for number, line in enumerate(lines, first + 1):
        if line.name and seen.setdefault(line.name, number) != number:
            problem = f"{line.name!r:.80} is that of line {seen[line.name]} and of line {number}"
            message = f"custom_id: {problem}; each has to have its own"
            raise ApiError(400, message, param="custom_id", code="duplicate_custom_id")


def _described(progress: Progress) -> dict[str, Any]:
    status = progress.status
    name, note = status.batch_id, json.loads(status.note)
    ended = int(status.changed) if status.over else None
    return {
        "id": name,
        "object": "batch",
        "endpoint": note["endpoint"],
        "errors": None,
        "input_file_id": note["input_file_id"],
        "completion_window": note["completion_window"],
        "status": _STATUS[status.state],
        "output_file_id": f"{name}-{OUTPUT}" if status.over and status.done else None,
        "error_file_id": f"{name}-{ERRORS}" if status.over and status.failed else None,
        "created_at": note["created"],
        "in_progress_at": note["created"],
        "completed_at": ended if status.state is BatchState.ENDED else None,
        "cancelled_at": ended if status.state is BatchState.CANCELLED else None,
        "request_counts": {
            "total": status.num_lines,
            "completed": status.done,
            "failed": status.failed,
        },
        "metadata": note["metadata"],
    }
