"""OpenAI's batches, on the journal that gRPC's have, too."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

from jaxserve.server.batches.batches import Batches, Progress
from jaxserve.server.batches.lines import Result
from jaxserve.server.batches.records import BatchRefused, BatchState, JournalFull, UnknownBatch
from jaxserve.server.http.batch_lines import dumped, read_line, written_line
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.files import FileStore, new_id
from jaxserve.server.http.front import Front
from jaxserve.server.http.schema import Body, Metadata, Text

LINES_A_CALL = 1000  # to the journal
_STATUS = {
    BatchState.OPEN: "validating",
    BatchState.COMMITTED: "in_progress",
    BatchState.ENDED: "completed",
    BatchState.CANCELLED: "cancelled",
}
OUTPUT, ERRORS = "output", "errors"


class BatchRequest(Body):
    """POST /v1/batches. completion_window is taken for what it says: best-effort."""

    input_file_id: Text
    endpoint: Literal["/v1/completions", "/v1/chat/completions"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchDoor:
    """What the routes do for one caller. owner: name of their API key; "" sees all. Methods raise
    ApiError."""

    def __init__(self, front: Front, batches: Batches, store: FileStore, owner: str) -> None:
        self._front, self._batches, self._owner = front, batches, owner
        self._store = store.of(owner)

    async def create(self, asked: BatchRequest) -> dict[str, Any]:
        """Makes a batch of a file's lines; each that is wrong fails by itself."""
        content = await asyncio.to_thread(self._store.read, asked.input_file_id)
        texts = [text for text in content.decode("utf-8", "replace").split("\n") if text.strip()]
        if not texts:
            raise ApiError(400, "input_file_id: the file has no lines", param="input_file_id")
        name = new_id("batch")
        note = {**asked.model_dump(), "created": int(time.time())}
        await asyncio.to_thread(self._store.keep_note, name, note)
        try:
            for first in range(0, len(texts), LINES_A_CALL):
                part = texts[first : first + LINES_A_CALL]
                lines = await asyncio.to_thread(self._read, asked.endpoint, part)
                last = first + len(part) == len(texts)
                progress = await self._batches.submit(
                    name, first, lines, commit=last, owner=self._owner
                )
        except BaseException as error:
            await asyncio.to_thread(self._store.delete, name)
            raise _told(error) from error
        return _described(name, note, progress)

    async def get(self, name: str) -> dict[str, Any]:
        """One batch."""
        note = await asyncio.to_thread(self._store.note, name)
        try:
            return _described(name, note, await self._batches.status(name, self._owner))
        except (BatchRefused, sqlite3.Error) as error:
            raise _told(error) from error

    async def every(self) -> list[dict[str, Any]]:
        """All of them, the latest first; notes of those that the journal has forgotten go."""
        found = []
        for name in await asyncio.to_thread(self._store.notes, "batch"):
            try:
                found.append(await self.get(name))
            except ApiError as error:
                if error.status != 404:
                    raise
                await asyncio.to_thread(self._store.delete, name)
        return sorted(found, key=lambda each: (-each["created_at"], each["id"]))

    async def cancel(self, name: str) -> dict[str, Any]:
        """Lines that wait or run get no result."""
        note = await asyncio.to_thread(self._store.note, name)
        try:
            return _described(name, note, await self._batches.cancel(name, self._owner))
        except (BatchRefused, sqlite3.Error) as error:
            raise _told(error) from error

    async def results(self, name: str, which: str) -> AsyncGenerator[bytes, None]:
        """JSONL of the lines that were served, or of those that failed, so far."""
        note = await asyncio.to_thread(self._store.note, name)
        pages = self._batches.results(name, 0, follow=False, owner=self._owner)
        async for _, page in pages:
            for outcome in page:
                if outcome.failed == (which == ERRORS):
                    result = Result.from_json(outcome.result)
                    yield dumped(written_line(self._front, note, name, outcome.line, result))

    def _read(self, endpoint: str, texts: list[str]) -> list[Any]:
        return [read_line(self._front, endpoint, text) for text in texts]


def result_file(file_id: str) -> tuple[str, str] | None:
    """Batch and kind of a file of results; None for an upload."""
    for which in (OUTPUT, ERRORS):
        if file_id.endswith("-" + which):
            return file_id.removesuffix("-" + which), which
    return None


def _described(name: str, note: dict[str, Any], progress: Progress) -> dict[str, Any]:
    status = progress.status
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


def _told(error: BaseException) -> BaseException:
    if isinstance(error, UnknownBatch):
        return ApiError(404, str(error), param="batch_id", code="not_found")
    if isinstance(error, JournalFull):
        return ApiError(413, str(error), param="input_file_id", code="batches_full")
    if isinstance(error, BatchRefused):
        return ApiError(409, str(error), code="conflict")
    if isinstance(error, sqlite3.Error):
        return ApiError(503, f"the batches' disk: {error}", code="unavailable")
    return error
