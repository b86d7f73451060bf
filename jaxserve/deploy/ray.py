"""Replicas of the engine on Ray Serve.

    serve run jaxserve.deploy.ray:app
    serve run jaxserve.deploy.ray:app replicas=4 flags="--model=/path/to/checkpoint" num_gpus=1
    serve deploy configs/deploy/ray.yaml

docs/ray.md describes it. The gRPC API needs Ray Serve's gRPC proxy, which the config file starts.
"""

# Annotations are not postponed: Ray Serve reads the one of `app` to parse its arguments.
import functools
import os
import threading
import time
from collections import defaultdict, deque
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)

from jaxserve.config import ConfigError
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.followers import running_engine
from jaxserve.deploy.ingress import Ingress
from jaxserve.deploy.load import Load, wanted_replicas
from jaxserve.deploy.moves import roster  # not what is in it, which Ray would copy
from jaxserve.deploy.moves.roster import Roster
from jaxserve.deploy.moves.transport import Pages, Transport
from jaxserve.deploy.replica import EngineReplica
from jaxserve.deploy.router import SnapshotRouter
from jaxserve.deploy.settings import ENGINE, INGRESS, Settings
from jaxserve.engine.block_keys import SECRET_BYTES

GRPC = "jaxserve.server.proto.generation_pb2_grpc.add_GenerationServicer_to_server"
"""Value that `grpc_servicer_functions` of Ray Serve's config must contain."""
_CALLS = 100_000  # at once: the engines enforce the limits
_STOP_S = 30.0  # beyond the grace period, until a replica is killed
_HEALTH_S, _HEALTH_TIMEOUT_S = 5.0, 30.0
_GET_S, _HELD_S = 2.0, 10.0
_LOOK_BACK_S = 15.0  # replicas report every 10 s


def app(settings: Settings) -> Application:
    """The application. Raises ConfigError for flags that serve.py would not take."""
    config = replica_config(settings.flags, settings.hosts)
    if settings.link and not (config.cache.host_gib and config.cache.prefix_caching):
        raise ConfigError(
            "link: caches go from host memory to host memory, among prefixes: "
            "flags must set cache.host_gib, and leave cache.prefix_caching on"
        )
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE,
        max_ongoing_requests=_CALLS,
        request_router_config=RequestRouterConfig(
            request_router_class=SnapshotRouter,
            request_router_kwargs=settings.router,
            request_routing_stats_period_s=settings.snapshot_s,
        ),
        graceful_shutdown_timeout_s=config.server.grace_s + _STOP_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        **_place(settings),
        **_count(settings),
    )
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=settings.ingresses,
        max_ongoing_requests=_CALLS,
        ray_actor_options={"num_cpus": 0.0},
        graceful_shutdown_timeout_s=config.server.grace_s + _STOP_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    # All replicas and routers derive the same keys of prompts. A new secret comes with new `args`,
    # which replace all replicas anyway.
    secret = os.urandom(SECRET_BYTES)
    run = functools.partial(running_engine, block_secret=secret)
    about = (replica_name, own_roster, ObjectStore(), replica_rank)
    bound = engine.bind(settings.flags, settings.hosts, run, *about)
    return ingress.bind(bound, settings.flags, secret)


def replica_name() -> str:
    """Ray Serve's name of the calling replica."""
    return serve.get_replica_context().replica_tag


def replica_rank() -> int:
    """Ray Serve's number of the calling replica among those of its deployment: it gives those of
    replicas that have gone to new ones."""
    rank = serve.get_replica_context().rank
    return 0 if rank is None else rank.rank


def own_roster() -> Roster:
    """The roster of the calling replica's deployment. A handle has a router, which hears from Ray
    Serve which replicas run."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    handle._init()
    return roster.ROSTER


class ObjectStore(Transport):
    """Through Ray's object store: on one node both read the same memory, and only a reference goes
    through the ingress."""

    def __init__(self) -> None:
        super().__init__()
        self._held = deque[tuple[float, Any]]()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, ()  # a lock is not pickled

    def _offer(self, pages: Pages) -> list[Any]:
        """See `Transport`. Lost with this process, or after _HELD_S: Ray Serve passes references on
        without Ray's knowledge, so somebody has to hold them."""
        reference = ray.put(dict(pages))
        with self._lock:
            self._held.append((time.monotonic() + _HELD_S, reference))
            if len(self._held) == 1:
                self._wait()
        return [reference]  # Ray leaves those in lists alone

    def _wait(self) -> None:
        """One thread at most waits, however much is put."""
        timer = threading.Timer(self._held[0][0] - time.monotonic(), self._drop)
        timer.daemon = True
        timer.start()

    def _drop(self) -> None:
        with self._lock:
            while self._held and self._held[0][0] <= time.monotonic():
                self._held.popleft()
            if self._held:
                self._wait()

    def _fetch(self, refs: list[Any], seconds: float) -> Pages:
        """See `Transport`. Nothing is copied on the node that has them."""
        (reference,) = refs
        found: Pages = ray.get(reference, timeout=min(seconds, _GET_S))
        return found

    def _here(self) -> str:
        """The node: what it has is as far from all of its replicas."""
        return str(ray.get_runtime_context().get_node_id())


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """How many replicas there should be; Ray Serve applies its own bounds and delays. The context
    has the means over `look_back_period_s` of every replica's `record_autoscaling_stats`."""
    by_replica: dict[Any, dict[str, float]] = defaultdict(dict)
    for name, values in (context.aggregated_metrics or {}).items():
        for replica, value in values.items():
            by_replica[replica][name] = value
    loads = [Load.from_metrics(metrics) for metrics in by_replica.values() if "busy" in metrics]
    return wanted_replicas(loads, context.current_num_replicas), {}


def _place(settings: Settings) -> dict[str, Any]:
    """Placement of a replica: with several hosts, each has a bundle, and the replica is in the
    first."""
    given = {name: getattr(settings, name) for name in ("num_cpus", "num_gpus", "resources")}
    options: dict[str, Any] = {"ray_actor_options": given}
    if settings.hosts > 1:
        options["placement_group_bundles"] = [settings.bundle] * settings.hosts
    return options


def _count(settings: Settings) -> dict[str, Any]:
    if settings.max_replicas <= settings.replicas:
        return {"num_replicas": settings.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.max_replicas,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            look_back_period_s=_LOOK_BACK_S,
            policy=AutoscalingPolicy(policy_function=scale),
        )
    }
