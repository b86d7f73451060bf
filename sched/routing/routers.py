"""The routing algorithms, by name.

A router decides only from its own `Fleet`: there is no lock and no shared state. If one router is
too slow, several use disjoint samples of the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.routing.behind import Behind, Sent
from jaxserve.sched.routing.estimate import violation
from jaxserve.sched.routing.fleet import Fleet, RoutingRequest
from jaxserve.sched.routing.moves import Link, Moves
from jaxserve.sched.routing.random_draws import below, drawn, seeded

BOUND = 1.25  # multiple of the mean load from which prefixes do not count
HINT = 0.02  # targets that may be lost to follow a hint
TOGETHER = 0.25  # likewise, to keep a program on the replica that knows its deadline


class NoReplica(LookupError):
    """No replica takes requests."""


@dataclass
class Lots:
    """State of a router.

    Attributes:
        turn: The replica after the last one chosen in turn; None to begin at random.
        state: State of the random draws.
        ties: State of the draws between equally good replicas; 0 for the first of them.
    """

    turn: int | None
    state: int
    ties: int = 0

    def least(self, values: np.ndarray) -> int:
        """The replica with the lowest value, chosen at random among equals."""
        if not self.ties:
            return int(values.argmin())
        least = (values == values.min()).nonzero()[0]
        self.ties = drawn(self.ties)
        return int(least[below(self.ties, len(least))])


Choose = Callable[[Fleet, np.ndarray, Lots, RoutingRequest, float], int]


@dataclass(frozen=True)
class Way:
    """A routing algorithm.

    Attributes:
        summary: One line for listings.
        source: Its origin.
        choose: Picks a replica, given the fleet, which replicas are up (bool, at least one), the
        router's state, the request and the time.
        looks: Whether it uses snapshots.
        finds: Whether it uses `Fleet.prefixes`.
        draws: Whether it uses random numbers.
    """

    summary: str
    source: str
    choose: Choose
    looks: bool = True
    finds: bool = False
    draws: bool = False


def _round_robin(fleet: Fleet, up: np.ndarray, lots: Lots, ask: RoutingRequest, now: float) -> int:
    there = up.nonzero()[0]
    turn = int(there[below(lots.state, len(there))]) if lots.turn is None else lots.turn
    chosen = int(there[there.searchsorted(turn) % len(there)])
    lots.turn = (chosen + 1) % len(up)
    return chosen


def _least_loaded(fleet: Fleet, up: np.ndarray, lots: Lots, ask: RoutingRequest, now: float) -> int:
    return lots.least(np.where(up, fleet.columns.unfinished, np.inf))


def _two_choices(fleet: Fleet, up: np.ndarray, lots: Lots, ask: RoutingRequest, now: float) -> int:
    there = up.nonzero()[0]
    lots.state = drawn(lots.state)
    one = below(lots.state, len(there))
    if len(there) == 1:
        return int(there[0])
    lots.state = drawn(lots.state)
    other = below(lots.state, len(there) - 1)
    first, second = int(there[one]), int(there[other + (other >= one)])
    unfinished = fleet.columns.unfinished
    return second if unfinished[second] < unfinished[first] else first


def _slo(fleet: Fleet, up: np.ndarray, lots: Lots, ask: RoutingRequest, now: float) -> int:
    s, ask = fleet.columns, fleet.in_program(ask, now)
    work, short = s.best_effort_work, s.best_effort_short
    if ask.tier == 0:
        work, short = s.realtime_work, s.realtime_short
    value = np.where(up, violation(s, work, short, ask, fleet.found(ask), now), np.inf)
    hinted = _hinted(fleet, ask)
    if hinted is not None:
        value[hinted] -= TOGETHER if ask.of_program else HINT
    return lots.least(value)


def _prefix_affinity(
    fleet: Fleet, up: np.ndarray, lots: Lots, ask: RoutingRequest, now: float
) -> int:
    load = np.where(up, fleet.columns.unfinished, np.inf)
    allowed = load <= BOUND * (load[up].mean() + 1.0)
    hinted = _hinted(fleet, ask)
    if hinted is not None and allowed[hinted]:
        return hinted
    found = np.where(allowed, fleet.found(ask), -1.0)
    return lots.least(np.where(found == found.max(), load, np.inf))


def _hinted(fleet: Fleet, ask: RoutingRequest) -> int | None:
    return None if fleet.prefixes is None else fleet.prefixes.hinted(ask.hint)


ROUTERS: dict[str, Way] = {
    "round_robin": Way("in turn", "Ray Serve and NGINX", _round_robin, looks=False),
    "least_loaded": Way(
        "the fewest unfinished requests", "join the shortest queue (Winston 1977)", _least_loaded
    ),
    "two_choices": Way(
        "the less loaded of two drawn ones",
        "power of two choices (Mitzenmacher, TPDS 12(10), 2001); Ray Serve's own",
        _two_choices,
        draws=True,
    ),
    "slo": Way("the least predicted SLO violation", "ours", _slo, finds=True),
    "prefix_affinity": Way(
        "the longest prefix found, of those not much more loaded than the mean",
        "SGLang's router; consistent hashing with bounded loads (Mirrokni et al., SODA 2018)",
        _prefix_affinity,
        finds=True,
    ),
}


class Router:
    """Chooses a replica for each request of one stream.

    Args:
        name: A name in ROUTERS.
        fleet: The replicas.
        seed: For random draws, at least 0.
        number: Its number among the routers that share the seed, at least 0.
        apart: Whether other routers send to the same replicas without knowing of this one. If all
            of them took the first of equally good replicas, that one would get everything.
        link: What lies between replicas, if requests move between them behind their prompts.

    Raises:
        ValueError: There is no such routing.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        seed: int = 0,
        number: int = 0,
        *,
        apart: bool = False,
        link: Link | None = None,
    ) -> None:
        if name not in ROUTERS:
            raise ValueError(f"there is no routing {name!r}; known: {', '.join(ROUTERS)}")
        self.way, self.fleet = ROUTERS[name], fleet
        self._moves = self._behind = None
        if link is not None:
            self._moves = Moves(fleet, link)
            self._behind = Behind(fleet, link, self._moves)
        if self.way.finds:
            fleet.watch_prefixes()
        state = seeded(seed, number)
        self._lots = Lots(None, state, drawn(state)) if apart else Lots(0, state)

    def choose(self, ask: RoutingRequest, now: float, besides: Sequence[int] = ()) -> int:
        """The replica to send the request to; the caller then calls `Fleet.send`.

        Args:
            ask: The request.
            now: On the snapshots' clock.
            besides: Replicas that cannot serve it.

        Raises:
            NoReplica: None is up that can.
        """
        up = self._up(besides)
        if not up.any():
            raise NoReplica("no replica takes requests")
        if self._moves is not None:
            at = self._moves.begins_at(up, ask, now)
        else:
            at = self.way.choose(self.fleet, up, self._lots, ask, now)
        # If none is of any use to a target of nearly no time, all are alike.
        return at if up[at] else int(up.argmax())

    def goes_on_at(
        self, here: int, ask: RoutingRequest, now: float, besides: Sequence[int] = ()
    ) -> int:
        """The replica at which a request goes on after its first token; the caller then calls
        `Fleet.send`. Only with a link.

        Args:
            here: Where it is.
            ask: The request, all of its tokens counted as a prompt.
            now: On the snapshots' clock.
            besides: Replicas that cannot go on with it.
        """
        assert self._moves is not None
        up = self._up(besides)
        to = self._moves.goes_on_at(up, here, ask, now)
        return to if up[to] else here

    def sends_ahead(self, here: int, ask: RoutingRequest, now: float) -> bool:
        """See `Moves.sends_ahead`. Only with a link."""
        assert self._moves is not None
        return self._moves.sends_ahead(here, ask, now)

    def behind(
        self, here: int, there: Sequence[Sent], now: float, besides: Sequence[int] = ()
    ) -> list[tuple[int, int]]:
        """Which requests leave a replica of which a snapshot has just been heard, since their
        targets would be missed there and are made elsewhere; they are noted in the fleet already.
        None without a link.

        Args:
            here: The replica.
            there: The requests that this router has sent there, and that have not ended.
            now: On the snapshots' clock.
            besides: Replicas that cannot go on with them.

        Returns:
            Indices of `there`, each with the replica to which the request goes: with its cache if
            it has begun.
        """
        if self._behind is None or not there:
            return []
        return self._behind.leave(self._up(besides), here, there, now)

    def _up(self, besides: Sequence[int]) -> np.ndarray:
        """Which replicas get requests, but for these, bool [replicas]."""
        up = self.fleet.up
        if besides:
            up[list(besides)] = False
        return up
