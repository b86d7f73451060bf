"""Two ends of a connection, and ranks at a port that is free."""

from __future__ import annotations

import queue
import socket

from jaxserve.deploy.local.cluster import free_port
from jaxserve.hosts.channel import Channel
from jaxserve.hosts.link import Link
from jaxserve.hosts.rank import Rank

TIMEOUT = 60.0
SOON = 0.4  # the patience of a link that is to run out of it


class Losses:
    """What `on_loss` is told."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, why: str) -> None:
        self._told.put(why)

    def wait(self) -> str:
        return self._told.get(timeout=TIMEOUT)

    @property
    def any(self) -> bool:
        return not self._told.empty()


def sockets() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection over TCP."""
    with socket.create_server(("localhost", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def channels() -> tuple[Channel, Channel]:
    one, other = sockets()
    return Channel(one, TIMEOUT), Channel(other, TIMEOUT)


def links(patience_s: float = TIMEOUT) -> tuple[Link, Link, Losses, Losses]:
    """A leader's and a follower's, started, and what each is told of the other's loss."""
    ends, here, there = channels(), Losses(), Losses()
    leader = Link(ends[0], "the follower", here, patience_s=patience_s)
    follower = Link(ends[1], "the leader", there, patience_s=patience_s)
    for link in (leader, follower):
        link.hurry()
        link.start()
    return leader, follower, here, there


def ranks(hosts: int, wait_s: float = TIMEOUT) -> list[Rank]:
    port = free_port()
    return [Rank("localhost", port, hosts, index, wait_s) for index in range(hosts)]
