"""A client that knows nothing of the API but what server reflection says."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.server.fake_engine import FIRST, FakeEngine

GENERATION = "jaxserve.v1.Generation"


class Reflected:
    """Calls of one service, made of descriptors that the server sent."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self._channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        # A pool of its own: what this process has of the API is not in it.
        self._service = DescriptorPool(self.database).FindServiceByName(service)

    def call(self, name: str, **fields: Any) -> Any:
        method: MethodDescriptor = self._service.methods_by_name[name]
        request = GetMessageClass(method.input_type)(**fields)
        kind = "unary_stream" if method.server_streaming else "unary_unary"
        rpc = getattr(self._channel, kind)(
            f"/{self._service.full_name}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return rpc(request, timeout=30)


def test_it_generates(channel: grpc.Channel, engine: FakeEngine) -> None:
    engine.run()
    reflected = Reflected(channel, GENERATION)
    messages = list(
        reflected.call("Generate", text="hi", sampling={"max_tokens": 3}, slo={"ttft_ms": 500.0})
    )
    assert [token for m in messages for token in m.token_ids] == [FIRST, FIRST + 1, FIRST + 2]
    assert "".join(message.text for message in messages) == " w0 w1 w2"
    finish = messages[-1].finish
    reasons = finish.DESCRIPTOR.fields_by_name["reason"].enum_type
    assert reasons.values_by_number[finish.reason].name == "FINISH_REASON_LENGTH"
    (request,) = engine.requests
    assert request.slo.ttft == 0.5


def test_it_asks_what_is_served(channel: grpc.Channel, engine: FakeEngine) -> None:
    reflected = Reflected(channel, GENERATION)
    assert GENERATION in reflected.database.get_services()
    assert reflected.call("GetServerInfo").model == engine.info().model
