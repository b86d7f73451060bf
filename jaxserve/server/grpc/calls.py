"""Runs gRPC calls that have a single request: admits, reads, parses and answers them, and always
ends them with a status.

gRPC is told that every method streams both ways, although the .proto says otherwise; on the wire
there is no difference. So a refused call is never read, and malformed messages are answered here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.access.api_keys import Keys, RateLimited, Unauthenticated, authorization
from jaxserve.server.grpc.wire_check import check_fields
from jaxserve.server.moves.passage import PASSAGE
from jaxserve.server.requests.admission import Admission, Overloaded
from jaxserve.server.requests.call_errors import call_error_of
from jaxserve.server.requests.call_outcome import (
    CallOutcome,
    CallRecord,
    CallSource,
    CallTracker,
    RateLimitedLog,
)
from jaxserve.server.requests.engine_load import LOAD_HEADER
from jaxserve.server.requests.output_streams import SlowReader
from jaxserve.server.requests.target_headers import answer_headers, target_headers
from jaxserve.server.requests.write_timeout import WriteTimeout
from jaxserve.server.telemetry.trace_context import trace_context

RETRY_KEY = "grpc-retry-pushback-ms"
ARRIVED = "jaxserve_arrived"
"""Attribute of a call's context: when the call came to the process that passed it on, as
`CallRecord.began`."""
_READ_S = 30.0  # longest time from a request's first byte to its last
_ABOUT_NOW_S = 1.0  # a client's deadline passes by its own clock, which may be ahead
_NO_PLACE = grpc.StatusCode.RESOURCE_EXHAUSTED
_FEW_BYTES = 16 << 10  # shorter messages need no count of their fields
_FEW_FIELDS = 1000  # counted on the event loop; a prompt is one field
Method = Callable[[Any, "Call"], Awaitable[Message | None]]


@dataclass(frozen=True)
class _Rpc:
    """A method of a service: its handler, its admission, its request type, and the most bytes of a
    request."""

    method: Method
    admission: Admission | None
    request_type: type[Message]
    longest: int


class Call:
    """One running call, for its method.

    Args:
        context: gRPC's context of the call.
        record: the call's record.
        writes: limits how long the client may take to read a message.

    Attributes:
        record: as given.
        authorization: the call's authorization header; None without one.
        target_headers: the metadata that sets SLO targets.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext, record: CallRecord, writes: WriteTimeout
    ) -> None:
        self.record = record
        self._context, self._writes = context, writes
        metadata = context.invocation_metadata() or ()
        self.authorization = authorization(metadata)
        self.target_headers = target_headers(metadata)

    async def write(self, message: Message) -> None:
        """Sends a message; returns once the transport has taken it. Raises SlowReader."""
        await self._writes.wait(self._context.write(message))

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str,
        outcome: CallOutcome,
        retry_after_s: float | None = None,
    ) -> NoReturn:
        """Ends the call with a status, by raising.

        Args:
            code: the status.
            details: the message, for people.
            outcome: the outcome to record.
            retry_after_s: seconds after which a retry may succeed; None sends neither this hint nor
                the load.
        """
        self.record.outcome, self.record.reason = outcome, details
        trailing = list(answer_headers(self.record, ended=False))
        if retry_after_s is not None:
            trailing.append((RETRY_KEY, f"{1000 * retry_after_s:.0f}"))
            load = self.record.load()
            if load is not None:
                trailing.append((LOAD_HEADER, load.header()))
        await self._context.abort(code, details, tuple(trailing))
        raise AssertionError("abort returned")  # abort always raises; this is for the type checker

    async def fail(self, error: Exception) -> NoReturn:
        """Ends the call with the status of an error that has a CallError."""
        known = call_error_of(error)
        assert known is not None
        code = grpc.StatusCode[known.grpc_code]
        await self.abort(code, known.message or str(error), known.outcome, known.retry_s)

    async def read(self) -> bytes:
        """The request as bytes. Aborts the call if there is none."""
        malformed = grpc.StatusCode.INVALID_ARGUMENT
        try:
            async with asyncio.timeout(_READ_S):
                raw = await self._context.read()
        except TimeoutError:
            details = f"request: has not come within {_READ_S:g} s"
            await self.abort(malformed, details, CallOutcome.MALFORMED)
        if raw is grpc.aio.EOF:
            details = "request: there is none, or it is larger than the server takes"
            await self.abort(malformed, details, CallOutcome.MALFORMED)
        assert isinstance(raw, bytes)
        return raw

    def ended_by_client(self) -> None:
        """Records that the client cancelled the call, its deadline passed, or its connection was
        lost."""
        left = self._context.time_remaining()
        late = left is not None and left < _ABOUT_NOW_S
        self.record.outcome = CallOutcome.TIMED_OUT if late else CallOutcome.CANCELLED


