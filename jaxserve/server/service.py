"""jaxserve.v1.Generation over an engine."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason
from jaxserve.sched.request import InvalidRequest
from jaxserve.server import convert
from jaxserve.server.calls import Call, Method
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.admission import retry_s
from jaxserve.server.requests.endings import Ending
from jaxserve.server.requests.requests import MAX_REQUEST_ID, SHUTTING_DOWN, EngineRequests
from jaxserve.server.requests.streams import DuplicateRequest, Stream, StreamFailed

Code = grpc.StatusCode


class GenerationService:
    """The two RPCs of jaxserve.v1.Generation.

    Whatever ends a call early (cancelled, past its deadline, connection lost) cancels the request
    in the engine, which frees its blocks within one step.
    """

    def __init__(self, requests: EngineRequests) -> None:
        self._requests = requests
        self.methods: Mapping[str, Method] = {
            "Generate": self.generate,
            "GetServerInfo": self.get_server_info,
        }

    async def get_server_info(
        self, request: pb.GetServerInfoRequest, call: Call
    ) -> pb.GetServerInfoResponse:
        """The RPC: what the engine serves, and the server's version and SLO classes."""
        return convert.server_info(self._requests.info(), self._requests.slo_classes)

    async def generate(self, message: pb.GenerateRequest, call: Call) -> None:
        """The RPC: streams what each continuation generates, in messages of its own.

        Ends with INVALID_ARGUMENT, ALREADY_EXISTS (the request_id is running), RESOURCE_EXHAUSTED
        (the queue is full), UNAVAILABLE (shutting down, stalled, or failed before), INTERNAL
        (failed while it ran) or CANCELLED.
        """
        call.record.request_id = message.request_id[:MAX_REQUEST_ID]
        await self._refuse_if_closed(call)
        try:
            stream = await self._submit(message, call)
        except InvalidRequest as error:
            await call.abort(Code.INVALID_ARGUMENT, str(error), Ending.INVALID)
        except DuplicateRequest as error:
            await call.abort(Code.ALREADY_EXISTS, str(error), Ending.DUPLICATE)
        except QueueFull as error:
            await call.abort(Code.RESOURCE_EXHAUSTED, str(error), Ending.QUEUE_FULL, retry_s())
        except EngineStopped as error:
            await self._refuse_if_closed(call)
            await call.abort(Code.UNAVAILABLE, str(error), Ending.ENGINE_FAILED)
        try:
            await self._send(stream, call)
        finally:
            self._requests.end(stream)

    async def _refuse_if_closed(self, call: Call) -> None:
        closed = self._requests.closed
        if closed is not None:
            stopping = closed == SHUTTING_DOWN
            ending = Ending.SHUTTING_DOWN if stopping else Ending.ENGINE_FAILED
            await call.abort(Code.UNAVAILABLE, closed, ending)

    async def _submit(self, message: pb.GenerateRequest, call: Call) -> Stream:
        convert.check_message(message)
        request = await self._requests.make(
            convert.prompt(message),
            sampling=convert.sampling_fields(message.sampling),
            request_id=message.request_id,
            slo=convert.slo(message.slo),
            tier=convert.TIERS[message.tier],
            slo_class=message.slo_class,
        )
        call.record.asks((request,))
        return self._requests.open(request, record=call.record)

    async def _send(self, stream: Stream, call: Call) -> None:
        cancelled = False
        try:
            # write() returns once the transport has taken the message, so a client that does not
            # read stops us here, and its news pile up merged in the stream.
            while (delta := await stream.next()) is not None:
                await call.write(convert.response(stream.request_id, delta))
                if delta.last is not None:
                    cancelled |= delta.last.finish_reason is FinishReason.CANCELLED
        except StreamFailed as error:
            self._requests.cancel(stream)  # if only one continuation failed
            await call.abort(Code.INTERNAL, str(error), Ending.ENGINE_FAILED)
        if cancelled and self._requests.draining:
            await call.abort(Code.UNAVAILABLE, SHUTTING_DOWN, Ending.SHUTTING_DOWN)
        if cancelled:
            await call.abort(Code.CANCELLED, "the request was cancelled", Ending.CANCELLED)
