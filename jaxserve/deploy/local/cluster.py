"""A Ray cluster on this machine alone, with a deployment in it: for a demonstration, and for
tests."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxserve.deploy.settings import ENGINE, Settings
from jaxserve.server.daemon_thread import in_daemon_thread

HOST = "127.0.0.1"
APP = "jaxserve"
READY_S = 600.0  # until replicas serve; a first start compiles
_SLOW = {
    # Ray Serve's own deadlines are for machines whose processors are idle.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_worker_niceness": "0",  # 15 as Ray has it
}
_STORE_BYTES = 100 << 20  # the least is 75 MiB; answers are small


class NotReady(TimeoutError):
    """The deployment is not what it should be after so long."""


class Cluster:
    """http: where OpenAI's API is, "http://host:port/v1". grpc: "host:port"."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self.http, self.grpc = f"http://{HOST}:{http_port}/v1", f"{HOST}:{grpc_port}"

    def deploy(self, settings: Settings) -> float:
        """Has the application run with these settings; seconds until it does. Those of its replicas
        that may stay do. Raises NotReady."""
        from ray import serve

        from jaxserve.deploy.ray import app

        target, began = app(settings), time.monotonic()
        running = in_daemon_thread(lambda: bool(serve.run(target, name=APP, route_prefix="/")))
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

    def _problems(self) -> list[str]:
        """What Ray Serve says of the deployments, the last line of each: of a traceback, that which
        says what was wrong."""
        from ray import serve

        told = serve.status().applications[APP].deployments.values()
        return [each.message.strip().splitlines()[-1] for each in told if each.message.strip()]

    def replicas(self) -> int:
        """Engines that run; those not counted that are to go."""
        from ray import serve

        deployments = serve.status().applications[APP].deployments
        return int(deployments[ENGINE].replica_states.get("RUNNING", 0))

    def wait(self, condition: Callable[[], object], what: str, seconds: float = READY_S) -> float:
        """Until the condition holds; how long that took. Raises NotReady."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise NotReady(f"{what}: not after {seconds:g} s")
            time.sleep(0.2)
        return time.monotonic() - began

    def processes(self) -> list[int]:
        """Process ids of the engines; of those over several hosts, the leaders'. Only where there
        is /proc."""
        return _titled(f"ray::ServeReplica:{APP}:{ENGINE}")

    def followers(self) -> list[int]:
        """Process ids of their other hosts. Likewise."""
        return _titled("ray::HostFollower")


@contextlib.contextmanager
def local_cluster(*, cpus: int, http_port: int = 0, grpc_port: int = 0) -> Iterator[Cluster]:
    """Runs one meanwhile, with nothing deployed. cpus: that Ray believes there are, whatever the
    machine has. Ports: 0 takes free ones. Ray Serve's HTTP proxy listens on HOST alone, its gRPC
    proxy on all addresses, of which it leaves nobody a choice."""
    with _environment({**_SLOW, "RAY_USAGE_STATS_ENABLED": "0"}):
        import ray
        from ray import serve
        from ray.exceptions import RayError

        from jaxserve.deploy.ray import GRPC

        http, grpc = http_port or free_port(), grpc_port or free_port()
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_STORE_BYTES,
            _node_ip_address=HOST,
        )
        try:
            with contextlib.suppress(RayError):  # a proxy that takes longer is there later
                serve.start(
                    http_options={"host": HOST, "port": http},
                    grpc_options={"port": grpc, "grpc_servicer_functions": [GRPC]},
                )
            yield Cluster(http, grpc)
        finally:
            with contextlib.suppress(Exception):  # what is broken is ended with the processes
                serve.shutdown()
            ray.shutdown()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Has them in the environment meanwhile, where they are not set already."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _processes() -> Iterator[tuple[int, int, bytes]]:
    """(id, parent's id, command line) of all that run."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(folder.name), parent, (folder / "cmdline").read_bytes()


def _titled(title: str) -> list[int]:
    """Of our own processes, the ids of those whose command line begins so."""
    ours, begins = _descendants(), title.encode()
    return [pid for pid, _, words in _processes() if pid in ours and words.startswith(begins)]


def _descendants() -> set[int]:
    """Ids of the processes that this one has started, and those that they have; and its own."""
    parents = {pid: parent for pid, parent, _ in _processes()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def free_port() -> int:
    """A port that nobody listens on, for a server that is still to start. Systems take the ports of
    connections from 32768 or 49152 on: nobody is given this one by chance meanwhile."""
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((HOST, port))
            return port
    raise OSError(f"no port of {HOST} is free")
