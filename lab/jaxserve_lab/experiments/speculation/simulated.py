"""The part `simulated`: policies of the league with and without drafts, on the same requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import numpy as np

from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.registry import make_policy
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulate.spread import half_width
from jaxserve.simulator.simulator import default_limits, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.guessable import KINDS
from jaxserve_lab.experiments.common.page import table
from jaxserve_lab.experiments.common.processes import worked
from jaxserve_lab.experiments.league.runs import ROWS, in_window
from jaxserve_lab.experiments.league.workloads import LLAMA, SYSTEMS, WORKLOADS, make_workload

POLICIES, VARIANT = ("sarathi", "goodput"), "+spec"
SYSTEM, SEEDS, REQUESTS = LLAMA, (0, 1, 2, 3), 160
LOADS = ("below", "at", "above")
# Requests/s: `sarathi` serves all in time; begins to fail; and has far too many.
RATES = {
    "humaneval": (25.0, 45.0, 60.0),
    "conversation": (3.0, 5.5, 7.0),
    "agent": (0.6, 1.0, 1.3),
}
TBT = 0.2  # seconds, more than a chunk of `sarathi` beside many decodes takes
FEW = 0.05  # in time without drafts: less is not compared
# Assumed, as the system has none: 1.5 ms per step, in which a waiting plan leaves the device idle.
HOST = HostOverhead(plan=5e-4, launch=5e-4, finish=5e-4)


@dataclass(frozen=True)
class SpeculationCase:
    """A run.

    Attributes:
        workload: Its name in the league.
        load: Of LOADS.
        policy: Its name.
        seed: Of the workload.
        requests: How many.
    """

    workload: str
    load: str
    policy: str
    seed: int
    requests: int

    @property
    def rate(self) -> float:
        """Requests/s."""
        return RATES[self.workload][LOADS.index(self.load)]


@dataclass(frozen=True)
class Numbers:
    """What comes of it, of the requests behind the warm-up.

    Attributes:
        met: Share of the requests within all of their targets, the longest gap included.
        goodput: The same a second.
        token: Mean time between tokens, seconds.
        drafted: Drafted tokens for each one written.
        accepted: Those that were right, for each one written.
    """

    met: float
    goodput: float
    token: float
    drafted: float
    accepted: float


def run(case: SpeculationCase) -> Numbers:
    """Does one."""
    entry, place = WORKLOADS[case.workload], replace(system(SYSTEM), host=HOST)
    workload = make_workload(case.workload, SYSTEM, case.rate, case.requests, case.seed)
    terms = replace(workload.terms, tbt=np.full(len(workload), TBT))
    c = entry.longest(SYSTEM)
    limits = default_limits(make_policy(case.policy), place, max_batch_tokens=c, max_rows=ROWS)
    result = simulate(
        case.policy,
        workload.with_terms(terms),
        place,
        engine=EngineOptions(limits=limits, prefix_caching=entry.reuse),
        run=RunOptions(seed=case.seed, compiled=False),
    )
    requests = result.requests
    window = in_window(requests.arrival)
    begin, end = requests.arrival[window][[0, -1]]
    met, wrote = result.attained[window], int(requests.tokens.sum())
    drafts = requests.drafts or (np.zeros(1), np.zeros(1))
    return Numbers(
        met=float(met.mean()),
        goodput=float(met.sum() / (end - begin)),
        token=float(requests.times.select(window).tbt[0].mean()),
        drafted=float(drafts[0].sum() / wrote),
        accepted=float(drafts[1].sum() / wrote),
    )


def part(quick: bool, jobs: int) -> str:
    """Runs the cases, and makes the Markdown.

    Args:
        quick: Whether the sizes are toy sizes.
        jobs: Processes.
    """
    names = list(RATES)[: 1 if quick else None]
    policies, seeds = POLICIES[: 1 if quick else None], SEEDS[: 2 if quick else None]
    requests = 12 if quick else REQUESTS
    places = list(product(names, policies, LOADS))
    cases = [
        SpeculationCase(name, load, policy + variant, seed, requests)
        for name, policy, load in places
        for seed in seeds
        for variant in ("", VARIANT)
    ]
    found = dict(worked(cases, jobs, run))
    rows, ratios = [], {load: list[float]() for load in LOADS}
    for name, policy, load in places:
        without, drafting = (
            [found[SpeculationCase(name, load, policy + variant, seed, requests)] for seed in seeds]
            for variant in ("", VARIANT)
        )
        pairs = list(zip(without, drafting, strict=True))
        points = [100 * (two.met - one.met) for one, two in pairs]
        goodput = fmean(one.goodput for one in without)
        times = fmean(two.goodput for two in drafting) / goodput if goodput else 0.0
        if fmean(one.met for one in without) >= FEW:
            ratios[load].append(times)
        rows.append(
            [
                f"`{name}`",
                f"`{policy}`",
                f"{load}, {RATES[name][LOADS.index(load)]:g}/s",
                f"{fmean(one.met for one in without):.1%}",
                f"{fmean(one.met for one in drafting):.1%}",
                f"{fmean(points):+.1f} ± {half_width(points):.1f}",
                f"{times:.3f}" if goodput else "",
                f"{fmean(two.token / one.token for one, two in pairs):.3f}",
                f"{fmean(two.drafted for two in drafting):.2f}",
                f"{fmean(two.accepted for two in drafting):.2f}",
            ]
        )
    header = ["workload", "policy", "load", "in time", "with drafts", "points", "goodput, times"]
    header += ["time a token, times", "drafted", "right"]
    goals = {"below": "above 1", "at": "at least 1", "above": "at least 1"}
    summary = [
        [load, goals[load], f"{min(values):.3f} to {max(values):.3f}, mean {fmean(values):.3f}"]
        for load, values in ratios.items()
        if values
    ]
    texts = "; ".join(
        f"{name}: a guess of {KINDS[name].share:.0%} of the tokens, {KINDS[name].right:.0%} right"
        for name in names
    )
    return f"""\
{table(["load", "goodput with drafts, times without: target", "simulated"], summary)}

{table(header, rows)}

in time: requests within their TTFT, and {1e3 * TBT:g} ms between tokens in 99 of 100. points: with
drafts less without, the same requests and texts, mean of {len(seeds)} seeds, with its 95% interval.
Goodput, summed over them, and time a token: with drafts over without; the first table leaves out
where fewer than {FEW:.0%} are in time. drafted, right: tokens for each one written.
{SYSTEMS[SYSTEM]}, {1e3 * (HOST.plan + HOST.launch + HOST.finish):g} ms of the host a step;
{requests} requests per run, behind a warm-up of a sixth. {texts}.
"""
