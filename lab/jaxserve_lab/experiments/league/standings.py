"""Who is how good where: means over seeds, and what they are of the best policy's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from jaxserve.simulator.simulate.spread import mean
from jaxserve_lab.experiments.league.collect import LOADS, Found
from jaxserve_lab.experiments.league.runs import LASTING, LeagueNumbers
from jaxserve_lab.experiments.league.workloads import WORKLOADS


def label(policy: str) -> str:
    """What a page calls the policy: its name, without the folder of its file."""
    return policy.rpartition("/")[2]


class Point(NamedTuple):
    """A system, workload and load, on which all policies serve the same requests.

    Attributes:
        system, workload: By name.
        load: A name in LOADS, or LASTING.
    """

    system: str
    workload: str
    load: str

    @property
    def kind(self) -> str:
        """The workload's group."""
        return WORKLOADS[self.workload].kind


class Standings:
    """Compares the policies of a league, point by point.

    Args:
        found: The league's numbers.
        entrants: The policies to compare.
        own: The user's own policies, compared with the entrants.
        rule: What is compared, a name in `LeagueNumbers`: goodput is by the papers' rule, with_gap
            by that of a server's verdicts.
    """

    def __init__(
        self,
        found: Found,
        entrants: Sequence[str],
        own: Sequence[str] = (),
        rule: str = "goodput",
    ) -> None:
        self.found, self.entrants, self.own = found, list(entrants), list(own)
        self.rule = rule
        self._seeds: dict[tuple[Point, str], list[LeagueNumbers]] = {}
        for case, numbers in found.runs.items():
            point = Point(case.system, case.workload, case.load)
            self._seeds.setdefault((point, case.policy), []).append(numbers)
        self.points = list(dict.fromkeys(point for point, _ in self._seeds))
        self._best = {
            point: max(self.mean(point, policy, rule) for policy in self.entrants)
            for point in self.points
        }

    @property
    def policies(self) -> list[str]:
        """All policies: the user's own, then the entrants from best to worst."""
        order = sorted(self.entrants, key=lambda name: (-self.share(name), name))
        return [*self.own, *order]

    @property
    def loads(self) -> list[str]:
        """Those that it has, the lightest first."""
        there = {point.load for point in self.points}
        return [load for load in (*LOADS, LASTING) if load in there]

    def ruled(self, rule: str) -> Standings:
        """The same league by another rule."""
        return Standings(self.found, self.entrants, self.own, rule)

    def against_others(self, policy: str) -> Standings:
        """The same league, where an entrant is compared with all others."""
        others = [name for name in self.entrants if name != policy]
        return Standings(self.found, others, [policy], self.rule)

    def number(self, point: Point, policy: str, name: str) -> float | None:
        """A number of `LeagueNumbers` at the point, mean over seeds; None if the policy has
        none."""
        some: Any = mean([getattr(numbers, name) for numbers in self._seeds[point, policy]])
        return None if some is None else float(some)

    def mean(self, point: Point, policy: str, name: str) -> float:
        """Like `number`; ValueError if there is none."""
        found = self.number(point, policy, name)
        if found is None:
            raise ValueError(f"{policy} has no {name} at {point}")
        return found

    def relative(self, point: Point, policy: str) -> float:
        """The policy's goodput over that of the best entrant; 1 if no entrant has any."""
        best = self._best[point]
        return self.mean(point, policy, self.rule) / best if best else 1.0

    def where(self, **given: str) -> list[Point]:
        """The points with that system, workload, load or kind."""
        wanted = given.items()
        return [p for p in self.points if all(getattr(p, k) == v for k, v in wanted)]

    def share(self, policy: str, points: Iterable[Point] | None = None) -> float:
        """The mean of `relative` over some points, by default all."""
        chosen = self.points if points is None else points
        return fmean(self.relative(point, policy) for point in chosen)

    def worst(self, policy: str, points: Sequence[Point] | None = None) -> Point:
        """Of some points, by default all, the one where the policy is furthest behind the best."""
        chosen = self.points if points is None else points
        return min(chosen, key=lambda point: self.relative(point, policy))

    def ranked(self, points: Sequence[Point]) -> list[str]:
        """The entrants by their share over these points, the best first."""
        return sorted(self.entrants, key=lambda name: (-self.share(name, points), name))

    def typical(self, policy: str, points: Sequence[Point], name: str) -> float | None:
        """The median over points of a number's means; None if no point has one."""
        values = self.numbers(policy, points, name)
        return median(values) if values else None

    def numbers(self, policy: str, points: Sequence[Point], name: str) -> list[float]:
        """A number's means at those of the points that have it."""
        found = [self.number(point, policy, name) for point in points]
        return [one for one in found if one is not None]

    def gap(self, policy: str) -> float | None:
        """How much longer the policy takes than the optimum, as a share, mean over the cut-down
        workloads with a proven optimum; None if there are none, or it cannot serve one of them."""
        ratios = []
        for cut in self.found.cuts.values():
            took = cut.latencies[policy]
            if cut.optimum.proven:
                if took is None:
                    return None
                ratios.append(took / cut.optimum.latency - 1)
        return fmean(ratios) if ratios else None
