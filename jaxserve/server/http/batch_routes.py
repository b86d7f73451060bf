"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import FastAPI, File, Form, Request, Response, UploadFile
from fastapi.responses import StreamingResponse

from jaxserve.server.batches.batches import Batches
from jaxserve.server.http.batches import BatchDoor, BatchRequest, result_file
from jaxserve.server.http.errors import ApiError, record_of
from jaxserve.server.http.files import FileStore
from jaxserve.server.http.front import Front

NO_BATCHES = "this server takes no batches; it was started without a batch_dir"


def add_batch_routes(
    app: FastAPI, front: Front, batches: Batches | None, store: FileStore | None
) -> None:
    """batches, store: None refuses them all."""

    def door(http: Request) -> BatchDoor:
        if batches is None or store is None:
            raise ApiError(501, NO_BATCHES, code="no_batches")
        return BatchDoor(front, batches, store, record_of(http).caller.name)

    def files(http: Request) -> FileStore:
        if store is None:
            raise ApiError(501, NO_BATCHES, code="no_batches")
        return store.of(record_of(http).caller.name)

    _add_batches(app, door)
    _add_files(app, files, door)


def _add_batches(app: FastAPI, door: Any) -> None:
    @app.post("/v1/batches")
    async def create(body: BatchRequest, http: Request) -> dict[str, Any]:
        """Has a file's lines served, as best-effort requests."""
        found: dict[str, Any] = await door(http).create(body)
        return found

    @app.get("/v1/batches")
    async def every(http: Request, limit: int = 20, after: str | None = None) -> dict[str, Any]:
        """The latest first."""
        found = await door(http).every()
        names = [each["id"] for each in found]
        if after is not None and after in names:
            found = found[names.index(after) + 1 :]
        page = found[: max(limit, 0)]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(found) > len(page),
        }

    @app.get("/v1/batches/{batch_id}")
    async def get(batch_id: str, http: Request) -> dict[str, Any]:
        """Where it is."""
        found: dict[str, Any] = await door(http).get(batch_id)
        return found

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, http: Request) -> dict[str, Any]:
        """Lines without a result get none."""
        found: dict[str, Any] = await door(http).cancel(batch_id)
        return found


def _add_files(app: FastAPI, store: Any, door: Any) -> None:
    @app.post("/v1/files")
    async def upload(
        http: Request,
        file: Annotated[UploadFile, File()],
        purpose: Annotated[Literal["batch"], Form()],
    ) -> dict[str, Any]:
        """A file to make a batch of: JSONL."""
        kept = await asyncio.to_thread(store(http).save, file.filename or "", purpose, file.file)
        found: dict[str, Any] = kept.as_dict()
        return found

    @app.get("/v1/files")
    async def every(http: Request) -> dict[str, Any]:
        """Uploads, the latest first."""
        found = await asyncio.to_thread(store(http).all_files)
        return {"object": "list", "data": [each.as_dict() for each in found], "has_more": False}

    @app.get("/v1/files/{file_id}")
    async def get(file_id: str, http: Request) -> dict[str, Any]:
        """An upload."""
        kept = await asyncio.to_thread(store(http).find, file_id)
        found: dict[str, Any] = kept.as_dict()
        return found

    @app.delete("/v1/files/{file_id}")
    async def delete(file_id: str, http: Request) -> dict[str, Any]:
        """Forgets an upload; batches made of it go on."""
        if not file_id.startswith("file-"):
            raise ApiError(404, f"there is no {file_id!r}", param="id", code="not_found")
        await asyncio.to_thread(store(http).delete, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @app.get("/v1/files/{file_id}/content")
    async def content(file_id: str, http: Request) -> Response:
        """An upload, or the results of a batch."""
        results = result_file(file_id)
        if results is None:
            read = await asyncio.to_thread(store(http).read, file_id)
            return Response(read, media_type="application/jsonl")
        name, which = results
        await door(http).get(name)
        return StreamingResponse(door(http).results(name, which), media_type="application/jsonl")
