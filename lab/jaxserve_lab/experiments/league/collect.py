"""Runs a whole league, or what is missing of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from jaxserve.machine import machine
from jaxserve.sched import registry
from jaxserve_lab.bench import planning_time
from jaxserve_lab.experiments.common.processes import worked
from jaxserve_lab.experiments.league.code import code_of
from jaxserve_lab.experiments.league.optimum import CutCase, Optimum, latency, optimum
from jaxserve_lab.experiments.league.runs import (
    LASTING,
    LeagueCase,
    LeagueNumbers,
    Saturation,
    SaturationCase,
    run,
    saturate,
)
from jaxserve_lab.experiments.league.store import Store
from jaxserve_lab.experiments.league.workloads import SYSTEMS, WORKLOADS, lasting_count

# How long policies take to simulate, against others in Python. The unified ones take no time.
SLOW = {"bros": 8.0, "accelgen": 7.0, "qoserve": 5.0, "slidingserve": 5.0, "fairbatching": 5.0}
SLOW |= {"goodput": 3.0, "round": 2.0, "fastserve": 2.0}
CORE_MINUTES = 90.0  # that all runs of the whole league take, on one process
LOADS = {"below": 0.7, "at": 1.0, "above": 1.5, "far above": 2.5}  # times the saturating rate


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        workloads, systems: By name.
        seeds: Traces of each point.
        seconds: How long a trace lasts at saturation, within `least` and `most` requests.
        least, most: Bounds on the requests of a trace.
        lasting: Share of the seconds of an overload that lasts.
        time_limit: Seconds of the search for one optimum.
        candidates: Requests to choose from in the plans that are timed.
        repeats: Plans that a median is taken over.
    """

    workloads: tuple[str, ...] = tuple(n for n, one in WORKLOADS.items() if not one.held_out)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    seeds: int = 1
    seconds: float = 40.0
    least: int = 360
    most: int = 2000
    lasting: float = 1.0
    time_limit: float = 20.0
    candidates: tuple[int, ...] = (200, 1600)
    repeats: int = 30

    @property
    def cut(self) -> list[str]:
        """The workloads whose optimum is searched for: it finds nothing in a cache."""
        return [name for name in self.workloads if not WORKLOADS[name].reuse]

    def places(self) -> Iterator[tuple[str, str]]:
        """The (system, workload) of each table."""
        for system in self.systems:
            for workload in self.workloads:
                if system in WORKLOADS[workload].systems:
                    yield system, workload

    def runs(self, policies: int) -> int:
        """How many runs the league of so many policies has."""
        places = list(self.places())
        lasting = sum(system in WORKLOADS[workload].lasting for system, workload in places)
        return policies * (len(places) * len(LOADS) * self.seeds + lasting)


QUICK = Scale(
    ("lmsys", "three-classes"), (next(iter(SYSTEMS)),), 2, 1.0, 6, 12, 0.0002, 5.0, (8,), 2
)


@dataclass(frozen=True)
class Cut:
    """A cut-down workload: its optimum, and each policy's latency in seconds (None if it fails)."""

    optimum: Optimum
    latencies: dict[str, float | None]


@dataclass(frozen=True)
class Found:
    """All numbers of a league.

    Attributes:
        runs: In the league's order.
        saturations: By (system, workload).
        cuts: By workload.
        plans: Milliseconds a plan, by policy and number of candidates.
        machine: Where plans were timed.
    """

    runs: dict[LeagueCase, LeagueNumbers]
    saturations: dict[tuple[str, str], Saturation]
    cuts: dict[str, Cut]
    plans: dict[str, dict[int, float]]
    machine: dict[str, Any]


def entrants() -> list[str]:
    """The policies of the whole league: all that a server takes, but parts of others, and those for
    programs, which have a league of their own."""
    known = registry.policies()
    return [name for name in registry.deployable(for_programs=False) if not known[name].ablation]


