"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, BinaryIO

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.batches.batch_operations import Batches
from jaxserve.server.http.errors import ApiError, record_of
from jaxserve.server.http.openai.batches import BatchRequest, CallerBatches, result_file
from jaxserve.server.http.openai.files import FileStore, StoredFile, disk_error
from jaxserve.server.http.openai.multi_prompt import ClientGone, unless_gone
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.requests.call_outcome import CallOutcome

NO_BATCHES = "this server takes no batches; it was started without a batch_dir"
_JSONL = "application/jsonl"
_PIECE = 64 << 10  # read from a file at once; a stalled reader costs this much
_PARSED = 16 << 10  # parsed of a form at once; slowest is 0.2 us per byte
_PURPOSE = "batch"
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "const": _PURPOSE},
    },
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}

Door = Callable[[Request], CallerBatches]


def add_batch_routes(
    app: FastAPI, context: RouteContext, batches: Batches | None, store: FileStore | None
) -> None:
    """Adds the routes of files and batches.

    Args:
        app: the application.
        context: what the routes need.
        batches: the batches; None refuses all calls.
        store: the uploaded files; None likewise.
    """

    def files(http: Request) -> FileStore:
        if batches is None or store is None:
            raise ApiError(501, NO_BATCHES, code="no_batches", outcome=CallOutcome.REFUSED)
        caller = record_of(http).caller
        return store.for_owner(caller.name, batches.quota(caller))

    def door(http: Request) -> CallerBatches:
        seen = files(http)
        assert batches is not None
        return CallerBatches(context, batches, seen, record_of(http).caller)

    _add_batches(app, door)
    _add_files(app, files, door)


def _add_batches(app: FastAPI, door: Door) -> None:
    @app.post("/v1/batches")
    async def create(body: BatchRequest, http: Request) -> dict[str, Any]:
        """Creates a batch, which serves a file's lines as best-effort requests."""
        return await unless_gone(http, door(http).create(body))

    @app.get("/v1/batches")
    async def every(
        http: Request, limit: Annotated[int, Query(ge=0, le=100)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        """Lists batches, the latest first."""
        return _listed(*await door(http).page(after, limit))

    @app.get("/v1/batches/{batch_id}")
    async def get(batch_id: str, http: Request) -> dict[str, Any]:
        """The status of a batch."""
        return await door(http).get(batch_id)

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, http: Request) -> dict[str, Any]:
        """Cancels a batch: lines without a result never get one."""
        return await door(http).cancel(batch_id)

    @app.delete("/v1/batches/{batch_id}")
    async def delete(batch_id: str, http: Request) -> dict[str, Any]:
        """Deletes a batch that is not being served, with its results."""
        await door(http).delete(batch_id)
        return {"id": batch_id, "object": "batch", "deleted": True}


def _add_files(app: FastAPI, store: Callable[[Request], FileStore], door: Door) -> None:
    @app.post("/v1/files", openapi_extra=_UPLOAD)
    async def upload(http: Request) -> dict[str, Any]:
        """Uploads a JSONL file, of which a batch can be made."""
        return (await _uploaded(http, store(http))).as_dict()

    @app.get("/v1/files")
    async def every(
        http: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 1000, after: str | None = None
    ) -> dict[str, Any]:
        """Lists uploads, the latest first."""
        page, more = await asyncio.to_thread(store(http).list_files, after, limit)
        return _listed([stored.as_dict() for stored in page], more)

    @app.get("/v1/files/{file_id}")
    async def get(file_id: str, http: Request) -> dict[str, Any]:
        """Describes an upload."""
        return (await asyncio.to_thread(store(http).find_file, file_id)).as_dict()

    @app.delete("/v1/files/{file_id}")
    async def delete(file_id: str, http: Request) -> dict[str, Any]:
        """Deletes an upload; batches made of it go on."""
        await asyncio.to_thread(store(http).delete_file, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @app.get("/v1/files/{file_id}/content")
    async def content(file_id: str, http: Request) -> Response:
        """The content of an upload, or the results of a batch."""
        results = result_file(file_id)
        if results is None:
            file = await asyncio.to_thread(store(http).open_file, file_id)
            return StreamingResponse(_pieces(file), media_type=_JSONL)
        name, which = results
        await door(http).get(name)
        return StreamingResponse(door(http).results(name, which), media_type=_JSONL)


def _listed(page: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    names = [entry["id"] for entry in page]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


async def _uploaded(http: Request, store: FileStore) -> StoredFile:
    """The parsed form, read once there is room for it. FastAPI's own forms would be read before
    room is reserved, and would answer 400 if the disk is full."""
    if not http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequest("file", "must be sent as a form, Content-Type: multipart/form-data")
    length = http.headers.get("content-length")
    async with contextlib.AsyncExitStack() as stack:
        held = store.reserve(int(length) if length and length.isdecimal() else None)
        room = await asyncio.to_thread(stack.enter_context, held)
        try:
            pieces = await stack.enter_async_context(contextlib.aclosing(_pieces_of(http)))
            parser = MultiPartParser(
                http.headers, pieces, max_files=1, max_fields=8, max_part_size=4096
            )
            form = await parser.parse()
            stack.push_async_callback(form.close)
        except MultiPartException as error:
            raise ApiError(400, f"the body: {error.message}", code="invalid_value") from None
        except OSError as error:  # where its parts are kept until it is complete
            raise disk_error(error) from error
        except ClientDisconnect:
            raise ClientGone from None
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file", "the form has no file of that name")
        if purpose != _PURPOSE:
            raise InvalidRequest("purpose", f"must be {_PURPOSE!r}")
        return await asyncio.to_thread(store.save, file.filename or "", _PURPOSE, file.file, room)


async def _pieces_of(http: Request) -> AsyncGenerator[bytes, None]:
    """The body in pieces, between which other tasks run."""
    async with contextlib.aclosing(http.stream()) as stream:
        async for chunk in stream:
            for begin in range(0, len(chunk), _PARSED):
                yield chunk[begin : begin + _PARSED]
                await asyncio.sleep(0)


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece
