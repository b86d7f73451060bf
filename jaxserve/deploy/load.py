"""The number of replicas that a deployment should have, given the load of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LATE = 0.5  # share of a TTFT target above which the wait is too long
ATTAINED = 0.95  # share of a class's requests that must meet their targets
QUEUED = 0.25  # waiting requests, as a share of those served at once
EARLY = 0.1  # share of a TTFT target below which there may be fewer replicas
ROOM = 0.6  # share of the others' capacity that the removed one's requests may fill
ENOUGH = 10  # least requests of a class for its share to count
MOST = 2.0  # most growth at once
_ENDED, _MET = "ended:", "met:"


@dataclass(frozen=True)
class Load:
    """Load of one replica.

    Attributes:
        wait_share: expected wait for the first token of a real-time request that comes now, divided
            by the usual TTFT target; 0 if requests have no such target.
        busy: share of its rows or of its KV blocks in use, whichever is larger.
        waiting: queued requests, divided by the number of rows.
        ended: requests with targets that ended lately, by SLO class.
        met: those of them that met their targets, by SLO class.
    """

    wait_share: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0
    ended: Mapping[str, int] = field(default_factory=dict)
    met: Mapping[str, int] = field(default_factory=dict)

    def as_metrics(self) -> dict[str, float]:
        """The load as flat metrics, by name."""
        plain = {"wait_share": self.wait_share, "busy": self.busy, "waiting": self.waiting}
        counts = {f"{_ENDED}{name}": count for name, count in self.ended.items()}
        return {**plain, **counts, **{f"{_MET}{name}": count for name, count in self.met.items()}}

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> Load:
        """The inverse of `as_metrics`, also for averages of such metrics."""

        def named(prefix: str) -> dict[str, float]:
            return {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}

        plain = {name: metrics.get(name, 0.0) for name in ("wait_share", "busy", "waiting")}
        return cls(**plain, ended=named(_ENDED), met=named(_MET))  # type: ignore[arg-type]


def attainment(loads: Sequence[Load]) -> dict[str, float]:
    """Share of requests that met their targets over all replicas, by SLO class. Classes with fewer
    than ENOUGH requests are left out."""
    ended: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for load in loads:
        ended.update(load.ended)
        met.update(load.met)
    return {name: met[name] / count for name, count in ended.items() if count >= ENOUGH}


def wanted_replicas(loads: Sequence[Load], now: int) -> int:
    """How many replicas there should be, given that there are `now`. loads: of the replicas that
    have reported.

    More are wanted if the expected wait exceeds LATE of the TTFT target, requests queue, or a class
        misses its targets while most rows are in use: in proportion, at most MOST times as many.
        One fewer is wanted if no request waits and the others have room for its requests.
    """
    if not loads:
        return now
    count = len(loads)
    wait = sum(load.wait_share for load in loads) / count
    queued = sum(load.waiting for load in loads) / count
    busy = sum(load.busy for load in loads)
    worst = min(attainment(loads).values(), default=1.0)
    missed = worst < ATTAINED and busy > ROOM * count
    pressure = max(wait / LATE, queued / QUEUED)
    if pressure > 1.0 or missed:
        return max(now + 1, math.ceil(now * min(pressure, MOST)))
    if now > 1 and count == now and wait < EARLY and not queued and busy < ROOM * (now - 1):
        return now - 1
    return now
