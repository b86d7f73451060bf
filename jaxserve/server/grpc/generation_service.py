"""jaxserve.v1.Generation over an engine."""

from __future__ import annotations

from jaxserve.engine.output import FinishReason
from jaxserve.server.grpc import message_conversion
from jaxserve.server.grpc.calls import Call
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.engine_requests import MAX_REQUEST_ID, CallStreams, EngineRequests


class GenerationService:
    """The two RPCs of jaxserve.v1.Generation.

    Whatever ends a call early (cancelled, past its deadline, connection lost) cancels the request
    in the engine, which frees its blocks within one step.
    """

    def __init__(self, requests: EngineRequests) -> None:
        self._requests = requests

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, call: Call
    ) -> pb.GetServerInfoResponse:
        """The RPC: what the engine serves, and the server's version and SLO classes."""
        return message_conversion.server_info_message(
            self._requests.info(), self._requests.slo_classes
        )

    async def Generate(self, message: pb.GenerateRequest, call: Call) -> None:
        """The RPC: streams what each continuation generates, in messages of its own. Ends with
        CANCELLED, or with a status for what it raises."""
        call.record.request_id = message.request_id[:MAX_REQUEST_ID]
        self._requests.check_open()
        fields = message_conversion.fields_from_message(message, call.record.caller)
        request = await self._requests.make_request(fields)
        streams = CallStreams(self._requests, [request], call.record)
        (stream,), cancelled = streams.streams, False
        try:
            # write() returns once the transport has taken the message, so a client that does not
            # read stops us here, and its news pile up merged in the stream.
            while (delta := await stream.next()) is not None:
                await call.write(message_conversion.response_message(call.record.request_id, delta))
                if delta.last is not None:
                    cancelled |= delta.last.finish_reason is FinishReason.CANCELLED
        finally:
            streams.end()
        if cancelled:
            raise self._requests.cancelled_error()
