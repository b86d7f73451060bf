"""One simulation of the league, and where a workload saturates a system."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Rule, Tier
from jaxserve.sched.slo.metrics import attained, jain_index, overtaken, waits
from jaxserve.simulator.capacity import FINE, sustained
from jaxserve.simulator.results import RequestRecords, SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import default_limits, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.common.runs import digits, say_compiling
from jaxserve_lab.experiments.league.workloads import WORKLOADS, make_workload

ROWS = 256  # requests of a batch: vLLM's default
WARM = 1 / 6  # of the requests come before the window that counts
PAUSED = 5.0  # seconds between two tokens, after which a stream counts as paused
LENGTH_CLASSES = 4  # of prompts, each with as many requests
STEADY = ("sarathi", "vllm")  # where the search for the saturating rate begins
# Who then goes further, as far as anybody can: the best of all at some workload or other.
FURTHER = ("edf", "rank_i", "aptserve", "aptserve_s", "goodput", "bros")
LEVEL = 0.9  # of the requests that attain their targets on an idle server
IDLE = 1e-3  # requests/s of an idle server
CLIMB = 4  # points of the grid that a step upwards has, 9%
REACH = 128  # points upwards at most, 16 times the rate
LASTING = "lasting"  # the load whose rate changes


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
    """What a run comes to.

    The window that counts is from the end of the warm-up to the last arrival. Numbers are of the
    requests that came in it, followed to their ends, and rates are over its time.

    Attributes:
        attainment: Share of the requests within all of their targets, by the papers' rule.
        with_gap: The same, where the longest time between two tokens counts, too.
        goodput: Requests within their targets by the papers' rule, a second.
        throughput: Output tokens written in the window, a second.
        ttft_p99: Over requests, seconds.
        tbt_p99: Over times between tokens, seconds; None if there are none.
        latency: Mean normalised latency, seconds per token.
        longest_wait: The longest that anybody waited for a token, seconds.
        paused: Share of the requests that waited for a later token for more than PAUSED.
        fair_lengths: Jain's index of mean normalised latencies over LENGTH_CLASSES of prompts.
        fair_tenants: The same over the parts of a workload; None if it has one.
        recomputed: Share of the tokens of the whole run that were computed again.
        preemptions: Mean number per request.
        realtime, best_effort: Attainment of each tier; None if no request is of it.
        floor: Best-effort tokens written in the window, over those that were asked for in it; None
            if nobody is best-effort.
        overtaken: The longest that a request waited while later ones of its own part were
            served, seconds (`metrics.overtaken`).
    """

    attainment: float
    with_gap: float
    goodput: float
    throughput: float
    ttft_p99: float
    tbt_p99: float | None
    latency: float
    longest_wait: float
    paused: float
    fair_lengths: float
    fair_tenants: float | None
    recomputed: float
    preemptions: float
    realtime: float | None
    best_effort: float | None
    floor: float | None
    overtaken: float


def simulated(case: LeagueCase) -> SimulationResult:
    """Simulates the case. ValueError if that is impossible, or the policy plans what cannot be
    done."""
    place, policy = system(case.system), make_policy(case.policy)
    named = (case.workload, case.system, case.rate, case.count, case.seed, case.trace)
    workload = make_workload(*named, lasting=case.load == LASTING)
    entry = WORKLOADS[case.workload]
    c = entry.longest(case.system)
    limits = default_limits(policy, place, max_batch_tokens=c, max_rows=ROWS)
    try:
        return simulate(
            case.policy,
            workload,
            place,
            engine=EngineOptions(
                limits=limits, host_tokens=place.kv_tokens, prefix_caching=entry.reuse
            ),
            run=RunOptions(seed=case.seed, compiling=say_compiling),
        )
    except InvalidPlan as error:
        raise ValueError(f"{case.workload}, {case.system}: {error}") from error


def run(case: LeagueCase) -> LeagueNumbers:
    """The numbers of a simulation, five digits each. ValueError as `simulated`."""
    result = simulated(case)
    requests, batches = result.requests, result.batches
    window = in_window(requests.arrival)
    begin, end = requests.arrival[window][[0, -1]]
    times, terms = requests.times.select(window), requests.workload.terms.select(window)
    met, (tbt, _), (first, later) = attained(times, terms), times.tbt, waits(times)
    late, papers = times.normalised_latency, met.slo(Rule.PAPERS)

    def fair(kinds: np.ndarray) -> float:
        return jain_index(np.array([late[kinds == kind].mean() for kind in np.unique(kinds)]))

    def of(tier: Tier) -> float | None:
        mine = terms.tier == tier
        return digits(papers[mine].mean()) if mine.any() else None

    asked = requests.prompt_len[window]
    rank = np.argsort(np.argsort(asked, kind="stable"))
    return LeagueNumbers(
        attainment=digits(papers.mean()),
        with_gap=digits(met.slo().mean()),
        goodput=digits(papers.sum() / (end - begin)),
        throughput=digits(_written(requests.token_times, begin, end) / (end - begin)),
        ttft_p99=digits(np.percentile(first, 99)),
        tbt_p99=digits(np.percentile(tbt, 99)) if len(tbt) else None,
        latency=digits(late.mean()),
        longest_wait=digits(max(first.max(), later.max())),
        paused=digits((later > PAUSED).mean()),
        fair_lengths=digits(fair(rank * LENGTH_CLASSES // len(rank))),
        fair_tenants=digits(fair(terms.slo_class)) if len(terms.classes) > 1 else None,
        recomputed=digits(batches.num_recomputed.sum() / batches.num_tokens.sum()),
        preemptions=digits(requests.preemptions[window].mean()),
        realtime=of(Tier.REALTIME),
        best_effort=of(Tier.BEST_EFFORT),
        floor=_floor(requests, begin, end),
        overtaken=digits(overtaken(times, terms.slo_class)),
    )


def in_window(arrival: np.ndarray) -> np.ndarray:
    """Who comes after the warm-up, bool [n]. arrival: float64 [n], ascending."""
    return np.asarray(np.arange(len(arrival)) >= int(WARM * len(arrival)))


def _written(token_times: np.ndarray, begin: float, end: float) -> int:
    return int(np.count_nonzero((token_times >= begin) & (token_times <= end)))


def _floor(requests: RequestRecords, begin: float, end: float) -> float | None:
    """As `LeagueNumbers.floor`."""
    mine = requests.workload.tier == Tier.BEST_EFFORT
    asked = int(requests.output_len[mine & (requests.arrival >= begin)].sum())
    if not asked:
        return None
    return digits(_written(requests.times.select(mine).token_times, begin, end) / asked)


@dataclass(frozen=True)
class SaturationCase:
    """A workload on a system whose saturating rate is searched for.

    Attributes:
        system, workload: By name.
        policies: Names of those that may be the best.
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
        rate: The highest rate, in requests/s, at which the best of STEADY and FURTHER still
            attains LEVEL times `idle`, by the rule with the longest gap: by the papers' it would be
            one at which streams stand still.
        count: Requests of a trace at that rate.
        idle: Share of the requests that attain their targets on an idle server.
        policy: The one that does.
    """

    rate: float
    count: int
    idle: float
    policy: str


def saturate(case: SaturationCase) -> Saturation:
    """Searches for the rate: from where the better of STEADY falls below the level, each of
    FURTHER in turn goes up on a grid (`jaxserve/simulator/capacity.py`) as far as it attains it.
    ValueError if every rate is too high."""
    idle = max(_attainment(case, name, IDLE, case.least) for name in STEADY)
    if not idle:
        raise ValueError(f"{case.workload}, {case.system}: no request attains its targets")
    index, best = _start(case, LEVEL * idle), STEADY[0]
    last = index + REACH  # a trace of few requests may never be too fast
    for name in FURTHER:
        while index < last and _attainment(case, name, FINE.rate(index + CLIMB)) >= LEVEL * idle:
            index, best = index + CLIMB, name
    rate = FINE.rate(index)
    return Saturation(rate, case.count(rate), digits(idle), best)


def _start(case: SaturationCase, level: float) -> int:
    """Index in FINE of the highest rate at which the better of STEADY attains the level."""
    rates = []
    for name in STEADY:

        def attain(index: int, name: str = name) -> float:
            return _attainment(case, name, FINE.rate(index))

        found, _ = FINE.tried(attain, FINE.nearest(1.0), (level,))
        crossing = sustained({FINE.rate(i): share for i, share in found.items()}, level)
        rates.append(0.0 if crossing.bound == "<" else crossing.rate)
    if not max(rates):
        raise ValueError(f"{case.workload}, {case.system}: no rate is low enough")
    return FINE.nearest(max(rates))


def _attainment(case: SaturationCase, policy: str, rate: float, count: int = 0) -> float:
    """Attainment in the window, longest gaps included, mean over the seeds. count: 0 for that of a
    trace at that rate."""
    count = count or case.count(rate)
    one = LeagueCase(case.system, case.workload, "", policy, 0, rate, count, case.trace)
    results = [simulated(replace(one, seed=seed)) for seed in range(case.seeds)]
    shares = [r.attained[in_window(r.requests.arrival)].mean() for r in results]
    return float(np.mean(shares))
