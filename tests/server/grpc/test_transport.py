"""Where the server listens: the same port on all addresses of its host."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.client import Client
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.requests import addresses
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


V4, V6 = (socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0, 0, 0))


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an address of each family."""

    def found(host: str, port: int, **kind: Any) -> list[Any]:
        pair = ((V4[0], ("127.0.0.1", port)), (V6[0], ("::1", port, 0, 0)))
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in pair]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize("where", ["socket", "bind"])
def test_a_machine_without_ipv6_listens_on_the_rest(
    two_addresses: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class NoIpv6(socket.socket):
        def __init__(self, family: int, kind: int) -> None:
            if where == "socket" and family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "no such family")
            super().__init__(socket.AF_INET if family == socket.AF_INET6 else family, kind)
            self.asked = family

        def bind(self, address: Any) -> None:
            if self.asked == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "no such address")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", NoIpv6)
    assert addresses.addresses_of("both", 0) == [V4]
    (listener,) = addresses.bind_sockets("both", 0, 1)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_a_host_that_is_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.host: '192\.0\.2\.1': this machine has no"):
        addresses.addresses_of("192.0.2.1", 0)  # RFC 5737: nobody's


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_all_addresses_of_both_families() -> None:
    """`::`, as gRPC takes it."""
    (listener,) = addresses.bind_sockets("::", 0, 2)
    port = listener.getsockname()[1]
    for host in ("127.0.0.1", "::1"):
        socket.create_connection((host, port), 10.0).close()
    listener.close()


def test_one_port_for_all_addresses() -> None:
    listeners = addresses.bind_sockets("localhost", 0, 1)
    ports = {listener.getsockname()[1] for listener in listeners}
    assert len(ports) == 1
    with pytest.raises(OSError, match="in use"):
        addresses.bind_sockets("localhost", ports.pop(), 1)
    for listener in listeners:
        listener.close()
