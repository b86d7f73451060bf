"""A router's view of the replicas, which have names, and come and go."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from jaxserve.sched.routing.fleet import Fleet, RoutingRequest
from jaxserve.sched.routing.routers import Router
from jaxserve.sched.routing.snapshot import Snapshot

ROUTING_REQUEST = "routing_request"
"""The keyword argument of a call with its routing request."""
AVOID = "avoid"
"""The keyword argument with the names of replicas that cannot answer the call."""
PAGES = "pages"
"""The keyword argument by which what another replica has cached of the answer is got."""
NOTHING = RoutingRequest(1)
"""Routing request of a call that generates nothing, or will be refused."""
SNAPSHOT, FINGERPRINT = "snapshot", "fingerprint"
"""Keys of the snapshot, and of the system fingerprint, in a replica's routing statistics."""
_PLACES = 8  # at first


class Replicas:
    """The replicas that a router knows; other routers use them, too. routing: a name in `ROUTERS`;
    ValueError otherwise. seed: of random choices; None for a random one."""

    def __init__(self, routing: str, seed: int | None = None) -> None:
        self._fleet = Fleet(_PLACES)
        seed = secrets.randbits(62) if seed is None else seed
        self._router = Router(routing, self._fleet, seed, apart=True)
        self._places: dict[Hashable, int] = {}
        self._heard: dict[Hashable, float] = {}
        self._fingerprints: dict[Hashable, str] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._places

    def update(
        self,
        said: Mapping[Hashable, Mapping[str, Any] | None],
        fingerprints: Mapping[Hashable, str] | None = None,
    ) -> None:
        """Updates all replicas by name. One on which no request has ended is assumed to have
        outputs as long as the others': otherwise it would seem to be free at once and get every
        request.

        Args:
            said: the latest snapshot of each (`Snapshot.as_dict`), or None.
            fingerprints: the system fingerprints of those that have said them.
        """
        self._fingerprints = dict(fingerprints or {})
        for name in [name for name in self._places if name not in said]:
            self.lose(name)
        heard = {name: Snapshot(**numbers) for name, numbers in said.items() if numbers}
        outputs = [one.mean_output for one in heard.values() if one.mean_output] or [0.0]
        for name in said:
            if name not in self._places:
                self._add(name)
        for name, one in heard.items():
            if one.time > self._heard.get(name, 0.0):
                self._heard[name] = one.time
                length = one.mean_output or statistics.fmean(outputs)
                self._fleet.hear(self._places[name], replace(one, mean_output=length))

    def choose(self, routing_request: RoutingRequest, now: float) -> Hashable:
        """The replica for a request. now: seconds, on the snapshots' clock. Raises NoReplica if
        there is none."""
        wanted, known = routing_request.fingerprint, self._fingerprints
        unlike = [
            place for name, place in self._places.items() if wanted and known.get(name) != wanted
        ]
        chosen = self._router.choose(routing_request, now, unlike)
        return next(name for name, place in self._places.items() if place == chosen)

    def sent(self, name: Hashable, routing_request: RoutingRequest, now: float) -> None:
        """Counts a request as sent to the replica."""
        if name in self._places:
            self._fleet.send(self._places[name], routing_request, now)

    def avoid(self, name: Hashable) -> None:
        """Routes nothing to the replica until a new snapshot says that it takes requests."""
        if name in self._places:
            self._fleet.lose(self._places[name])

    def lose(self, name: Hashable) -> None:
        """Forgets a replica that is gone."""
        place = self._places.pop(name, None)
        if place is not None:
            self._heard.pop(name, None)
            self._fleet.forget(place)

    def _add(self, name: Hashable) -> None:
        if len(self._places) == len(self._fleet):
            self._fleet.grow(len(self._fleet))
        place = min({*range(len(self._fleet))} - {*self._places.values()})
        self._places[name] = place
        self._fleet.find(place)
