"""JAX over all hosts of a group."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import jax

from jaxserve.hosts.rank import GroupError, Rank

# Hosts that are lost are noticed by the group's own beats, and long before: what JAX does then is
# to abort the process, with many lines.
_HEARTBEAT_S = 100
_SHUTDOWN_S = 10


@contextmanager
def reserved_address(rank: Rank) -> Iterator[str]:
    """Where JAX may coordinate: at the leader's address, on a free port, which meanwhile nobody
    else is given. JAX can listen there: its gRPC shares ports (SO_REUSEPORT), as this does, and a
    socket that does not listen takes no connection from it."""
    with closing(socket.socket(rank.family, socket.SOCK_STREAM)) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        place.bind((rank.address, 0))
        host = f"[{rank.address}]" if ":" in rank.address else rank.address
        yield f"{host}:{place.getsockname()[1]}"


def start_jax(rank: Rank, address: str) -> None:
    """Every process of the group calls it, before anything else of JAX's is used; afterwards
    `jax.devices` are those of all. address: as the leader has it of `reserved_address`.
    Raises GroupError."""
    # Else it takes SIGTERM for itself.
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
