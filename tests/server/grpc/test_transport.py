"""Where the server listens: the same port on all addresses of its host."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.client import Client
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.server import Server
from jaxserve.server.startup import launch
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

ADDRESSES = ("127.0.0.1", "127.0.0.2")  # of a machine of two addresses


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def resolved(host: Any, *args: Any, **options: Any) -> list[Any]:
        hosts = ADDRESSES if host == "two" else (host,)
        return [info for each in hosts for info in resolve(each, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program has, on one of the addresses."""
    with socket.socket() as other:
        other.bind((ADDRESSES[1], 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_free_port_is_the_servers_on_every_address() -> None:
    with Server(FakeEngine(), host="two") as server:
        name, port = server.address.split(":")
        assert name == "two"
        for address in ADDRESSES:
            with Client(f"{address}:{port}") as client:
                assert client.info(timeout=20).model == "fake"


def test_a_port_that_is_taken_on_one_address_is_taken(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"server.port: cannot listen on two:{taken} "):
        Server(FakeEngine(), host="two", port=taken).start()
    config = ServerConfig(host="two", port=taken, http_port=-1, metrics_port=-1)
    with pytest.raises(ConfigError, match=f"server.port: cannot listen on two:{taken} "):
        launch.check_ports(config)


def test_addresses_of_ipv6_are_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Server(FakeEngine(), host="::1", metrics_port=0, http=SETTINGS) as server:
        for address in (server.address, server.metrics_address, server.http_address):
            assert address is not None and address.startswith("[::1]:")
        monkeypatch.setenv("http_proxy", f"http://{server.metrics_address}")  # which is none
        with Client(server.address) as client:
            assert client.info(timeout=20).model == "fake"


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match=r"^server\.host: 'not a host': "):
        Server(FakeEngine(), host="not a host").start()
