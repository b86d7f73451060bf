"""A server with both frontends over a fake engine, OpenAI's client, and a plain one."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.sched.request import SLO, Tier
from jaxserve.server.http.options import HttpSettings
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.fake_engine import PATIENCE, FakeEngine

SETTINGS = HttpSettings(
    port=0,
    template=ChatTemplate(),
    limits=SchedulerConfig(max_rows=16),
)

CLASSES = {"offline": ServiceLevel(SLO(jct=60.0), Tier.BEST_EFFORT, "offline")}


class Plain:
    """JSON calls, as they come."""

    def __init__(self, server: Server) -> None:
        assert server.http_address is not None
        self.address, self._server = server.http_address, server

    def open(self) -> int:
        """Connections that the server has."""
        assert self._server._http is not None
        return len(self._server._http._connections)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=PATIENCE)

    def socket(self) -> socket.socket:
        """A connection for bytes of one's own."""
        host, port = self.address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), PATIENCE)

    def call(
        self, method: str, path: str, body: Any = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        connection = self.connect()
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text or b"null"), dict(response.getheaders())


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    with Server(engine, grace_s=0.0, http=SETTINGS, slo_classes=CLASSES) as server:
        yield server


@pytest.fixture
def plain(server: Server) -> Plain:
    return Plain(server)


@pytest.fixture(scope="module")
def refusing() -> Iterator[tuple[Plain, FakeEngine]]:
    """One server for all who leave nothing behind, and its engine."""
    engine = FakeEngine()
    with Server(engine, grace_s=0.0, http=SETTINGS, slo_classes=CLASSES) as server:
        yield Plain(server), engine


@pytest.fixture(scope="module")
def shared(refusing: tuple[Plain, FakeEngine]) -> Plain:
    """The same, for those who do not look at the engine."""
    return refusing[0]


@pytest.fixture
def running(server: Server, engine: FakeEngine) -> FakeEngine:
    """The engine, once it steps by itself."""
    return engine.run()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{server.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