def collect(
    scale: Scale, policies: Sequence[str], traces: Mapping[str, str], store: Store, jobs: int
) -> Found:
    """Runs what the store lacks, and stores each run as it comes.

    Plans are timed at the end, when no other process is left that could disturb them.

    Args:
        scale: How much is run.
        policies: Their names.
        traces: Paths of trace files, by workload; the other workloads are drawn.
        store: What is known already.
        jobs: Number of processes.

    Raises:
        ValueError: A run cannot be simulated.
    """
    places = list(scale.places())
    count = scale.runs(len(policies))
    total = len(places) + 2 * len(scale.cut) + count + len(policies)
    kept = {
        (case.system, case.workload): found
        for case in saturation_cases(scale, traces)
        if (found := _fact(store, case)) is not None
    }
    cases = league_cases(scale, policies, kept, traces)
    missing = count - sum(store.numbers(case) is not None for case in cases)
    print(ahead(scale, missing, count, jobs), file=sys.stderr)
    with tqdm(total=total, desc="league", unit="run", file=sys.stderr) as bar:
        league = _League(scale, list(policies), traces, store, jobs, bar)
        saturations = league.saturations()
        cuts = league.cuts()
        runs = league.runs(saturations)
        plans, where = league.plans()
    store.end(runs)
    return Found(runs, saturations, cuts, plans, where)


def reproduce(store: Store, count: int, jobs: int) -> None:
    """Repeats `count` runs of the store, a sample that changes with the code.

    If they come out the same, all that the store has counts as found by the present code.
    ValueError names the first run that does not.
    """
    known = store.cases()
    cases = random.Random(code_of()).sample(known, min(count, len(known)))
    bar = tqdm(total=len(cases), desc="again", unit="run", file=sys.stderr)
    with bar:
        for case, found in worked(sorted(cases, key=_longest), jobs, run):
            if found != store.numbers(case):
                raise ValueError(f"--reproduce: {case} comes out otherwise now")
            bar.update()
    store.restamp()


def ahead(scale: Scale, missing: int, count: int, jobs: int) -> str:
    """A line that says how much there is to do, and about how long it takes.

    Args:
        scale: Of the league.
        missing: Runs that are not stored.
        count: Runs of the whole league.
        jobs: Number of processes.
    """
    whole = Scale()
    of_whole = whole.runs(len(entrants()))
    share = missing / of_whole * scale.seconds / whole.seconds
    minutes = CORE_MINUTES * share / jobs
    how_long = f"some {minutes:.0f} minutes" if minutes >= 1.5 else "a minute or so"
    return f"league: {missing:,} of {count:,} runs are to be done: {how_long} on {jobs} processes"


# What is found once: what it is called, and the dataclass of its numbers.
_FACTS: dict[type, tuple[str, type]] = {
    SaturationCase: ("saturation", Saturation),
    CutCase: ("optimum", Optimum),
}


def _name(case: SaturationCase | CutCase) -> tuple[str, ...]:
    """The name under which the store keeps it."""
    return (_FACTS[type(case)][0], *map(str, case.named().values()))


def _fact(store: Store, case: SaturationCase | CutCase) -> Any:
    """What the store has of it, or None."""
    value = store.fact(*_name(case))
    return None if value is None else _FACTS[type(case)][1](**value)


def saturation_cases(scale: Scale, traces: Mapping[str, str]) -> list[SaturationCase]:
    """One case for each place. traces: as in `collect`."""
    return [
        SaturationCase(
            system,
            workload,
            scale.seeds,
            scale.seconds * WORKLOADS[workload].longer,
            scale.least,
            scale.most,
            traces.get(workload, ""),
        )
        for system, workload in scale.places()
    ]


