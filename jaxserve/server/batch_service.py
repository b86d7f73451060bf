"""jaxserve.v1.Batches over the journal, on grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator

import grpc

from jaxserve.engine.errors import EngineStopped
from jaxserve.sched.request import InvalidRequest
from jaxserve.server import batch_convert as convert
from jaxserve.server.abort import abort
from jaxserve.server.batches.batches import Batches
from jaxserve.server.batches.records import (
    BatchConflict,
    JournalFull,
    MissingLines,
    OtherLines,
    Outcome,
    UnknownBatch,
)
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.server.proto import batches_pb2_grpc

NO_BATCHES = "this server takes no batches: server.batch_dir names no folder for them"
_CODES = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownBatch, grpc.StatusCode.NOT_FOUND),
    (MissingLines, grpc.StatusCode.OUT_OF_RANGE),
    (OtherLines, grpc.StatusCode.ALREADY_EXISTS),
    (BatchConflict, grpc.StatusCode.FAILED_PRECONDITION),
    (JournalFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (EngineStopped, grpc.StatusCode.UNAVAILABLE),
)


class BatchesService(batches_pb2_grpc.BatchesServicer):
    """The RPCs of jaxserve.v1.Batches; batches.proto says how each ends. batches: None refuses
    them all."""

    def __init__(self, batches: Batches | None) -> None:
        self._batches = batches

    async def SubmitBatch(
        self, request: pb.SubmitBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.SubmitBatchResponse:
        """The RPC: adds lines, and commits."""
        async with self._open(context) as batches:
            convert.check_call(request)
            lines = await asyncio.to_thread(lambda: [convert.line(each) for each in request.lines])
            progress = await batches.submit(
                request.batch_id, request.first_line, lines, commit=request.commit
            )
            return pb.SubmitBatchResponse(status=convert.status(progress))

    async def GetBatch(
        self, request: pb.GetBatchRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """The RPC: streams results."""
        async with self._open(context) as batches:
            convert.check_call(request)
            pages = batches.results(request.batch_id, request.first_line, follow=request.follow)
            async with contextlib.aclosing(pages):
                async for progress, page in pages:
                    results = await asyncio.to_thread(_messages, page)
                    status = convert.status(progress)
                    await context.write(pb.GetBatchResponse(status=status, results=results))

    async def CancelBatch(
        self, request: pb.CancelBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelBatchResponse:
        """The RPC: ends what waits and runs."""
        async with self._open(context) as batches:
            convert.check_call(request)
            progress = await batches.cancel(request.batch_id)
            return pb.CancelBatchResponse(status=convert.status(progress))

    async def DeleteBatch(
        self, request: pb.DeleteBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteBatchResponse:
        """The RPC: forgets a batch."""
        async with self._open(context) as batches:
            convert.check_call(request)
            await batches.delete(request.batch_id)
            return pb.DeleteBatchResponse()

    @contextlib.asynccontextmanager
    async def _open(self, context: grpc.aio.ServicerContext) -> AsyncIterator[Batches]:
        """The batches; what they raise becomes a status."""
        if self._batches is None:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, NO_BATCHES)
        try:
            yield self._batches
        except tuple(kind for kind, _ in _CODES) as error:
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            await abort(context, code, str(error))
        except sqlite3.Error as error:
            await abort(context, grpc.StatusCode.UNAVAILABLE, f"the batches' disk: {error}")


def _messages(page: list[Outcome]) -> list[pb.BatchResult]:
    return [convert.result(outcome) for outcome in page]
