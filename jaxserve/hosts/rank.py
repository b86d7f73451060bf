"""Which host of a group this process is, and where the leader listens."""

from __future__ import annotations

import importlib
import socket
from dataclasses import dataclass

from jaxserve.config import MeshConfig

_WAIT_S = 60  # for the cluster to answer questions about itself
_MAX_HOSTS_WAIT_S = 86400.0


class GroupError(ValueError):
    """The hosts cannot form a group; the message is one line and names the config field."""


@dataclass(frozen=True)
class Rank:
    """The place of this process in a group of hosts.

    Attributes:
        address: address at which the leader listens.
        port: its port; 0 is any free one, in the leader's own rank only.
        hosts: number of hosts.
        index: this host's number; 0 is the leader.
        wait_s: seconds within which all hosts have to join.
        devices: local ids of the devices that this process uses; None for all of the host's.
    """

    address: str
    port: int
    hosts: int
    index: int
    wait_s: float
    devices: tuple[int, ...] | None = None

    @property
    def leads(self) -> bool:
        """Whether this host schedules and serves."""
        return self.index == 0

    @property
    def family(self) -> socket.AddressFamily:
        """The address family."""
        return socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)[0][0]

    @property
    def coordinator(self) -> str:
        """Where the leader listens, as "host:port"."""
        return f"{self.address}:{self.port}"


def find_rank(mesh: MeshConfig) -> Rank | None:
    """Finds this process's rank from the config's section `mesh`. Unset values come from the
    cluster that JAX detects (TPU pods, SLURM, Kubernetes Jobs). None for a single host. Raises
    GroupError."""
    hosts, coordinator, index = mesh.hosts, mesh.coordinator, mesh.host_index
    if hosts < 0:
        raise GroupError(f"mesh.hosts must be at least 1 (0: as the cluster says), got {hosts}")
    check_wait(mesh.hosts_wait_s)
    if hosts == 1:
        for name, given in (("coordinator", coordinator), ("host_index", index)):
            if given not in ("", -1):
                raise GroupError(f"mesh.{name}={given} is of no use with mesh.hosts=1")
        return None
    devices = None
    if not hosts or not coordinator or index == -1:
        coordinator, hosts, index, devices = _of_cluster(coordinator, hosts, index)
    address, port = _address(coordinator)
    if not 0 <= index < hosts:
        raise GroupError(f"mesh.host_index must be 0 to {hosts - 1}, got {index}")
    check_tensor(mesh.tensor, hosts)
    return Rank(address, port, hosts, index, mesh.hosts_wait_s, devices)


def check_wait(seconds: float) -> None:
    """Raises GroupError if `mesh.hosts_wait_s` is out of range."""
    if not 0 < seconds <= _MAX_HOSTS_WAIT_S:
        limits = f"must be more than 0, and at most {_MAX_HOSTS_WAIT_S:g}"
        raise GroupError(f"mesh.hosts_wait_s {limits}, got {seconds:g}")


def check_tensor(tensor: int, hosts: int) -> None:
    """Raises GroupError unless the devices divide evenly among the hosts."""
    if tensor % hosts:
        raise GroupError(
            f"mesh.tensor must be a multiple of the {hosts} hosts, as many devices on each of "
            f"them, got {tensor}"
        )


def _of_cluster(
    coordinator: str, hosts: int, index: int
) -> tuple[str, int, int, tuple[int, ...] | None]:
    """The given values, completed by what JAX finds."""
    # Not public, but `jax.distributed.initialize` cannot report what it has found before it acts on
    # it, and then a mistake ends the process.
    clusters = importlib.import_module("jax._src.clusters")
    given = (coordinator or None, hosts or None, None if index == -1 else index, None)
    try:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(*given, None, _WAIT_S)
    except Exception as error:  # any exception of the cluster's own client
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise GroupError(f"mesh.coordinator: the cluster does not say: {reason}") from error
    names = ("mesh.coordinator", "mesh.hosts", "mesh.host_index")
    missing = [name for name, value in zip(names, found, strict=False) if value is None]
    if missing:
        raise GroupError(
            f"{' and '.join(missing)}: give them, as there is no cluster that says (TPU pod, "
            "SLURM, Kubernetes Job)"
        )
    coordinator, hosts, index, devices = found
    return coordinator, int(hosts), int(index), None if devices is None else tuple(devices)


def _address(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise GroupError(f"mesh.coordinator must be HOST:PORT, got {text!r}")
    return address, int(port)
