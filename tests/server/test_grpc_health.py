"""The standard services: health and reflection."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

GENERATION = "jaxserve.v1.Generation"
BATCHES = "jaxserve.v1.Batches"


@pytest.mark.parametrize("service", ["", GENERATION, BATCHES])
def test_a_running_server_is_serving(channel: grpc.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_the_health_of_an_unknown_service_is_not_found(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as error:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services_and_describes_ours(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=GENERATION),
    ]
    listed, described = stub.ServerReflectionInfo(iter(requests))
    names = {service.name for service in listed.list_services_response.service}
    assert {GENERATION, BATCHES, "grpc.health.v1.Health"} <= names
    (proto,) = described.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(proto)
    assert [method.name for method in file.service[0].method] == ["Generate", "GetServerInfo"]
