"""The flags of `serve.py` that apply to a replica."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxserve.config import Config, ConfigError
from jaxserve.config.tree import DEFAULTS
from jaxserve.configs import base
from jaxserve.hosts.rank import GroupError, check_tensor, check_wait
from jaxserve.server.startup import launch

_DEFAULT = Path(base.__file__).parent / "tiny_cpu.py"
_PROXIES = "Ray Serve's proxies listen, with the http_options and grpc_options of its config"
_NO_BATCHES = "replicas take no batches"
_PLACED = "Ray places the hosts, as many as the setting hosts says"
_ELSEWHERE = {
    "server.host": _PROXIES,
    "server.port": _PROXIES,
    "server.http_port": _PROXIES,
    "server.metrics_port": "the HTTP proxy answers /metrics",
    "server.tls_cert": _PROXIES,
    "server.tls_key": _PROXIES,
    "server.tls_client_ca": _PROXIES,
    "server.exit_on_failure": "Ray Serve starts a replica again whose health check fails",
    "server.reflection": "Ray Serve's gRPC proxy offers it or not",
    "server.batch_dir": _NO_BATCHES,
    "server.batch_in_flight": _NO_BATCHES,
    "server.batch_keep_days": _NO_BATCHES,
    "server.batch_gib": _NO_BATCHES,
    "mesh.hosts": _PLACED,
    "mesh.coordinator": _PLACED,
    "mesh.host_index": _PLACED,
}


def replica_config(given: Sequence[str], hosts: int = 1) -> Config:
    """The config of a replica over this many hosts: configs/tiny_cpu.py with those flags, as
    serve.py takes them (a model may come first), checked. Raises ConfigError, also for a flag that
    has no effect on a replica."""
    values = flags.FlagValues()
    try:
        argv = ["replica", *launch.with_model(given)]
        launch.parse_flags(argv, str(_DEFAULT), values)
    except launch.UsageError as error:
        raise ConfigError(f"flags: {error}") from None
    config = launch.read_config(values)
    for path, why in _ELSEWHERE.items():
        if operator.attrgetter(path)(config) != DEFAULTS[path]:
            raise ConfigError(f"flags: {path} has no meaning for a replica: {why}")
    config = config.with_fields(mesh__hosts=hosts)
    try:
        check_wait(config.mesh.hosts_wait_s)
        check_tensor(config.mesh.tensor, hosts)
    except GroupError as error:
        raise ConfigError(f"flags: {error}") from None
    return config
