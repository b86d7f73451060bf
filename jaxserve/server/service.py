"""jaxserve.v1.Generation over an engine, on grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason
from jaxserve.sched.request import InvalidRequest
from jaxserve.server import convert
from jaxserve.server.abort import abort
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.requests import SHUTTING_DOWN, EngineRequests
from jaxserve.server.requests.streams import DuplicateRequest, Stream, StreamFailed
from jaxserve.server.slo_classes import ServiceLevel


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """The two RPCs of jaxserve.v1.Generation.

    Whatever ends a call early (cancelled, past its deadline, connection lost) cancels the request
    in the engine, which frees its blocks within one step.
    """

    def __init__(self, requests: EngineRequests, classes: Mapping[str, ServiceLevel]) -> None:
        self._requests, self._classes = requests, classes
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no Generate call is running."""
        await self._idle.wait()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """The RPC: what the engine serves, and the server's version and SLO classes."""
        return convert.server_info(self._requests.info(), self._classes)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """The RPC: streams what each continuation generates, in messages of its own.

        Ends with INVALID_ARGUMENT, ALREADY_EXISTS (the request_id is running), RESOURCE_EXHAUSTED
        (the queue is full), UNAVAILABLE (shutting down, or failed before), INTERNAL (failed while
        it ran) or CANCELLED.
        """
        self._active += 1
        self._idle.clear()
        try:
            await self._generate(request, context)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _generate(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await self._refuse_if_closed(context)
        try:
            stream = await self._submit(message)
        except InvalidRequest as error:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DuplicateRequest as error:
            await abort(context, grpc.StatusCode.ALREADY_EXISTS, str(error))
        except QueueFull as error:
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except EngineStopped as error:
            await self._refuse_if_closed(context)
            await abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        try:
            await self._send(stream, context)
        finally:
            self._requests.end(stream)

    async def _refuse_if_closed(self, context: grpc.aio.ServicerContext) -> None:
        if self._requests.closed is not None:
            await abort(context, grpc.StatusCode.UNAVAILABLE, self._requests.closed)

    async def _submit(self, message: pb.GenerateRequest) -> Stream:
        convert.check_message(message)
        level = convert.service_level(message, self._classes)
        request = await self._requests.make(
            convert.prompt(message),
            sampling=convert.sampling_fields(message.sampling),
            request_id=message.request_id,
            slo=level.slo,
            tier=level.tier,
            slo_class=level.slo_class,
        )
        return self._requests.open(request)

    async def _send(self, stream: Stream, context: grpc.aio.ServicerContext) -> None:
        cancelled = False
        try:
            # write() returns once the transport has taken the message, so a client that does not
            # read stops us here, and its news pile up merged in the stream.
            while (delta := await stream.next()) is not None:
                await context.write(convert.response(stream.request_id, delta))
                if delta.last is not None:
                    cancelled |= delta.last.finish_reason is FinishReason.CANCELLED
        except StreamFailed as error:
            self._requests.cancel(stream)  # if only one continuation failed
            await abort(context, grpc.StatusCode.INTERNAL, str(error))
        if cancelled and self._requests.draining:
            await abort(context, grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        if cancelled:
            await abort(context, grpc.StatusCode.CANCELLED, "the request was cancelled")
