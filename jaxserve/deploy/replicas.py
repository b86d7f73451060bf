"""A router's view of the replicas, which have names, and come and go."""

from __future__ import annotations

import math
import secrets
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxserve.sched.routing.behind import Sent
from jaxserve.sched.routing.fleet import Fleet, Role, RoutingRequest
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.routing.routers import NoReplica, Router
from jaxserve.sched.routing.snapshot import Snapshot

ROUTING_REQUEST = "routing_request"
"""The keyword argument of a call with its routing request."""
WHERE = "where"
"""The keyword argument that says which replica the call is for, a `Where`."""
PAGES = "pages"
"""The keyword argument by which what another replica has cached of the answer is got."""
NOTHING = RoutingRequest(1)
"""Routing request of a call that generates nothing, or will be refused."""
SNAPSHOT, FINGERPRINT, RANK = "snapshot", "fingerprint", "rank"
"""Keys of a replica's snapshot, system fingerprint, and number among all, from 0, in its routing
statistics."""
DOUBTED_S = 2.0
"""Seconds without news after which a replica, which seems to have done all of its work by now, gets
nothing while there are others."""
SILENT_S = 10.0
"""Seconds without news after which a replica counts as out of reach, if another one has had MISSED
since."""
MISSED = 3
_PLACES = 8  # at first


class Where(NamedTuple):
    """Which replica a call is for.

    Attributes:
        avoid: names of replicas that cannot answer it.
        to: the name of the one that should; "" for any.
        call: `ResumePoint.key` of the call; "" if nobody asks where it went.
    """

    avoid: tuple[str, ...] = ()
    to: str = ""
    call: str = ""


ANYWHERE = Where()


