"""The smallest number of replicas that meets a goal, by simulating several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.sched.cost.cost_model import Coefficients
from jaxserve.sched.cost.profiles import System
from jaxserve.simulator.simulate.runs import Run
from jaxserve.simulator.simulate.sweep import Point, sweep
from jaxserve.simulator.simulate.workers import Workers


@dataclass(frozen=True)
class Goal:
    """What is enough.

    Attributes:
        share: Share of the requests with targets that attain all of theirs.
        ttft_p99, tbt_p99: Most that the 99th percentiles over all requests and all times between
            tokens may be, in seconds; None for any.
    """

    share: float
    ttft_p99: float | None = None
    tbt_p99: float | None = None

    @property
    def asks_p99(self) -> bool:
        """Whether there is a limit beside the share."""
        return self.ttft_p99 is not None or self.tbt_p99 is not None

    def problem(self, point: Point) -> str:
        """What is missing, in words; "" if nothing is."""
        mean = point.mean
        share = mean["slo_attainment"]
        if share is not None and share < self.share:
            return f"{share:.1%} within their targets"
        for name, most in (("ttft", self.ttft_p99), ("tbt", self.tbt_p99)):
            if most is None:
                continue
            found = (mean[f"{name}_ms"] or {}).get("p99")
            if found is None:
                return f"no {name.upper()}, since nobody was served"
            if found > 1e3 * most:
                return f"a P99 {name.upper()} of {found:.0f} ms"
        return ""


@dataclass(frozen=True)
class Size:
    """How many replicas are needed.

    Attributes:
        replicas: The smallest number that meets the goal; None if the most that were tried do not.
        tried: A point for each number of replicas tried, ascending.
    """

    replicas: int | None
    tried: tuple[Point, ...]

    @property
    def points(self) -> dict[int, Point]:
        """By number of replicas."""
        return {point.run.replicas: point for point in self.tried}


def size(run: Run, goal: Goal, most: int, seeds: int, workers: Workers) -> Size:
    """Doubles the replicas until they meet the goal, then halves the interval.

    Args:
        run: The first run, whatever its replicas.
        goal: What is enough.
        most: Most replicas to try.
        seeds: Runs of each.
        workers: Run the simulations.

    Raises:
        runs.REFUSED: A run is impossible.
    """
    found = dict[int, Point]()

    def enough(replicas: int) -> bool:
        if replicas not in found:
            one = dataclasses.replace(run, replicas=replicas)
            found[replicas] = sweep([one], seeds, workers)[0]
        return not goal.problem(found[replicas])

    high = _first(enough, most)
    low = high // 2 if high else most
    while high and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return Size(high or None, tuple(found[n] for n in sorted(found)))


def _first(enough: Callable[[int], bool], most: int) -> int:
    """The first power of 2, or `most`, that is enough; 0 if none is."""
    replicas = 1
    while not enough(replicas):
        if replicas == most:
            return 0
        replicas = min(2 * replicas, most)
    return replicas


def slower(system: System, factor: float) -> System:
    """The system with steps that take `factor` times as long."""
    model = system.cost_model
    values = {name: value * factor for name, value in model.coefficients.as_dict().items()}
    slow = dataclasses.replace(model, coefficients=Coefficients(**values))
    return dataclasses.replace(system, cost_model=slow)


def within(sizes: Sequence[Size]) -> tuple[int | None, int | None]:
    """The smallest and the largest of these sizes; None for more than were tried."""
    numbers = [one.replicas for one in sizes]
    least = min((n for n in numbers if n is not None), default=None)
    return least, None if None in numbers else max(n for n in numbers if n is not None)
