"""One simulation of the league, and where a workload saturates a system."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxserve.experiments.common.runs import digits, say_compiling
from jaxserve.experiments.league.workloads import LONGEST, make_workload
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Tier
from jaxserve.sched.simulation.capacity import FINE, sustained
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.simulator import default_limits, simulate
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.slo.metrics import attained, overtaken

ROWS = 256  # requests of a batch: vLLM's default
REFERENCES = ("vllm", "sarathi")  # whose better one saturates
LEVEL = 0.9  # of the requests that attain their targets on an idle server
IDLE = 1e-3  # requests/s of an idle server


@dataclass(frozen=True)
class LeagueCase:
    """A policy on a workload.

    Attributes:
        system: Name of the system.
        workload: Name in WORKLOADS.
        load: What the rate is called, a name in LOADS.
        policy: Name of the policy.
        seed: Of the trace and of the policy.
        rate: Requests/s.
        count: Number of requests.
        trace: Path of the workload's trace; "" if it is drawn.
    """

    system: str
    workload: str
    load: str
    policy: str
    seed: int
    rate: float
    count: int
    trace: str = ""

    def named(self) -> dict[str, Any]:
        """Its fields; the trace without its folder."""
        return {**asdict(self), "trace": self.trace.rpartition("/")[2]}


@dataclass(frozen=True)
class LeagueNumbers:
    """What a run comes to. Rates are from the first arrival to the last token.

    Attributes:
        attainment: Share of the requests within all of their targets.
        goodput: Requests within them, a second.
        throughput: Output tokens/s.
        ttft_p99: Over requests, seconds.
        tbt_p99: Over times between tokens, seconds; None if there are none.
        latency: Mean normalised latency, seconds a token.
        worst: The longest time from arrival to last token, seconds.
        preemptions: Mean number a request.
        realtime, best_effort: Attainment of each tier; None if no request is of it.
        overtaken: The longest that a request waited while later ones of its own tier and class were
            served, seconds (`metrics.overtaken`); None in older files.
    """

    attainment: float
    goodput: float
    throughput: float
    ttft_p99: float
    tbt_p99: float | None
    latency: float
    worst: float
    preemptions: float
    realtime: float | None
    best_effort: float | None
    overtaken: float | None = None


def simulated(case: LeagueCase) -> SimulationResult:
    """Simulates the case. ValueError if that is impossible, or the policy plans what cannot be
    done."""
    place, policy = system(case.system), make_policy(case.policy)
    workload = make_workload(
        case.workload, case.system, case.rate, case.count, case.seed, case.trace
    )
    limits = default_limits(policy, place, max_batch_tokens=LONGEST[case.system], max_rows=ROWS)
    try:
        return simulate(
            case.policy,
            workload,
            place,
            limits=limits,
            host_tokens=place.kv_tokens,
            seed=case.seed,
            compiling=say_compiling,
        )
    except InvalidPlan as error:
        raise ValueError(f"{case.workload}, {case.system}: {error}") from error


def run(case: LeagueCase) -> LeagueNumbers:
    """The numbers of a simulation, five digits each. ValueError as `simulated`."""
    result = simulated(case)
    summary, terms = result.summary(), result.requests.workload.terms
    tiers = summary["tiers"]

    def of(tier: Tier) -> float | None:
        found = tiers.get(tier.name.lower())
        return found and found["slo"]["attainment"]

    tbt = summary["tbt_ms"]
    group = terms.slo_class.astype(np.int64) * len(Tier) + terms.tier
    return LeagueNumbers(
        attainment=digits(summary["slo_attainment"]),
        goodput=digits(summary["goodput_per_s"]),
        throughput=digits(summary["output_tokens"] / summary["makespan_s"]),
        ttft_p99=digits(summary["ttft_ms"]["p99"] / 1e3),
        tbt_p99=None if tbt is None else digits(tbt["p99"] / 1e3),
        latency=digits(summary["normalised_latency_ms"]["mean"] / 1e3),
        worst=digits(summary["e2e_ms"]["max"] / 1e3),
        preemptions=digits(summary["num_preemptions"] / len(terms)),
        realtime=of(Tier.REALTIME),
        best_effort=of(Tier.BEST_EFFORT),
        overtaken=digits(overtaken(result.requests.times, group)),
    )


@dataclass(frozen=True)
class SaturationCase:
    """A workload on a system whose saturating rate is searched for.

    Attributes:
        system, workload: By name.
        seeds: Traces at each rate.
        seconds: How long a trace lasts, within `least` and `most` requests.
        least, most: Bounds on the requests of a trace.
        trace: As in `LeagueCase`.
    """

    system: str
    workload: str
    seeds: int
    seconds: float
    least: int
    most: int
    trace: str = ""

    def named(self) -> dict[str, Any]:
        """Its fields; the trace without its folder."""
        return {**asdict(self), "trace": self.trace.rpartition("/")[2]}

    def count(self, rate: float) -> int:
        """Requests of a trace at that rate in requests/s."""
        return int(min(max(self.least, round(rate * self.seconds)), self.most))


@dataclass(frozen=True)
class Saturation:
    """Where a workload saturates a system.

    Attributes:
        rate: The highest rate, in requests/s, at which the better of REFERENCES still attains LEVEL
            times `idle`.
        count: Requests of a trace at that rate.
        idle: Share of the requests that attain their targets on an idle server.
    """

    rate: float
    count: int
    idle: float


def saturate(case: SaturationCase) -> Saturation:
    """Searches for the rate (`sched/simulation/capacity.py`). ValueError if every rate is too
    high."""
    idle = max(_attainment(case, name, IDLE, case.least) for name in REFERENCES)
    if not idle:
        raise ValueError(f"{case.workload}, {case.system}: no request attains its targets")
    rates = []
    for name in REFERENCES:

        def attain(index: int, name: str = name) -> float:
            rate = FINE.rate(index)
            return _attainment(case, name, rate, case.count(rate))

        found, _ = FINE.tried(attain, FINE.nearest(1.0), (LEVEL * idle,))
        crossing = sustained({FINE.rate(i): share for i, share in found.items()}, LEVEL * idle)
        rates.append(0.0 if crossing.bound == "<" else crossing.rate)
    if not max(rates):
        raise ValueError(f"{case.workload}, {case.system}: no rate is low enough")
    return Saturation(max(rates), case.count(max(rates)), digits(idle))


def _attainment(case: SaturationCase, policy: str, rate: float, count: int) -> float:
    """Attainment, mean over the seeds."""
    one = LeagueCase(case.system, case.workload, "", policy, 0, rate, count, case.trace)
    results = [simulated(replace(one, seed=seed)).requests for seed in range(case.seeds)]
    return float(np.mean([attained(r.times, r.workload.terms).slo.mean() for r in results]))
