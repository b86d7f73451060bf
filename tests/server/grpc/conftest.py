"""One server over gRPC for all whose calls are refused."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def refusing() -> Iterator[tuple[grpc.Channel, FakeEngine]]:
    """A channel to it, and its engine."""
    engine = FakeEngine()
    with (
        Server(engine, grace_s=0.0) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield channel, engine
