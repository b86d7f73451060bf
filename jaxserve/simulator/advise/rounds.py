"""Successive halving: all policies on one seed, the best few on more, the best of these on all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.simulator.advise.margins import ATTAINMENT, DEFAULT, margin, plainness, score
from jaxserve.simulator.simulate.runs import REFUSED, Outcome, Run, Source
from jaxserve.simulator.simulate.sweep import Point, sweep
from jaxserve.simulator.simulate.workers import Workers
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.workloads.specs import WorkloadSpec

SEVERAL, MORE = 6, 3  # policies in the second round, and in the last
SEEDS = 3  # in the second round
FACTORS = (0.8, 1.25)  # multiples of the traffic's rate


@dataclass(frozen=True)
class Advice:
    """The policy to take for some traffic, and how the others compare.

    Attributes:
        best: The policy to take: the plainest of `equal` in the last round.
        points: All policies: the last round's, then the second's, then the rest with one seed; the
        best first in each part.
        equal: The policies that do not differ significantly from the one with the highest score,
        including that one.
        elsewhere: The last round's policies at lower and higher rates, by rate in requests/s; empty
        if the traffic has none.
        refused: Why the others cannot serve the traffic, one line each.
    """

    best: Point
    points: list[Point]
    equal: list[Point]
    elsewhere: dict[float, list[Point]]
    refused: list[str]


def advise(runs: Sequence[Run], seeds: int, workers: Workers) -> Advice:
    """Compares the policies by successive halving.

    Args:
        runs: One per policy, with the first seed.
        seeds: Number of seeds in the last round.
        workers: Run the simulations.

    Raises:
        runs.REFUSED: No run is possible.
    """
    drawn = runs[0].workload.drawn()
    refused: list[str] = []
    points: list[Point] = []
    for run, found in zip(runs, workers.each(_attempt, runs), strict=True):
        if isinstance(found, str):
            refused.append(_named(run.policy, found))
        else:
            points.append(Point(run, (found,), drawn or found.seed_read))
    if not points:
        raise SimulationError(refused[0])
    several, rest = _cut(points, SEVERAL)
    several = _with(several, min(SEEDS, seeds), workers)
    last, out = _cut(several, MORE)
    last = _with(last, seeds, workers)
    best = min(equals(last), key=lambda point: plainness(point.run.policy))
    ranked = [point for part in (last, out, rest) for point in sorted(part, key=_worst_last)]
    equal = equals(last, ranked)
    elsewhere = _elsewhere([point.run for point in last], workers)
    return Advice(best, ranked, equal, elsewhere, refused)


def _attempt(
    run: Run, progress: Callable[[float], None] | None, compiling: Callable[[], None] | None
) -> Outcome | str:
    """The run's outcome, or in one line why there is none."""
    try:
        return run.outcome(progress, compiling)
    except REFUSED as error:
        return str(error)


def equals(points: Sequence[Point], among: Sequence[Point] | None = None) -> list[Point]:
    """The points of `among`, by default all, that do not differ significantly from the best
    point."""
    first = max(points, key=score)
    return [one for one in among or points if one is first or not margin(first, one).matters]


def _cut(points: Sequence[Point], count: int) -> tuple[list[Point], list[Point]]:
    """The best `count` points, and the others. Among points with about the same attainment the
    plainest stay; the server's default always stays, to compare with."""
    first = max(points, key=score)

    def order(point: Point) -> tuple[bool, int, tuple[bool, bool, int, str]]:
        kept = point is first or point.run.policy == DEFAULT
        steps = round((score(first)[0] - score(point)[0]) / ATTAINMENT)
        return not kept, steps, plainness(point.run.policy)

    found = sorted(points, key=order)
    return found[:count], found[count:]


def _worst_last(point: Point) -> tuple[float, float, tuple[bool, bool, int, str]]:
    attainment, goodput = score(point)
    return -attainment, -goodput, plainness(point.run.policy)


def _with(points: Sequence[Point], seeds: int, workers: Workers) -> list[Point]:
    """The points with `seeds` seeds in total, if seeds matter."""
    short = [one for one in points if one.seed_matters and len(one.outcomes) < seeds]
    if not short:
        return list(points)
    have = len(short[0].outcomes)
    again = [dataclasses.replace(one.run, seed=one.run.seed + have) for one in short]
    more = {point.run.policy: point.outcomes for point in sweep(again, seeds - have, workers)}
    return [
        dataclasses.replace(one, outcomes=one.outcomes + more.get(one.run.policy, ()))
        for one in points
    ]


def _elsewhere(runs: Sequence[Run], workers: Workers) -> dict[float, list[Point]]:
    """The runs at other rates, with the first seed, by rate."""
    found = {}
    for factor in FACTORS:
        source = _at(runs[0].workload, factor)
        if source is not None and source.rate is not None:
            changed = [dataclasses.replace(run, workload=source) for run in runs]
            found[source.rate] = sweep(changed, 1, workers)
    return found


def _at(source: Source, factor: float) -> Source | None:
    """The traffic at `factor` times its rate; None if all of it comes at once, or programs begin as
    others end."""
    if isinstance(source, WorkloadSpec):
        if source.programs is not None:
            return None
        rate = source.rate or _rate(source)
        return None if rate is None else dataclasses.replace(source, rate=_short(rate * factor))
    own = _rate(source)
    if own is None:
        return None
    rate = _short(own * factor)
    return dataclasses.replace(source, workload=source.workload.at_rate(rate), rate=rate)


def _rate(source: Source) -> float | None:
    """Requests/s of the trace itself; None if all requests come at once."""
    arrival = source.make_workload(0).arrival
    return float((len(arrival) - 1) / arrival[-1]) if len(arrival) > 1 and arrival[-1] else None


def _short(rate: float) -> float:
    return float(f"{rate:.4g}")


def _named(policy: str, problem: str) -> str:
    return problem if problem.startswith(f"policy {policy}") else f"{policy}: {problem}"
