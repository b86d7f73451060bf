"""Who leads and who follows, from the flags or from the cluster, and where JAX coordinates; what is
wrong is one line."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from jaxserve.config import MeshConfig
from jaxserve.hosts.rank import GroupError, Rank, find_rank
from jaxserve.hosts.runtime import reserved_address

SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def rank(**fields: Any) -> Rank | None:
    return find_rank(MeshConfig(**fields))


def test_one_host_needs_none() -> None:
    assert rank() is None


def test_it_is_as_the_flags_say() -> None:
    found = rank(hosts=2, coordinator="10.0.0.1:7000", host_index=1, tensor=8, hosts_wait_s=9.0)
    assert found == Rank("10.0.0.1", 7000, 2, 1, 9.0)
    assert not found.leads and found.coordinator == "10.0.0.1:7000"
    found = rank(hosts=2, coordinator="[fd00::1]:7000", host_index=0, tensor=2)
    assert found is not None and found.leads and found.address == "fd00::1"


def test_a_cluster_says_what_the_flags_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    found = rank(hosts=0, tensor=4)
    assert found == Rank("node07", 61440, 4, 3, 300.0, devices=(1,))
    found = rank(hosts=8, coordinator="here:7000", tensor=8, hosts_wait_s=1.0)
    assert found == Rank("here", 7000, 8, 3, 1.0, devices=(1,))


TWO: dict[str, Any] = {"hosts": 2, "tensor": 2, "coordinator": "here:1", "host_index": 0}
SECONDS = "mesh.hosts_wait_s must be more than 0, and at most 86400, got"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hosts": -1}, "mesh.hosts must be at least 1 (0: as the cluster says), got -1"),
        ({"coordinator": "a:1"}, "mesh.coordinator=a:1 is of no use with mesh.hosts=1"),
        ({"host_index": 0}, "mesh.host_index=0 is of no use with mesh.hosts=1"),
        ({**TWO, "hosts_wait_s": 0.0}, f"{SECONDS} 0"),
        ({**TWO, "hosts_wait_s": 1e10}, f"{SECONDS} 1e+10"),
        (
            {"hosts": 2, "tensor": 2},
            "mesh.coordinator and mesh.host_index: give them, as there is no cluster",
        ),
        ({"hosts": 0}, "mesh.coordinator and mesh.hosts and mesh.host_index: give them"),
        ({**TWO, "coordinator": "here"}, "mesh.coordinator must be HOST:PORT, got 'here'"),
        ({**TWO, "coordinator": "here:0"}, "mesh.coordinator must be HOST:PORT, got 'here:0'"),
        ({**TWO, "host_index": 2}, "mesh.host_index must be 0 to 1, got 2"),
        ({**TWO, "tensor": 3}, "mesh.tensor must be a multiple of the 2 hosts"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(GroupError, match=re.escape(problem)):
        rank(**fields)


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
