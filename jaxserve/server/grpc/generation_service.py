"""jaxserve.v1.Generation over an engine."""

from __future__ import annotations

from jaxserve.engine.output import FinishReason
from jaxserve.server.grpc import message_conversion, pooling_conversion
from jaxserve.server.grpc.calls import Call
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.engine_requests import MAX_REQUEST_ID, CallStreams, EngineRequests
from jaxserve.server.requests.pooling.pooled_outputs import pooled, scores, vectors
from jaxserve.server.requests.pooling.scoring import NO_TOKENS, Scoring

_INLINE_VALUES = 2048  # larger outputs become messages off the event loop


class GenerationService:
    """The RPCs of jaxserve.v1.Generation.

    A call that ends early (cancelled, past its deadline, connection lost) cancels its request in
    the engine, which frees the blocks within one step.

    Args:
        requests: the way to the engine.
        scoring: how pairs of texts are scored if a call does not say.
    """

    def __init__(self, requests: EngineRequests, scoring: Scoring = NO_TOKENS) -> None:
        self._requests, self._scoring = requests, scoring

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, call: Call
    ) -> pb.GetServerInfoResponse:
        """The RPC: describes the model, and the server's version and SLO classes."""
        return message_conversion.server_info_message(
            self._requests.info(), self._requests.slo_classes
        )

    async def Generate(self, message: pb.GenerateRequest, call: Call) -> None:
        """The RPC: streams what each continuation generates, in messages of its own. Ends with
        CANCELLED, or with the status of the error that was raised."""
        call.record.request_id = message.request_id[:MAX_REQUEST_ID]
        self._requests.check_open()
        fields = message_conversion.fields_from_message(message, call.record.caller)
        request = await self._requests.make_request(fields)
        streams = CallStreams(self._requests, [request], call.record)
        (stream,), cancelled = streams.streams, False
        try:
            # write() returns once the transport has taken the message, so a client that does not
            # read stops this loop, and its output is merged in the stream.
            while (delta := await stream.next()) is not None:
                reason = None if delta.last is None else delta.last.finish_reason
                cancelled |= reason is FinishReason.CANCELLED
                if cancelled and call.record.passage is not None:
                    break  # another replica may go on with it
                said = message_conversion.response_message(call.record.request_id, delta)
                with streams.passing(delta.index, delta):
                    await call.write(said)
            streams.passed()
        finally:
            streams.end()
        if cancelled:
            raise self._requests.cancelled_error()

    async def Embed(self, message: pb.EmbedRequest, call: Call) -> None:
        """The RPC: streams the vectors of all inputs, once all are computed."""
        record, requests = call.record, self._requests
        record.request_id = message.request_id[:MAX_REQUEST_ID]
        requests.check_open()
        inputs = pooling_conversion.inputs_of(message)
        shared = pooling_conversion.embed_fields(message, record.caller, requests.info().pooling)
        outputs = await vectors(requests, shared, inputs, "inputs", record)
        responses = pooling_conversion.embed_responses(record.request_id, outputs)
        few = sum(len(pooled(output)) for output in outputs) <= _INLINE_VALUES
        while response := (
            next(responses, None)
            if few
            else await requests.run_beside(record.caller.name, next, responses, None)
        ):
            await call.write(response)

    async def Score(self, message: pb.ScoreRequest, call: Call) -> pb.ScoreResponse:
        """The RPC: scores pairs of texts."""
        record, requests = call.record, self._requests
        record.request_id = message.request_id[:MAX_REQUEST_ID]
        requests.check_open()
        shared = pooling_conversion.score_fields(message, record.caller)
        pairs = pooling_conversion.pairs_from_message(message)
        tokens = pooling_conversion.tokens_from_message(message)
        template = message.template if message.HasField("template") else None
        scored = await scores(requests, shared, pairs, self._scoring, tokens, template, record)
        return pooling_conversion.score_response(record.request_id, scored, record.last)
