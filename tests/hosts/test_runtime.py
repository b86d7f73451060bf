"""Where JAX coordinates."""

from __future__ import annotations

import socket

import pytest

from jaxserve.hosts.rank import Rank
from jaxserve.hosts.runtime import reserved_address


def test_a_reserved_port_is_nobody_elses_until_jax_listens_there() -> None:
    rank = Rank("127.0.0.1", 0, 2, 0, 1.0)
    with reserved_address(rank) as address, reserved_address(rank) as other:
        assert address != other
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(place)
        with socket.socket() as ours:  # as gRPC opens it
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            ours.bind(place)
            ours.listen()
            socket.create_connection(place, 10).close()  # which is not the reserving socket's
