"""A follower's side of a group of hosts: how it joins, and its messages from the leader."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

from jaxserve.hosts.channel import Channel, Closed
from jaxserve.hosts.group import HELLO, HELLO_BYTES, HERE, WELCOME
from jaxserve.hosts.link import FAILED, PATIENCE_S, Link
from jaxserve.hosts.messages import BadMessage, Message
from jaxserve.hosts.process_exit import end_process
from jaxserve.hosts.rank import GroupError, Rank

log = logging.getLogger(__name__)

_AGAIN_S = 0.25  # between attempts to reach the leader
_CONNECT_S = 5.0


def join_group(rank: Rank, profile: Mapping[str, Any]) -> tuple[Link, str]:
    """The link to the leader, and where its JAX coordinates, as "host:port". If the leader is lost
    later, the process ends with exit code 1. Raises GroupError."""
    deadline = time.monotonic() + rank.wait_s
    channel = _connect(rank, deadline)
    try:
        channel.send(Message(HELLO, {"index": rank.index, "profile": dict(profile)}))
        # The leader waits for the other hosts, too.
        message = channel.receive(rank.wait_s + _CONNECT_S, HELLO_BYTES)
    except (Closed, BadMessage, TimeoutError) as error:
        raise GroupError(f"mesh.coordinator: {rank.coordinator} does not go on: {error}") from error
    if message.name == FAILED:
        raise GroupError(str(message.fields.get("why")))
    if message.name != WELCOME:
        raise GroupError(f"mesh.coordinator: at {rank.coordinator} there is no leader")
    link = Link(channel, f"the leader at {rank.coordinator}", _lost)
    link.start()
    return link, str(message.fields["coordinator"])


def barrier(link: Link) -> None:
    """Waits until all hosts have reached this point; see `Group.barrier`."""
    link.send(Message(HERE))
    link.receive()
    link.done()


def _connect(rank: Rank, deadline: float) -> Channel:
    while True:
        try:
            where = (rank.address, rank.port)
            return Channel(socket.create_connection(where, _CONNECT_S), PATIENCE_S)
        except OSError as error:
            if time.monotonic() + _AGAIN_S > deadline:
                nobody = f"nobody answers at {rank.coordinator} within {rank.wait_s:g} s"
                raise GroupError(f"mesh.coordinator: {nobody} ({error})") from error
            time.sleep(_AGAIN_S)


def _lost(why: str) -> None:
    log.error("this host ends: %s", why)
    end_process(1)
