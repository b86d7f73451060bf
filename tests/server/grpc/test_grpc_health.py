"""The standard services: health and reflection."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.client import Client, ServerError
from jaxserve.server import server as runner
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.server.fake_engine import PATIENCE, FakeEngine

STATUS = health_pb2.HealthCheckResponse
GENERATION = "jaxserve.v1.Generation"
BATCHES = "jaxserve.v1.Batches"


def test_a_running_server_is_serving(channel: grpc.Channel) -> None:
    for service in ("", GENERATION, BATCHES):
        asked = health_pb2.HealthCheckRequest(service=service)
        assert health_pb2_grpc.HealthStub(channel).Check(asked).status == STATUS.SERVING
    with pytest.raises(grpc.RpcError) as error:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_hung_engine_is_not_serving_until_it_goes_on(engine: FakeEngine) -> None:
    with (
        Server(engine, grace_s=0.0, options=ServerOptions(stall_s=0.2)) as server,
        grpc.insecure_channel(server.address) as channel,
        Client(server.address) as client,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION), timeout=PATIENCE)
        assert next(watch).status == STATUS.SERVING
        stream = client.generate("hi", max_tokens=2)
        assert next(watch).status == STATUS.NOT_SERVING
        assert stub.Check(health_pb2.HealthCheckRequest()).status == STATUS.NOT_SERVING
        with pytest.raises(ServerError, match=r"no step for 0\.2 s") as error:
            client.complete("hi")
        assert error.value.code == "UNAVAILABLE"
        engine.step()
        assert next(watch).status == STATUS.SERVING
        engine.step()
        assert sum(len(message.token_ids) for message in stream) == 2
        watch.cancel()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2 (RFC 9113 section 4.1)."""
    head = bytes([kind, flags]) + struct.pack("!I", stream)
    return struct.pack("!I", len(payload))[1:] + head + payload


@contextlib.contextmanager
def deaf_watcher(address: str) -> Iterator[socket.socket]:
    """Watches, and lets the server send it nothing: its window is 0 from the beginning."""

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    headers = (  # method and scheme, path, authority, content-type, and one that has no number
        b"\x83\x86\x04" + text(b"/grpc.health.v1.Health/Watch") + b"\x01" + text(b"localhost")
    ) + (b"\x0f\x10" + text(b"application/grpc") + b"\x00" + text(b"te") + text(b"trailers"))
    window = struct.pack("!HI", 4, 0)
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, window)
            + frame(1, 4, 1, headers)
            + frame(0, 1, 1, b"\0" * 5)
        )
        told = b""
        while b"application/grpc" not in told:  # the head of its answer
            piece = connection.recv(1 << 12)
            assert piece
            told += piece
        yield connection


def test_a_watcher_who_takes_nothing_keeps_no_server_from_stopping(engine: FakeEngine) -> None:
    options = ServerOptions(exit_on_failure=True)
    server = Server(engine, host="127.0.0.1", grace_s=0.0, options=options)
    server.start()
    with deaf_watcher(server.address), grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == STATUS.SERVING
        engine.fail(RuntimeError("it broke"))
        assert next(watch).status == STATUS.NOT_SERVING
        server.stop(PATIENCE)


def test_watchers_leave_connections_for_others(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "connections_of_a_door", lambda: 8)
    with (
        Server(engine, host="127.0.0.1", grace_s=0.0) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for each in watching:
            assert next(each).status == STATUS.SERVING
        with pytest.raises(grpc.RpcError) as error:
            next(stub.Watch(health_pb2.HealthCheckRequest()))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Check(health_pb2.HealthCheckRequest()).status == STATUS.SERVING
        for each in watching:
            each.cancel()


def test_a_server_need_not_reflect(engine: FakeEngine) -> None:
    with (
        Server(engine, grace_s=0.0, options=ServerOptions(reflection=False)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as error:
            list(stub.ServerReflectionInfo(iter([asked])))
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


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
    names = [method.name for method in file.service[0].method]
    assert names == ["Generate", "Embed", "Score", "GetServerInfo"]
