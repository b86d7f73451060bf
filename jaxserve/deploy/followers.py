"""The engine of a replica on Ray. If several hosts serve the model together, the replica leads in
the first bundle of its placement group, and it starts actors in the others that follow.

Ray ends these actors with the replica's process, however that ends. They also end by themselves
once they have lost it (`jaxserve.hosts`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxserve.config import Config, ConfigError
from jaxserve.hosts.rank import Rank
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.startup.launch import find_checkpoint
from jaxserve.server.telemetry.logs import log_to_stderr

_END_S = 10.0  # for followers that were told to end


class HostFollower:
    """The actor on one of the other hosts."""

    def follow(self, config: Config, rank: Rank) -> None:
        """Serves with the other hosts until the leader ends. Raises ConfigError; if the leader is
        lost, the process ends."""
        log_to_stderr(config.telemetry.log_format)
        from jaxserve.engine.startup.follower_executor import follow_leader  # jax takes seconds

        follow_leader(find_checkpoint(config), rank, lambda: None)


class Followers:
    """A `Starter` of all hosts but the first, each in its own bundle of this process's placement
    group. They live until `close`. Raises ConfigError if the group has too few bundles."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._group = get_current_placement_group()
        self._bundles = [] if self._group is None else self._group.bundle_specs
        hosts = config.mesh.hosts
        if len(self._bundles) < hosts:
            few = f"the placement group has {len(self._bundles)} bundles"
            raise ConfigError(f"hosts: {few}, of {hosts} that there must be")
        self.rank = Rank(ray.util.get_node_ip_address(), 0, hosts, 0, config.mesh.hosts_wait_s)
        self._actors: list[Any] = []
        self._following: list[Any] = []

    def start(self, coordinator: str) -> None:
        """See `Starter`."""
        address, _, port = coordinator.rpartition(":")
        for index in range(1, self.rank.hosts):
            strategy = PlacementGroupSchedulingStrategy(self._group, index)
            given = dict(self._bundles[index])
            actor = ray.remote(HostFollower).options(
                num_cpus=given.pop("CPU", 0.0),
                num_gpus=given.pop("GPU", 0.0),
                resources=given,
                scheduling_strategy=strategy,
            )
            self._actors.append(actor.remote())
            rank = Rank(address, int(port), self.rank.hosts, index, self.rank.wait_s)
            self._following.append(self._actors[-1].follow.remote(self._config, rank))

    def problem(self) -> str | None:
        """See `Starter`."""
        ended, _ = ray.wait(self._following, num_returns=len(self._following), timeout=0)
        for reference in ended:
            index = self._following.index(reference) + 1
            try:
                ray.get(reference)
            except RayError as error:
                return f"host {index}: {_line(error)}"
            return f"host {index} has ended"
        return None

    def close(self) -> None:
        """Ends the followers. Those that the leader has told to end get _END_S to do so.
        Idempotent."""
        if self._following:
            ray.wait(self._following, num_returns=len(self._following), timeout=_END_S)
        while self._actors:
            ray.kill(self._actors.pop())


@contextlib.contextmanager
def running_engine(config: Config, block_secret: bytes | None = None) -> Iterator[EngineClient]:
    """The started engine for a replica's config, until the context ends. block_secret: see
    `build_engine`. Raises ConfigError."""
    from jaxserve.engine.startup.build import build_engine  # jax takes seconds

    with contextlib.ExitStack() as stack:
        rank = followers = None
        if config.mesh.hosts > 1:
            followers = stack.enter_context(contextlib.closing(Followers(config)))
            rank = followers.rank
        more: dict[str, Any] = {"rank": rank, "starter": followers, "block_secret": block_secret}
        engine = build_engine(find_checkpoint(config), progress=False, **more)
        stack.callback(engine.stop)
        engine.start()
        # As `run_server`: a collection of all that there is now stops every answer for 0.2 s.
        gc.collect()
        gc.freeze()
        yield engine


def _line(error: RayError) -> str:
    """The problem in one line; for an exception in the actor, its own message."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