class Calls:
    """Runs the calls of one server.

    Args:
        tracker: counts how they end.
        writes: limits how long a client may take to read a message.
        keys: the API keys.
    """

    def __init__(self, tracker: CallTracker, writes: WriteTimeout, keys: Keys) -> None:
        self._tracker = tracker
        self._keys = keys
        self._writes = writes
        self._log = RateLimitedLog(quiet=tracker.logged)

    def handler(
        self,
        service: ServiceDescriptor,
        servicer: object,
        admissions: Mapping[str, Admission],
        longest: int,
    ) -> grpc.GenericRpcHandler:
        """The handler of a service for gRPC.

        Args:
            service: its descriptor.
            servicer: has a method for each RPC, of the same name. If the RPC has a single response,
                the method returns it.
            admissions: limits of open calls, by method; other methods are not limited.
            longest: bytes of the longest request.
        """
        handlers = {}
        for method in service.methods:
            kind = message_factory.GetMessageClass(method.input_type)
            rpc = _Rpc(getattr(servicer, method.name), admissions.get(method.name), kind, longest)
            handlers[method.name] = self._handler(method.name, rpc)
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _handler(self, name: str, rpc: _Rpc) -> grpc.RpcMethodHandler:
        async def run(_: object, context: grpc.aio.ServicerContext) -> None:
            carrier = trace_context(context.invocation_metadata() or ())
            arrived: float | None = getattr(context, ARRIVED, None)  # set by a proxy
            record = self._tracker.begin(
                *(CallSource.GRPC, name, context.peer(), carrier),
                began=arrived,
                passage=getattr(context, PASSAGE, None),
            )
            call = Call(context, record, self._writes)
            try:
                with await self._caller(call):
                    await self._admitted(call, rpc)
                if record.requests:
                    context.set_trailing_metadata(tuple(answer_headers(record, ended=True)))
            except asyncio.CancelledError:
                call.ended_by_client()
                raise
            except grpc.aio.InternalError:  # the connection was lost while we wrote
                call.ended_by_client()
                raise asyncio.CancelledError from None
            finally:
                self._tracker.ended(record)

        return grpc.stream_stream_rpc_method_handler(
            run, None, operator.methodcaller("SerializeToString")
        )

    async def _caller(self, call: Call) -> ExitStack:
        """Counts the call for its key while the context is open."""
        try:
            caller = self._keys.caller(call.authorization)
            caller.target_headers = call.target_headers
            call.record.of(caller)
            return caller.enter()
        except Unauthenticated as error:
            self._log.warning("key", "refused a call from %s: %s", call.record.peer, error)
            await call.fail(error)
        except RateLimited as error:
            self._log.warning("rate", "refused a call: %s", error)
            await call.fail(error)

    async def _admitted(self, call: Call, rpc: _Rpc) -> None:
        admission, caller = rpc.admission, call.record.caller
        if admission is None:
            return await self._answered(call, rpc)
        try:
            admission.enter(caller)
        except Overloaded as error:
            self._log.warning("overload", "refused a call: %s", error)
            await call.fail(error)
        leave: Callable[[], None] = functools.partial(admission.leave, caller)
        try:
            await self._answered(call, rpc)
        except SlowReader as error:
            admission.give_up(caller)
            leave = admission.unstick
            self._log.warning("slow", "gave up on %r: %s", call.record.request_id, error)
            await call.fail(error)  # the client sees this once it has read what was already sent
        finally:
            leave()

    async def _answered(self, call: Call, rpc: _Rpc) -> None:
        raw = await call.read()
        if len(raw) > rpc.longest:
            details = f"request: has {len(raw):,} bytes; at most {rpc.longest:,} bytes are taken"
            await call.abort(_NO_PLACE, details, CallOutcome.INVALID)
        try:
            if len(raw) > _FEW_BYTES:
                kind = rpc.request_type.DESCRIPTOR
                try:
                    check_fields(raw, kind, _FEW_FIELDS)
                except InvalidRequest:
                    await asyncio.to_thread(check_fields, raw, kind)
            request = await self._parsed(call, rpc.request_type, raw)
            del raw
            answer = await rpc.method(request, call)
        except (SlowReader, grpc.aio.AbortError, grpc.aio.InternalError):
            raise
        except Exception as error:
            if call_error_of(error) is not None:
                await call.fail(error)
            logging.exception("%s failed", call.record.method)
            details = f"the server failed: {error!r}"
            await call.abort(grpc.StatusCode.INTERNAL, details, CallOutcome.FAILED)
        if answer is not None:
            await call.write(answer)

    async def _parsed(self, call: Call, request_type: type[Message], raw: bytes) -> Message:
        try:
            return request_type.FromString(raw)
        except DecodeError as error:
            name = request_type.DESCRIPTOR.full_name
            self._log.warning("malformed", "%s sent no %s: %s", call.record.peer, name, error)
            details = f"request: is not a {name}: {error}"
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, details, CallOutcome.MALFORMED)
