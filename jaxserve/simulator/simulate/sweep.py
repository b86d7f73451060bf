"""Every policy at every rate, with several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.simulator.simulate.runs import Outcome, Run
from jaxserve.simulator.simulate.spread import half_width, mean, ratios
from jaxserve.simulator.simulate.workers import Workers

OUTLAST = 5  # least time of arrivals, as a multiple of the longest target


@dataclass(frozen=True)
class Point:
    """A policy at a rate.

    Attributes:
        run: The run with the first seed.
        outcomes: One per seed, in order; only one if the seed does not matter.
        seed_matters: Whether the workload or the policy draws random numbers.
    """

    run: Run
    outcomes: tuple[Outcome, ...]
    seed_matters: bool

    @property
    def named(self) -> dict[str, Any]:
        """Policy, rate, system and so on, ready for JSON."""
        return {
            "policy": self.run.policy,
            "rate": self.run.rate,
            "system": self.run.system_name,
            "workload": self.run.workload.lengths,
            "rules": self.run.rules,
            "prefix_caching": self.run.prefix_caching,
            "replicas": self.run.replicas,
            "routing": self.run.routing.name,
            "kv_tokens": self.outcomes[0].kv_tokens,
        }

    @property
    def seeds(self) -> range:
        """The seeds of the outcomes."""
        return range(self.run.seed, self.run.seed + len(self.outcomes))

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The numbers of each seed."""
        return [outcome.numbers for outcome in self.outcomes]

    @property
    def mean(self) -> dict[str, Any]:
        """The numbers' means over the seeds."""
        return self.numbers[0] if len(self.outcomes) == 1 else mean(self.numbers)

    @property
    def half_width(self) -> dict[str, Any]:
        """Half-widths of the 95% intervals; None for each number if there is one seed."""
        return half_width(self.numbers)

    @property
    def short(self) -> str:
        """Why the run is too short to detect an overload, in words; "" if it is not."""
        lasts = min(outcome.lasts for outcome in self.outcomes)
        count = self.numbers[0]["num_requests"]
        if not 0 < lasts < OUTLAST:  # 0: all at once, which is not a lasting load
            return ""
        more = math.ceil(OUTLAST / lasts * count)
        return (
            f"they come for {lasts:.2g} times the longest target, too short for an overload to "
            f"make them miss it; {more} (--num_requests) would come for {OUTLAST} times"
        )

    def as_json(self) -> dict[str, Any]:
        """The numbers of the point, and those of each run."""
        return {
            **self.named,
            "seed_matters": self.seed_matters,
            "mean": self.mean,
            "half_width": self.half_width,
            "runs": _by_seed(self.seeds, self.numbers),
        }


@dataclass(frozen=True)
class Ratios:
    """The numbers of one policy over those of another, seed by seed on the same requests.

    Attributes:
        policy: The policy of the numerator.
        to: The policy of the denominator.
        rate: Rate of both, requests/s.
        seeds: The compared seeds.
        values: The ratios, by number, for each seed.
    """

    policy: str
    to: str
    rate: float | None
    seeds: range
    values: list[dict[str, Any]]

    @classmethod
    def between(cls, point: Point, base: Point) -> Ratios:
        """The ratios of two points. A point whose seed does not matter is compared with every seed
        of the other."""
        longer = max(point, base, key=lambda one: len(one.outcomes))
        count = len(longer.outcomes)
        ours, theirs = (one.numbers * (count // len(one.outcomes)) for one in (point, base))
        values = ratios(ours, theirs)
        return cls(point.run.policy, base.run.policy, point.run.rate, longer.seeds, values)

    def as_json(self) -> dict[str, Any]:
        """The mean ratios, and those of each seed."""
        return {
            "policy": self.policy,
            "to": self.to,
            "rate": self.rate,
            "mean": mean(self.values),
            "half_width": half_width(self.values),
            "runs": _by_seed(self.seeds, self.values),
        }


def _by_seed(seeds: range, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"seed": seed, **numbers} for seed, numbers in zip(seeds, values, strict=True)]


def sweep(runs: Sequence[Run], seeds: int, workers: Workers) -> list[Point]:
    """Simulates each run with several seeds, or once if the seed changes nothing.

    Args:
        runs: Each with the first seed; the same workload at different rates. Only the first seed's
            outcome keeps its result.
        seeds: Number of seeds, counted up from the first.
        workers: Run the simulations.

    Raises:
        runs.REFUSED: A run is impossible.
    """
    drawn = runs[0].workload.drawn()
    found = _outcomes([_seeded(run, range(seeds if drawn else 1)) for run in runs], workers)
    matters = [drawn or first[0].seed_read for first in found]
    if not drawn:
        again = range(1, seeds)
        more = _outcomes(
            [
                _seeded(run, again if lots else range(0))
                for run, lots in zip(runs, matters, strict=True)
            ],
            workers,
        )
        found = [first + others for first, others in zip(found, more, strict=True)]
    return [
        Point(run, tuple(outcomes), seed_matters)
        for run, outcomes, seed_matters in zip(runs, found, matters, strict=True)
    ]


def paired(points: Sequence[Point]) -> list[Ratios]:
    """Each point's numbers over those of the first policy at the same rate."""
    first = points[0].run.policy
    base = {point.run.rate: point for point in points if point.run.policy == first}
    others = [point for point in points if point.run.policy != first]
    return [Ratios.between(point, base[point.run.rate]) for point in others]


def _seeded(run: Run, which: range) -> list[Run]:
    return [replace(run, seed=run.seed + i, keep=run.keep and not i) for i in which]


def _outcomes(groups: Sequence[Sequence[Run]], workers: Workers) -> list[list[Outcome]]:
    """The outcomes by group; all runs of all groups are done in parallel."""
    found = iter(workers.outcomes([run for group in groups for run in group]))
    return [[next(found) for _ in group] for group in groups]
