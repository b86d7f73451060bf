"""A server over a fake engine, and a client of it."""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Iterator
from typing import Any

import fastapi._compat.v2 as fastapi_fields
import grpc
import httpx._transports.default as transports
import pytest
import uvicorn.server
from pydantic import TypeAdapter

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

# Every client reads the certificates of all authorities, for 20 ms, which none of these asks.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)

# Every server's routes have 170 fields, and to make their validators is half of what a start takes.
_adapters: dict[tuple[Any, ...], TypeAdapter[Any]] = {}


def _adapter(annotated: Any, **options: Any) -> TypeAdapter[Any]:
    key = annotated.__origin__, repr(annotated.__metadata__), repr(options)
    if key not in _adapters:
        _adapters[key] = TypeAdapter(annotated, **options)
    return _adapters[key]


fastapi_fields.TypeAdapter = _adapter  # type: ignore[assignment, misc]


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