def league_cases(
    scale: Scale,
    policies: Sequence[str],
    saturations: Mapping[tuple[str, str], Saturation],
    traces: Mapping[str, str],
) -> list[LeagueCase]:
    """All runs of the league, in its order.

    Args:
        scale: How much is run.
        policies: Their names.
        saturations: By (system, workload); runs are at LOADS times their rates, and where a
            workload has one, in an overload that lasts.
        traces: As in `collect`.
    """
    cases = []
    for (system, workload), saturation in saturations.items():
        loads = [
            (load, float(f"{saturation.rate * times:.4g}"), saturation.count, scale.seeds)
            for load, times in LOADS.items()
        ]
        if system in WORKLOADS[workload].lasting:  # so many requests that one trace will do
            rate = saturation.rate
            loads.append((LASTING, rate, lasting_count(rate, scale.lasting), 1))
        for load, rate, count, seeds in loads:
            for policy in policies:
                one = (system, workload, load, policy)
                trace = traces.get(workload, "")
                cases += [LeagueCase(*one, seed, rate, count, trace) for seed in range(seeds)]
    return cases


@dataclass(frozen=True)
class _League:
    scale: Scale
    policies: list[str]
    traces: Mapping[str, str]
    store: Store
    jobs: int
    bar: tqdm

    def saturations(self) -> dict[tuple[str, str], Saturation]:
        cases = saturation_cases(self.scale, self.traces)
        results = self._facts(cases, saturate)
        return {(case.system, case.workload): results[case] for case in cases}

    def cuts(self) -> dict[str, Cut]:
        cases = [CutCase(name, self.scale.time_limit) for name in self.scale.cut]
        results = self._facts(cases, optimum)
        found = {}
        for case in cases:
            took: dict[str, float | None] = {}
            for policy in self.policies:
                name = ("cut", policy, *_name(case)[1:])
                if self.store.fact(*name) is None:
                    value = {"latency": latency(case.workload, policy)}
                    self.store.learn(value, *name, policy=policy)
                took[policy] = self.store.fact(*name)["latency"]
            found[case.workload] = Cut(results[case], took)
            self.bar.update()
        return found

    def runs(
        self, saturations: dict[tuple[str, str], Saturation]
    ) -> dict[LeagueCase, LeagueNumbers]:
        cases = league_cases(self.scale, self.policies, saturations, self.traces)
        results = self._all(cases, run, self.store.numbers, self.store.add)
        return {case: results[case] for case in cases}

    def plans(self) -> tuple[dict[str, dict[int, float]], dict[str, Any]]:
        where: dict[str, Any] = self.store.fact("machine") or {}
        found: dict[str, dict[int, float]] = {}
        for policy in self.policies:
            name = ("plan", policy, *map(str, self.scale.candidates))
            if self.store.fact(*name) is None:
                took = planning_time.measure(policy, self.scale.candidates, self.scale.repeats)
                self.store.learn(took["mixed"], *name, policy=policy)
                where = machine()
                self.store.learn(where, "machine")
            found[policy] = {int(n): ms for n, ms in self.store.fact(*name).items()}
            self.bar.update()
        return found, where

    def _facts(self, cases: Sequence[Any], work: Callable[[Any], Any]) -> dict[Any, Any]:
        def keep(case: Any, found: Any) -> None:
            self.store.learn(asdict(found), *_name(case))

        return self._all(cases, work, partial(_fact, self.store), keep)

    def _all(
        self,
        cases: Sequence[Any],
        work: Callable[[Any], Any],
        known: Callable[[Any], Any],
        keep: Callable[[Any, Any], None],
    ) -> dict[Any, Any]:
        """What is known of every case, or else found, the longest first."""
        results = {case: found for case in cases if (found := known(case)) is not None}
        self.bar.update(len(results))
        todo = [case for case in cases if case not in results]
        for case, found in worked(sorted(todo, key=_longest), self.jobs, work):
            keep(case, found)
            results[case] = found
            self.bar.update()
        return results


def _longest(case: Any) -> float:
    """Sort key: runs of policies that plan much come first."""
    if not isinstance(case, LeagueCase):
        return 0.0
    return -case.count * SLOW.get(case.policy.partition("_")[0], 1.0)
