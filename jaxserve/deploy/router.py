"""Ray Serve's `RequestRouter` over `sched/routing`: chooses the replica for a request.

Each handle has its own router, and routers do not know of each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxserve.deploy.moves import roster  # not what is in it, which Ray would copy with this class
from jaxserve.deploy.replicas import (
    FINGERPRINT,
    NOTHING,
    PAGES,
    RANK,
    ROUTING_REQUEST,
    SNAPSHOT,
    WHERE,
    Replicas,
    Where,
)
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.routing.routers import NoReplica


class SnapshotRouter(RequestRouter):
    """Routes by snapshots of the replicas. Its keyword arguments in Ray Serve's configuration are
    those of `Replicas`; without a seed, each router has a random one."""

    def initialize_state(
        self,
        *,
        routing: str = "slo",
        seed: int | None = None,
        link: Sequence[float] | None = None,
        roles: Sequence[int] = (0, 0),
    ) -> None:
        """Called by Ray Serve, once. Raises ValueError for an unknown routing.

        Args:
            routing: as of `Replicas`.
            seed: likewise.
            link: the arguments of `Link`; None for none.
            roles: as of `Replicas`.
        """
        prompts, decodes = roles
        between = None if link is None else Link(*link)
        self._known = Replicas(routing, seed, between, (prompts, decodes))
        roster.ROSTER.replicas = self._known

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Updates the replicas and their latest snapshots."""
        super().update_replicas(replicas)
        stats = {each.replica_id.unique_id: each.routing_stats or {} for each in replicas}
        found = {name: str(said.get(FINGERPRINT, "")) for name, said in stats.items()}
        ranks = {name: int(said[RANK]) for name, said in stats.items() if RANK in said}
        snapshots = {name: said.get(SNAPSHOT) for name, said in stats.items()}
        news = self._known.update(snapshots, found, ranks)
        roster.ROSTER.update(found, news)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica first, then the others by load as Ray Serve orders them, in case the
        chosen one is gone or takes no more calls."""
        there = {each.replica_id.unique_id: each for each in candidate_replicas}
        where = Where()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            where = pending_request.kwargs.get(WHERE) or where
            for name in where.avoid:
                self._known.avoid(name)
        try:
            known = where.to in there
            name = where.to if known else self._known.choose(_ask(pending_request), time.time())
        except NoReplica:  # the last replica has gone, which is not known yet
            return [candidate_replicas]
        self._known.goes_to(where.call, name)  # it may be out of reach, and never accept
        chosen = there.pop(name, None)
        rest = list(there.values())
        return [group for group in ([chosen] if chosen else [], rest) if group]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Counts the request towards the replica until its next snapshot."""
        if ROUTING_REQUEST not in pending_request.kwargs:  # not a call of a client
            return
        where = pending_request.kwargs.get(WHERE)
        if where is not None:
            self._known.goes_to(where.call, replica_id.unique_id)
            if where.to == replica_id.unique_id:
                return  # it was counted when that was decided
        moves = PAGES in pending_request.kwargs
        self._known.sent(replica_id.unique_id, _ask(pending_request), time.time(), moves=moves)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Stops routing to the replica."""
        super().on_replica_actor_died(replica_id)
        self._known.lose(replica_id.unique_id)


def _ask(pending: PendingRequest | None) -> RoutingRequest:
    request = None if pending is None else pending.kwargs.get(ROUTING_REQUEST)
    return request if isinstance(request, RoutingRequest) else NOTHING
