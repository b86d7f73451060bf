"""A server over a fake engine, and a client of it."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Iterator

import grpc
import pytest
import uvicorn.server

from jaxserve.client import Client
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(min(seconds, 0.005))


# uvicorn looks every 0.1 s whether to stop, and then whether all have left: most of what a test of
# a call takes.
uvicorn.server.asyncio = types.SimpleNamespace(  # type: ignore[attr-defined]
    **{**vars(asyncio), "sleep": _sleep}
)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    with Server(engine, grace_s=0.0) as server:
        yield server


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> generation_pb2_grpc.GenerationStub:
    return generation_pb2_grpc.GenerationStub(channel)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
