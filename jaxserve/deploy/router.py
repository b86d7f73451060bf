"""Ray Serve's `RequestRouter` over `sched/routing`: chooses the replica for a request.

Each handle has its own router, and routers do not know of each other.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxserve.deploy import roster  # not what is in it, which Ray would copy with this class
from jaxserve.deploy.replicas import (
    AVOID,
    FINGERPRINT,
    NOTHING,
    ROUTING_REQUEST,
    SNAPSHOT,
    Replicas,
)
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.sched.routing.routers import NoReplica


class SnapshotRouter(RequestRouter):
    """Routes by snapshots of the replicas. Its keyword arguments in Ray Serve's configuration are
    `routing`, a name in `ROUTERS`, and `seed`, of random choices; without it, each router has a
    random one."""

    def initialize_state(self, *, routing: str = "slo", seed: int | None = None) -> None:
        """Called by Ray Serve, once. Raises ValueError for an unknown routing."""
        self._known = Replicas(routing, seed)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Updates the replicas and their latest snapshots."""
        super().update_replicas(replicas)
        stats = {each.replica_id: each.routing_stats or {} for each in replicas}
        found = {name: str(said.get(FINGERPRINT, "")) for name, said in stats.items()}
        self._known.update({name: said.get(SNAPSHOT) for name, said in stats.items()}, found)
        roster.ROSTER.update({name.unique_id: fingerprint for name, fingerprint in found.items()})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica first, then the others by load as Ray Serve orders them, in case the
        chosen one is gone or takes no more calls."""
        there = {each.replica_id: each for each in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            avoided = pending_request.kwargs.get(AVOID) or ()
            for name in [each for each in there if each.unique_id in avoided]:
                self._known.avoid(name)
        try:
            name = self._known.choose(_ask(pending_request), time.time())
        except NoReplica:  # the last replica has gone, which is not known yet
            return [candidate_replicas]
        chosen = there.pop(name, None)
        rest = list(there.values())
        return [group for group in ([chosen] if chosen else [], rest) if group]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Counts the request towards the replica until its next snapshot."""
        self._known.sent(replica_id, _ask(pending_request), time.time())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Stops routing to the replica."""
        super().on_replica_actor_died(replica_id)
        self._known.lose(replica_id)


def _ask(pending: PendingRequest | None) -> RoutingRequest:
    request = None if pending is None else pending.kwargs.get(ROUTING_REQUEST)
    return request if isinstance(request, RoutingRequest) else NOTHING
