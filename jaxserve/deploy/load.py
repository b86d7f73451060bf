"""How many replicas there should be, from what each says of itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LATE = 0.5  # of a TTFT target, from where waiting for it is too long
ATTAINED = 0.95  # of a class's requests that must meet their targets
QUEUED = 0.25  # waiting requests, of those that a replica serves at once
EARLY = 0.1  # of a TTFT target, up to where there may be fewer replicas
ROOM = 0.6  # of what the others serve at once, that those of the one that goes may make it
ENOUGH = 10  # requests of a class, with fewer of which its share says nothing
MOST = 2.0  # times as many replicas, at once
_ENDED, _MET = "ended:", "met:"


@dataclass(frozen=True)
class Load:
    """Of one replica. wait_share: what a real-time request that comes now is expected to wait for
    its first token, of the TTFT target that requests usually have; 0 where none have one. busy: of
    the rows or blocks that it has, whichever is more. waiting: requests without a row, of those
    that it serves at once. ended, met: by SLO class, requests with targets that ended lately, and
    of those the ones that met them.
    """

    wait_share: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0
    ended: Mapping[str, int] = field(default_factory=dict)
    met: Mapping[str, int] = field(default_factory=dict)

    def as_metrics(self) -> dict[str, float]:
        """By name."""
        plain = {"wait_share": self.wait_share, "busy": self.busy, "waiting": self.waiting}
        counts = {f"{_ENDED}{name}": count for name, count in self.ended.items()}
        return {**plain, **counts, **{f"{_MET}{name}": count for name, count in self.met.items()}}

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> Load:
        """What `as_metrics` gave, or means of it over time."""

        def named(prefix: str) -> dict[str, float]:
            return {
                name.removeprefix(prefix): value
                for name, value in metrics.items()
                if name.startswith(prefix)
            }

        plain = {name: metrics.get(name, 0.0) for name in ("wait_share", "busy", "waiting")}
        return cls(**plain, ended=named(_ENDED), met=named(_MET))  # type: ignore[arg-type]


def attainment(loads: Sequence[Load]) -> dict[str, float]:
    """By SLO class, the share of requests that met their targets, over all replicas; without those
    of which too few have ended."""
    ended: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for load in loads:
        ended.update(load.ended)
        met.update(load.met)
    return {name: met[name] / count for name, count in ended.items() if count >= ENOUGH}


def wanted_replicas(loads: Sequence[Load], now: int) -> int:
    """How many replicas there should be, of which there are `now`; loads: of those that say.

    More, where the expected wait takes more than LATE of the TTFT target, requests queue, or a
    class misses its targets while the rows are mostly taken: in proportion, at most MOST times as
    many. One fewer, where nobody waits and the others have room for what runs there.
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
