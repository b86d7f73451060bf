"""A Ray cluster on this machine alone, with a deployment in it: for demonstrations and tests."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.deploy.settings import ENGINE, Settings
from jaxserve.server.daemon_thread import in_daemon_thread

HOST = "127.0.0.1"
APP = "jaxserve"
READY_S = 600.0  # until replicas serve; a first start compiles
SLOW = {
    # Ray Serve's own deadlines assume that processors are idle.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_worker_niceness": "0",  # Ray's default is 15
}


class NotReady(TimeoutError):
    """The deployment has not reached the expected state in time."""


class Cluster:
    """http: address of the OpenAI API, "http://host:port/v1". grpc: "host:port"."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self.http, self.grpc = f"http://{HOST}:{http_port}/v1", f"{HOST}:{grpc_port}"

    def deploy(self, settings: Settings) -> float:
        """Deploys the application with these settings. Returns the seconds until it runs. Replicas
        that may stay do. Raises NotReady."""
        from ray import serve

        from jaxserve.deploy.ray import app

        target, began = app(settings), time.monotonic()
        fixed = settings.max_replicas <= settings.replicas  # then `scale` may change it
        running = in_daemon_thread(
            lambda: bool(
                serve.run(target, name=APP, route_prefix="/", external_scaler_enabled=fixed)
            )
        )
        try:
            running.result(READY_S)
        except TimeoutError:
            late = f"the deployment does not run after {READY_S:g} s"
            raise NotReady("; ".join([late, *self._problems()])) from None
        except RuntimeError:
            raise NotReady("; ".join(self._problems())) from None
        proxies = "the proxies are healthy"
        self.wait(lambda: set(serve.status().proxies.values()) == {"HEALTHY"}, proxies)
        self.wait(lambda: self.replicas() == settings.replicas, "all replicas run")
        return time.monotonic() - began

    def scale(self, replicas: int) -> None:
        """Changes the number of replicas, and of nothing else, where it is not by load."""
        import ray
        from ray.serve._private.common import DeploymentID
        from ray.serve.context import _get_global_client

        controller = _get_global_client()._controller
        engines = DeploymentID(name=ENGINE, app_name=APP)
        ray.get(controller.update_deployment_replicas.remote(engines, replicas))

    def _problems(self) -> list[str]:
        """Problems of the deployments as Ray Serve reports them, the last line of each: of a
        traceback, that is the error."""
        from ray import serve

        told = serve.status().applications[APP].deployments.values()
        return [each.message.strip().splitlines()[-1] for each in told if each.message.strip()]

    def replicas(self) -> int:
        """Number of running engines, without those that are being removed."""
        from ray import serve

        deployments = serve.status().applications[APP].deployments
        return int(deployments[ENGINE].replica_states.get("RUNNING", 0))

    def wait(self, condition: Callable[[], object], what: str, seconds: float = READY_S) -> float:
        """Waits until the condition holds. Returns the seconds. Raises NotReady."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise NotReady(f"{what}: not after {seconds:g} s")
            time.sleep(0.2)
        return time.monotonic() - began

    def processes(self) -> list[int]:
        """Process ids of the engines; for engines over several hosts, of the leaders. Needs
        /proc."""
        return _titled(f"ray::ServeReplica:{APP}:{ENGINE}")

    def followers(self) -> list[int]:
        """Process ids of the engines' other hosts. Needs /proc."""
        return _titled("ray::HostFollower")


@contextlib.contextmanager
def local_cluster(
    *,
    cpus: int = 0,
    http_port: int = 0,
    grpc_port: int = 0,
    address: str = "",
    store_bytes: int = 100 << 20,
) -> Iterator[Cluster]:
    """Runs a cluster with nothing deployed while the context lasts. Ray Serve's HTTP proxy listens
    on HOST only, its gRPC proxy on all addresses, which cannot be changed.

    Args:
        cpus: number that Ray is told, whatever the machine has.
        http_port, grpc_port: 0 takes free ones.
        address: of a cluster that runs already, whose nodes are as they are; "" for a new one.
        store_bytes: of the object store, at least 75 MiB; answers are small, caches are not.
    """
    with environment({**SLOW, "RAY_USAGE_STATS_ENABLED": "0"}):
        import ray
        from ray import serve
        from ray.exceptions import RayError

        from jaxserve.deploy.ray import GRPC

        http, grpc = http_port or free_port(), grpc_port or free_port()
        about: dict[str, Any] = {"address": address}
        if not address:
            about = {
                "address": "local",
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": store_bytes,
                "_node_ip_address": HOST,
            }
        ray.init(log_to_driver=False, **about)
        try:
            with contextlib.suppress(RayError):  # a slow proxy comes later
                serve.start(
                    http_options={"host": HOST, "port": http},
                    grpc_options={"port": grpc, "grpc_servicer_functions": [GRPC]},
                )
            yield Cluster(http, grpc)
        finally:
            with contextlib.suppress(Exception):  # the processes end in any case
                serve.shutdown()
            ray.shutdown()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Sets these environment variables while the context lasts, unless they are set already."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _processes() -> Iterator[tuple[int, int, bytes]]:
    """(id, parent's id, command line) of all running processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(folder.name), parent, (folder / "cmdline").read_bytes()


def _titled(title: str) -> list[int]:
    """Ids of our own processes whose command line begins with the title."""
    ours, begins = _descendants(), title.encode()
    return [pid for pid, _, words in _processes() if pid in ours and words.startswith(begins)]


def _descendants() -> set[int]:
    """Ids of this process and of all its descendants."""
    parents = {pid: parent for pid, parent, _ in _processes()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def free_port() -> int:
    """A port that nobody listens on, for a server that is yet to start. Systems take ports of
    connections from 32768 or 49152 on, so no connection takes this one by chance."""
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((HOST, port))
            return port
    raise OSError(f"no port of {HOST} is free")