class Replicas:
    """The replicas that a router knows; other routers use them, too. Any thread may call it.

    Args:
        routing: a name in `ROUTERS`.
        seed: of random choices; None for a random one.
        link: what lies between replicas, if answers move between them while these are well.
        roles: as many replicas compute prompts only, and as many none; (0, 0) if all do both.

    Attributes:
        moves: whether there is a link.
        silent: names of those that are out of reach. They get nothing until there is news.
        at: where each call was sent, by `Where.call`, in a list of one or none. Whoever sends the
            call puts it there, and removes it.

    Raises:
        ValueError: there is no such routing.
    """

    def __init__(
        self,
        routing: str,
        seed: int | None = None,
        link: Link | None = None,
        roles: tuple[int, int] = (0, 0),
    ) -> None:
        self._fleet = Fleet(_PLACES)
        seed = secrets.randbits(62) if seed is None else seed
        self._router = Router(routing, self._fleet, seed, apart=True, link=link)
        self.moves, self._roles = link is not None, roles
        self._lock = threading.RLock()
        self._places: dict[str, int] = {}
        self._heard: dict[str, float] = {}
        self._news_at: dict[str, deque[float]] = {}  # the last MISSED of each
        self.silent: frozenset[str] = frozenset()
        self._doubted: list[int] = []  # places of those without news for a while
        self.at: dict[str, list[str]] = {}
        self._fingerprints: dict[str, str] = {}
        self._alike = ""  # all replicas' fingerprint, if they have one

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def update(
        self,
        said: Mapping[str, Mapping[str, Any] | None],
        fingerprints: Mapping[str, str] | None = None,
        ranks: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Updates all replicas by name. One on which no request has ended is assumed to have
        outputs as long as the others': otherwise it would seem to be free at once and get every
        request.

        Args:
            said: the latest snapshot of each (`Snapshot.as_dict`), or None.
            fingerprints: the system fingerprints of those that have said them.
            ranks: likewise, the replicas' numbers, from which their roles follow.

        Returns:
            Names of the replicas whose snapshots are new.
        """
        with self._lock:
            self._fingerprints = dict(fingerprints or {})
            for name in [name for name in self._places if name not in said]:
                self.lose(name)
            heard = {name: Snapshot(**numbers) for name, numbers in said.items() if numbers}
            outputs = [one.mean_output for one in heard.values() if one.mean_output] or [0.0]
            for name in said:
                if name not in self._places:
                    self._add(name)
            kinds = {self._fingerprints.get(name, "") for name in self._places}
            self._alike = kinds.pop() if len(kinds) == 1 else ""
            if any(self._roles):
                for name, rank in (ranks or {}).items():
                    role = Role.PROMPTS if rank < self._roles[0] else Role.DECODES
                    self._fleet.set_role(self._places[name], role)
            news = [name for name, one in heard.items() if one.time > self._heard.get(name, 0.0)]
            for name in news:
                one = heard[name]
                self._heard[name] = one.time
                length = one.mean_output or statistics.fmean(outputs)
                self._fleet.hear(self._places[name], replace(one, mean_output=length))
            self._listen(news, time.monotonic())
            return news

    def _listen(self, news: Sequence[str], now: float) -> None:
        """Notes who has news, and who had none for too long. A single piece of others' may be the
        first after a while in which nobody had any, or come a little earlier by chance."""
        if not news:
            return
        for name in news:
            self._news_at.setdefault(name, deque(maxlen=MISSED)).append(now)
        at = self._news_at
        often = max((each[0] for each in at.values() if len(each) == MISSED), default=-math.inf)
        late, old = min(often, now - SILENT_S), min(often, now - DOUBTED_S)
        self.silent = frozenset(name for name, each in at.items() if each[-1] < late)
        self._doubted = [self._places[name] for name, each in at.items() if each[-1] < old]
        for name in self.silent:
            self._fleet.lose(self._places[name])

    def choose(self, routing_request: RoutingRequest, now: float) -> str:
        """The replica for a request. now: seconds, on the snapshots' clock. Raises NoReplica if
        there is none."""
        with self._lock:
            unlike = self._unlike(routing_request)
            try:
                chosen = self._router.choose(routing_request, now, [*unlike, *self._doubted])
            except NoReplica:
                chosen = self._router.choose(routing_request, now, unlike)
            return self._name(chosen)

    def goes_on_at(self, here: str, routing_request: RoutingRequest, now: float) -> str | None:
        """The replica at which a request goes on behind its prompt, counted as sent there; None for
        where it is.

        Args:
            here: where that is.
            routing_request: the request, its tokens counted as a prompt.
            now: seconds, on the snapshots' clock.
        """
        with self._lock:
            if not self.moves or here not in self._places:
                return None
            at, unlike = self._places[here], self._unlike(routing_request)
            besides = [*unlike, *(place for place in self._doubted if place != at)]
            to = self._router.goes_on_at(at, routing_request, now, besides)
            if to == at:
                return None
            self._fleet.send(to, routing_request, now, moves=True)
            return self._name(to)

    def sends_ahead(self, here: str, routing_request: RoutingRequest, now: float) -> bool:
        """Whether what is cached of a request that moves is sent ahead of it. See
        `Moves.sends_ahead`.

        Args:
            here, routing_request, now: as in `goes_on_at`.
        """
        with self._lock:
            at = self._places.get(here)
            return at is not None and self._router.sends_ahead(at, routing_request, now)

    def behind(self, here: str, there: Sequence[Sent], now: float) -> list[tuple[int, str]]:
        """Which requests of a replica with news go on elsewhere, and where, since they would miss
        their targets: counted as sent there. See `Router.behind`."""
        with self._lock:
            if not self.moves or here not in self._places:
                return []
            begun = next((one.ask for one in there if one.ask.fingerprint), NOTHING)
            unlike = self._unlike(begun)  # all of them are of the same system
            besides = [*unlike, *self._doubted]
            found = self._router.behind(self._places[here], there, now, besides)
            return [(index, self._name(to)) for index, to in found]

    def goes_to(self, call: str, name: str) -> None:
        """Notes where a call is sent, unless it has ended meanwhile. call: as of `Where`."""
        if (at := self.at.get(call)) is not None:
            at[:] = [name]

    def sent(
        self, name: str, routing_request: RoutingRequest, now: float, *, moves: bool = False
    ) -> None:
        """Counts a request as sent to a replica.

        Args:
            name: the replica's.
            routing_request: the request.
            now: seconds, on the snapshots' clock.
            moves: whether its cache comes along.
        """
        with self._lock:
            if name in self._places:
                self._fleet.send(self._places[name], routing_request, now, moves=moves)

    def avoid(self, name: str) -> None:
        """Routes nothing to the replica until a new snapshot says that it takes requests."""
        with self._lock:
            if name in self._places:
                self._fleet.lose(self._places[name])

    def lose(self, name: str) -> None:
        """Forgets a replica that is gone."""
        with self._lock:
            place = self._places.pop(name, None)
            if place is not None:
                self._heard.pop(name, None)
                self._news_at.pop(name, None)
                self._fleet.forget(place)

    def _name(self, place: int) -> str:
        return next(name for name, known in self._places.items() if known == place)

    def _unlike(self, ask: RoutingRequest) -> list[int]:
        """Replicas that cannot go on with the request."""
        wanted, known = ask.fingerprint, self._fingerprints
        if wanted in ("", self._alike):
            return []
        return [at for name, at in self._places.items() if known.get(name) != wanted]

    def _add(self, name: str) -> None:
        if len(self._places) == len(self._fleet):
            self._fleet.grow(len(self._fleet))
        place = min({*range(len(self._fleet))} - {*self._places.values()})
        self._places[name] = place
        self._fleet.find(place)
