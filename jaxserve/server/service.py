"""jaxserve.v1.Generation over an engine, on grpc.aio."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from typing import NoReturn

import grpc

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason
from jaxserve.sched.request import InvalidRequest, Request, SamplingParams
from jaxserve.server import convert
from jaxserve.server.contract import ServedEngine
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.streams import DuplicateRequest, OutputRouter, Stream, StreamFailed

SHUTTING_DOWN = "the server is shutting down"
# Encoding takes about a microsecond a character; longer texts leave the event loop to others.
_ENCODE_INLINE_CHARS = 2000


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """The two RPCs of jaxserve.v1.Generation. Create it on the event loop that serves it.

    Whatever ends a call early (cancelled, past its deadline, connection lost) cancels the request
    in the engine, which frees its blocks within one step.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._router = OutputRouter(asyncio.get_running_loop())
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._failure: str | None = None

    def stop_admission(self) -> None:
        """New calls get UNAVAILABLE from now on."""
        self._draining = True

    def fail(self, error: str) -> None:
        """Ends every running call with INTERNAL; new ones get UNAVAILABLE."""
        self._failure = error
        self._router.fail_all(error)

    def cancel_all(self) -> None:
        """Cancels every running request; its call ends once the engine has said its last word."""
        for request_id in self._router.unfinished():
            self._engine.cancel(request_id)

    async def wait_idle(self) -> None:
        """Returns once no Generate call is running."""
        await self._idle.wait()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """The RPC: what the engine serves, and the server's version."""
        return convert.server_info(self._engine.info())

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
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DuplicateRequest as error:
            await _abort(context, grpc.StatusCode.ALREADY_EXISTS, str(error))
        except QueueFull as error:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except EngineStopped as error:
            await self._refuse_if_closed(context)
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        try:
            await self._send(stream, context)
        finally:
            if not stream.finished:
                stream.abandon()
                self._engine.cancel(stream.request_id)

    async def _refuse_if_closed(self, context: grpc.aio.ServicerContext) -> None:
        if self._failure is not None:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, self._failure)
        if self._draining:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)

    async def _submit(self, message: pb.GenerateRequest) -> Stream:
        convert.check_message(message)
        sampling = convert.sampling_params(message.sampling)
        slo = convert.slo(message.slo)
        if message.WhichOneof("prompt") == "token_ids":
            prompt = tuple(message.token_ids.ids)
        elif len(message.text) <= _ENCODE_INLINE_CHARS:
            prompt = tuple(self._engine.encode(message.text))
        else:
            prompt = tuple(await asyncio.to_thread(self._engine.encode, message.text))
        if not message.sampling.HasField("max_tokens"):
            sampling = self._default_length(sampling, len(prompt))
        request = Request(
            id=message.request_id or uuid.uuid4().hex,
            prompt=prompt,
            sampling=sampling,
            slo=slo,
            tier=convert.TIERS[message.tier],
        )
        # No await from here on: a later failure or shutdown finds the stream open.
        if self._failure is not None or self._draining:
            raise EngineStopped(self._failure or SHUTTING_DOWN)
        stream = self._router.open(request.id, sampling.n)
        try:
            self._engine.submit(request, self._router.on_output)
        except BaseException:
            self._router.forget(request.id)
            raise
        return stream

    def _default_length(self, sampling: SamplingParams, prompt_len: int) -> SamplingParams:
        """Who asks for no length gets the usual one, or what fits behind a long prompt."""
        info = self._engine.info()
        room = min(info.max_model_len, info.pool_tokens) - prompt_len
        fits = max(1, sampling.min_tokens, min(sampling.max_tokens, room))
        return dataclasses.replace(sampling, max_tokens=fits)

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
            self._engine.cancel(stream.request_id)  # if only one continuation failed
            await _abort(context, grpc.StatusCode.INTERNAL, str(error))
        if cancelled and self._draining:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        if cancelled:
            await _abort(context, grpc.StatusCode.CANCELLED, "the request was cancelled")


async def _abort(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, details: str
) -> NoReturn:
    await context.abort(code, details)
    raise AssertionError("abort returned")  # abort always raises; this tells the type checker
