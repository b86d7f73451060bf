"""jaxserve.v1.Batches over the journal."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from jaxserve.server.batches.batch_operations import Batches
from jaxserve.server.grpc import batch_conversion as convert
from jaxserve.server.grpc.calls import Call
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.server.requests.call_outcome import CallOutcome

NO_BATCHES = "this server takes no batches: server.batch_dir names no folder for them"


class BatchesService:
    """The RPCs of jaxserve.v1.Batches; batches.proto says how each ends. batches: the batches; None
    refuses all calls."""

    def __init__(self, batches: Batches | None) -> None:
        self._batches = batches

    async def SubmitBatch(
        self, request: pb.SubmitBatchRequest, call: Call
    ) -> pb.SubmitBatchResponse:
        """The RPC: adds lines, and commits."""
        batches = await self._served(request, call)
        name, first, caller = request.batch_id, request.first_line, call.record.caller
        lines = await batches.checked(map(convert.line_from_message, request.lines), caller.name)
        progress = await batches.submit(name, first, lines, commit=request.commit, caller=caller)
        return pb.SubmitBatchResponse(status=convert.status_message(progress))

    async def GetBatch(self, request: pb.GetBatchRequest, call: Call) -> None:
        """The RPC: streams results."""
        batches = await self._served(request, call)
        name, first, owner = request.batch_id, request.first_line, call.record.caller.name
        pages = batches.results(name, first, follow=request.follow, owner=owner)
        async with contextlib.aclosing(pages):
            async for progress, page in pages:
                results = await asyncio.to_thread(list, map(convert.result_message, page))
                status = convert.status_message(progress)
                await call.write(pb.GetBatchResponse(status=status, results=results))

    async def CancelBatch(
        self, request: pb.CancelBatchRequest, call: Call
    ) -> pb.CancelBatchResponse:
        """The RPC: cancels lines that wait or run."""
        batches = await self._served(request, call)
        progress = await batches.cancel(request.batch_id, call.record.caller.name)
        return pb.CancelBatchResponse(status=convert.status_message(progress))

    async def DeleteBatch(
        self, request: pb.DeleteBatchRequest, call: Call
    ) -> pb.DeleteBatchResponse:
        """The RPC: deletes a batch."""
        batches = await self._served(request, call)
        await batches.delete(request.batch_id, call.record.caller.name)
        return pb.DeleteBatchResponse()

    async def _served(self, request: convert.Call, call: Call) -> Batches:
        """The batch operations of the call. Ends the call if the server takes no batches. Raises
        InvalidRequest."""
        if self._batches is None:
            code = grpc.StatusCode.FAILED_PRECONDITION
            await call.abort(code, NO_BATCHES, CallOutcome.REFUSED)
        convert.check_call(request)
        return self._batches
