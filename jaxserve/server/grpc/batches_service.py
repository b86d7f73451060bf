"""jaxserve.v1.Batches over the journal."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Mapping

import grpc

from jaxserve.server.batches.batch_operations import Batches
from jaxserve.server.batches.records import (
    BatchConflict,
    JournalFull,
    MissingLines,
    OtherLines,
    Outcome,
    UnknownBatch,
)
from jaxserve.server.grpc import batch_conversion as convert
from jaxserve.server.grpc.calls import Call, Method
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.server.requests.call_outcome import Ending

NO_BATCHES = "this server takes no batches: server.batch_dir names no folder for them"
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_CODES = (
    (UnknownBatch, grpc.StatusCode.NOT_FOUND),
    (MissingLines, grpc.StatusCode.OUT_OF_RANGE),
    (OtherLines, grpc.StatusCode.ALREADY_EXISTS),
    (BatchConflict, _PRECONDITION),
    (JournalFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
)


class BatchesService:
    """The RPCs of jaxserve.v1.Batches; batches.proto says how each ends. batches: None refuses
    them all."""

    def __init__(self, batches: Batches | None) -> None:
        self._batches = batches
        self.methods: Mapping[str, Method] = {
            "SubmitBatch": self.submit_batch,
            "GetBatch": self.get_batch,
            "CancelBatch": self.cancel_batch,
            "DeleteBatch": self.delete_batch,
        }

    async def submit_batch(
        self, request: pb.SubmitBatchRequest, call: Call
    ) -> pb.SubmitBatchResponse:
        """The RPC: adds lines, and commits."""
        async with self._open(call) as batches:
            convert.check_call(request)
            lines = await asyncio.to_thread(lambda: [convert.line(each) for each in request.lines])
            progress = await batches.submit(
                request.batch_id,
                request.first_line,
                lines,
                commit=request.commit,
                caller=call.record.caller,
            )
            return pb.SubmitBatchResponse(status=convert.status(progress))

    async def get_batch(self, request: pb.GetBatchRequest, call: Call) -> None:
        """The RPC: streams results."""
        async with self._open(call) as batches:
            convert.check_call(request)
            pages = batches.results(
                request.batch_id,
                request.first_line,
                follow=request.follow,
                owner=call.record.caller.name,
            )
            async with contextlib.aclosing(pages):
                async for progress, page in pages:
                    results = await asyncio.to_thread(_messages, page)
                    status = convert.status(progress)
                    await call.write(pb.GetBatchResponse(status=status, results=results))

    async def cancel_batch(
        self, request: pb.CancelBatchRequest, call: Call
    ) -> pb.CancelBatchResponse:
        """The RPC: ends what waits and runs."""
        async with self._open(call) as batches:
            convert.check_call(request)
            progress = await batches.cancel(request.batch_id, call.record.caller.name)
            return pb.CancelBatchResponse(status=convert.status(progress))

    async def delete_batch(
        self, request: pb.DeleteBatchRequest, call: Call
    ) -> pb.DeleteBatchResponse:
        """The RPC: forgets a batch."""
        async with self._open(call) as batches:
            convert.check_call(request)
            await batches.delete(request.batch_id, call.record.caller.name)
            return pb.DeleteBatchResponse()

    @contextlib.asynccontextmanager
    async def _open(self, call: Call) -> AsyncIterator[Batches]:
        """The batches; what they alone raise becomes a status."""
        if self._batches is None:
            await call.abort(_PRECONDITION, NO_BATCHES, Ending.REFUSED)
        try:
            yield self._batches
        except tuple(kind for kind, _ in _CODES) as error:
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            await call.abort(code, str(error), Ending.REFUSED)
        except sqlite3.Error as error:
            details = f"the batches' disk: {error}"
            await call.abort(grpc.StatusCode.UNAVAILABLE, details, Ending.REFUSED)


def _messages(page: list[Outcome]) -> list[pb.BatchResult]:
    return [convert.result(outcome) for outcome in page]
