"""Each policy's capacity: the highest rate at which enough of the requests attain their SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxserve.simulator.capacity import FINE, Crossing, sustained
from jaxserve.simulator.simulate.runs import Run, check_targets
from jaxserve.simulator.simulate.sweep import Point, sweep
from jaxserve.simulator.simulate.workers import Workers
from jaxserve.simulator.workloads.specs import WorkloadSpec


@dataclass
class Search:
    """The search for one policy's capacity.

    Attributes:
        run: The policy at the initial rate.
        level: Share of the requests that must attain their SLO.
        tried: Points so far, by their index in the grid of rates.
    """

    run: Run
    level: float
    tried: dict[int, Point] = field(default_factory=dict)

    def wanted(self) -> list[int]:
        """Grid indices to try next; none when the search is over."""
        assert self.run.rate is not None
        start = FINE.nearest(self.run.rate)
        _, missing = FINE.tried(self._attainments().get, start, (self.level,))
        return missing

    def at(self, index: int) -> Run:
        """The run at that grid index's rate."""
        workload = self.run.workload
        assert isinstance(workload, WorkloadSpec)  # recorded ones have one rate
        return replace(self.run, workload=replace(workload, rate=FINE.rate(index)))

    def capacity(self) -> Crossing:
        """The capacity once the search is over: a rate, or the last rate tried as a bound; "?" if
        the run there is too short to tell."""
        found = self._crossing()
        return Crossing(found.rate, found.bound or ("?" if self.point().short else ""))

    def point(self) -> Point:
        """The point at the rate of `capacity`."""
        rate = self._crossing().rate
        return next(point for point in self.tried.values() if point.run.rate == rate)

    def points(self) -> list[Point]:
        """All points tried, by ascending rate."""
        return [self.tried[index] for index in sorted(self.tried)]

    def problem(self) -> str:
        """Why there is no capacity, in one line; "" if there is one."""
        found = self.capacity()
        share = self.point().mean["slo_attainment"]
        short = f"; {self.point().short}" if self.point().short else ""
        begin = f"{self.run.policy}: at {found.rate:g} requests/s, the"
        attain = f"rate tried, {share:.1%} of those with targets attain their SLO"
        if found.bound == "<":
            return f"{begin} lowest {attain}, less than --attainment={self.level:g}"
        if found.bound == ">":
            return (
                f"{begin} highest {attain}, no less than --attainment={self.level:g}; more of them "
                "(--num_requests) or tighter targets show where that ends" + short
            )
        if short:
            return (
                f"{self.run.policy}: at {found.rate:g} requests/s it cannot be told whether they "
                f"attain their SLO{short}"
            )
        return ""

    def _crossing(self) -> Crossing:
        found = self._attainments().items()
        return sustained({FINE.rate(index): share for index, share in found}, self.level)

    def _attainments(self) -> dict[int, float]:
        return {index: p.mean["slo_attainment"] for index, p in self.tried.items()}


def search(runs: Sequence[Run], level: float, seeds: int, workers: Workers) -> list[Search]:
    """Searches for the capacity of every policy, all at once.

    Args:
        runs: One per policy, all of the same workload at the initial rate.
        level: Share of the requests that must attain their SLO, averaged over the seeds.
        seeds: Number of seeds.
        workers: Run the simulations.

    Raises:
        ValueError: No request has a target.
        runs.REFUSED: A run is impossible.
    """
    searches = [Search(run, level) for run in runs]
    check_targets(runs[0], "--find=capacity needs a target")
    while ahead := [(one, index) for one in searches for index in one.wanted()]:
        points = sweep([one.at(index) for one, index in ahead], seeds, workers)
        for (one, index), point in zip(ahead, points, strict=True):
            one.tried[index] = point
    return searches
