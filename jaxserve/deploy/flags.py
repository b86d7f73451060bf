"""Of the flags of `serve.py`, those that mean something to a replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxserve.config import Config, ConfigError
from jaxserve.configs import base
from jaxserve.hosts.errors import GroupError
from jaxserve.hosts.rank import check_tensor, check_wait
from jaxserve.server.startup import launch

_DEFAULT = Path(base.__file__).parent / "tiny_cpu.py"
_PROXIES = "Ray Serve's proxies listen, with the http_options and grpc_options of its config"
_ELSEWHERE = {
    "host": _PROXIES,
    "port": _PROXIES,
    "http_port": _PROXIES,
    "metrics_port": "the HTTP proxy answers /metrics",
    "tls_cert": _PROXIES,
    "tls_key": _PROXIES,
    "tls_client_ca": _PROXIES,
    "exit_on_failure": "Ray Serve starts a replica again whose health check fails",
    "reflection": "Ray Serve's gRPC proxy offers it or not",
    "batch_dir": "replicas take no batches",
    "batch_in_flight": "replicas take no batches",
    "batch_keep_days": "replicas take no batches",
    "batch_gib": "replicas take no batches",
}


_GROUP = ("hosts", "coordinator", "host_index")


def replica_config(given: Sequence[str], hosts: int = 1) -> Config:
    """The config of a replica: configs/tiny_cpu.py with those flags, as serve.py takes them,
    checked, over so many hosts. Raises ConfigError, also for a flag that is somebody else's
    business here."""
    values = flags.FlagValues()
    try:
        launch.parse_flags(["replica", *given], str(_DEFAULT), values)
    except launch.UsageError as error:
        raise ConfigError(f"flags: {error}") from None
    config = launch.read_config(values)
    default = Config()
    for name, why in _ELSEWHERE.items():
        if getattr(config.server, name) != getattr(default.server, name):
            raise ConfigError(f"flags: server.{name} has no meaning for a replica: {why}")
    for name in _GROUP:
        if getattr(config.mesh, name) != getattr(default.mesh, name):
            why = "Ray places the hosts, as many as the setting hosts says"
            raise ConfigError(f"flags: mesh.{name} has no meaning for a replica: {why}")
    config = config.with_fields(mesh__hosts=hosts)
    try:
        check_wait(config.mesh.hosts_wait_s)
        check_tensor(config.mesh.tensor, hosts)
    except GroupError as error:
        raise ConfigError(f"flags: {error}") from None
    return config
