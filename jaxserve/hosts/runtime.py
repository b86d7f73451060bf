"""JAX over all hosts of a group."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import jax

from jaxserve.hosts.rank import GroupError, Rank

# The group's own heartbeats notice lost hosts long before JAX, which would abort the process with
# many lines of output.
_HEARTBEAT_S = 100
_SHUTDOWN_S = 10


@contextmanager
def reserved_address(rank: Rank) -> Iterator[str]:
    """An address where JAX may coordinate: the leader's, with a free port that nobody else gets
    while the context lasts. JAX can listen there, because its gRPC shares ports (SO_REUSEPORT) like
    this socket, and a socket that does not listen takes no connections from it."""
    with closing(socket.socket(rank.family, socket.SOCK_STREAM)) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        place.bind((rank.address, 0))
        host = f"[{rank.address}]" if ":" in rank.address else rank.address
        yield f"{host}:{place.getsockname()[1]}"


def start_jax(rank: Rank, address: str) -> None:
    """Starts JAX over all hosts. Every process of the group calls it before any other use of JAX;
    afterwards `jax.devices` has the devices of all hosts. address: the leader's `reserved_address`.
    Raises GroupError."""
    # Otherwise it would handle SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            rank.hosts,
            rank.index,
            local_device_ids=rank.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=max(10, int(rank.wait_s)),
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
            coordinator_bind_address=address if rank.leads else None,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise GroupError(f"mesh.coordinator: JAX does not start over the hosts: {reason}") from None
