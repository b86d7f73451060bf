"""Requests with targets of their own on one system: one simulated trace a case."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.experiments.accelgen.places import BLOCK, PLACES
from jaxserve.experiments.accelgen.requests import (
    MIXED,
    READING,
    drawn_arrivals,
    drawn_lengths,
    prefill_seconds,
    with_slos,
)
from jaxserve.experiments.common.runs import Case, Timed, digits, say_compiling, shortened
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.simulator import MAX_ROWS, simulate
from jaxserve.sched.slo.metrics import tokens_in_time
from jaxserve.sched.workloads.workload import Workload

BATCH_TOKENS = 2048  # C of those that bound their batches otherwise: Eq. 6, or Sarathi's P
LONG = 4096  # tokens of a long prompt
QUANTILES = tuple(q / 100 for q in range(0, 101, 2))


@dataclass(frozen=True)
class SloCase(Case):
    """policy: its name with parameters. model: of PLACES. rate: requests/s, inf for all at once.
    budget: tokens of a batch, 0 where the policy decides. requests: of the trace, which is served
    to its end. data, books, printed: see `drawn_lengths`; choices, ease: see `with_slos`. timed:
    measure the plans. quantiles: keep those of the steps' times."""

    policy: str
    model: str
    rate: float
    budget: int = 0
    seed: int = 0
    requests: int = 100
    data: str = MIXED
    books: float = 0.35
    printed: bool = False
    choices: bool = False
    ease: float = 1.0
    timed: bool = False
    quantiles: bool = False

    @property
    def cost(self) -> float:
        """Those that run in Python take the longest, and requests with many tokens."""
        slow = self.timed or self.policy.startswith(("accelgen", "fastserve", "oracle"))
        return self.requests * (20 if slow else 1) * (4 if self.printed else 1)

    def named(self) -> dict[str, Any]:
        """As `Case`; JSON has no inf."""
        return super().named() | ({"rate": "inf"} if self.rate == math.inf else {})


@dataclass(frozen=True)
class SloNumbers:
    """A second, from the first arrival to the last token: tokens, written; requests, that ended;
    goodput, tokens within their own target, TTFT or TBT; jobs, requests that ended within their
    JCT, see `jct_targets`; met, within all of their own targets (`sched/slo/metrics.py`). Shares:
    iterations, of the tokens in time; in_jct, ttft, tbt, slo, of the requests within that target,
    slo within all; reachable, of those whose TTFT is no less than their prompt takes alone.

    Seconds: jct, mean; jct_long, of those with LONG tokens; jct_last, until all have ended; step,
    mean. reading: share of the steps within READING. compute: tokens of a step over the pivot, 1 at
    most, mean over steps; cache: share in use, mean over time. preemptions. plan, plan_p99: seconds
    of a plan, mean and 99th percentile; 0 if not measured. steps: their times' QUANTILES, if asked
    for. bound: of met, which no schedule has more of, 0 where nobody searched, or it is not
    known."""

    tokens: float
    requests: float
    goodput: float
    jobs: float
    met: float
    iterations: float
    in_jct: float
    ttft: float
    tbt: float
    slo: float
    reachable: float
    jct: float
    jct_long: float
    jct_last: float
    step: float
    reading: float
    compute: float
    cache: float
    preemptions: int
    plan: float = 0.0
    plan_p99: float = 0.0
    steps: tuple[float, ...] = ()
    bound: float = 0.0


def workload_of(case: SloCase) -> Workload:
    """Its requests: the same for every policy and, but for the gaps between them, every rate."""
    place, rng = PLACES[case.model], np.random.default_rng((case.seed, 11))
    lengths = drawn_lengths(place, case.data, case.books, case.requests, rng, printed=case.printed)
    arrival = drawn_arrivals(case.rate, len(lengths), rng)
    return with_slos(place, arrival, lengths, rng, ease=case.ease, choices=case.choices)


def limits_of(case: SloCase, policy: Policy) -> Limits:
    """Whoever computes prompts whole may have batches as large as the pool. Of the others, the
    budget is C where they fill batches up to it, else P."""
    if not policy.chunked:
        tokens = PLACES[case.model].kv_tokens
        return Limits(tokens, tokens, MAX_ROWS)
    budget = case.budget or BATCH_TOKENS
    if policy.full_prefill:
        return Limits(budget, budget, MAX_ROWS)
    return Limits(max(BATCH_TOKENS, budget), budget, MAX_ROWS)


def simulated(case: SloCase, timed: Timed | None = None) -> SimulationResult:
    """The case. timed: its policy, whose plans are timed. ValueError if its policy is unknown."""
    place, policy = PLACES[case.model], make_policy(case.policy)
    return simulate(
        timed or policy,
        workload_of(case),
        place.system,
        limits=limits_of(case, policy),
        kv_tokens=place.kv_tokens,
        block_size=BLOCK,
        host_tokens=place.host_tokens if policy.moves_cache else 0,
        seed=case.seed,
        checked=False,
        compiling=say_compiling,
    )


def run(case: SloCase) -> SloNumbers:
    """What it comes to. ValueError if its policy is unknown."""
    timed = Timed(make_policy(case.policy)) if case.timed else None
    result = simulated(case, timed)
    summary, times, batches = result.summary(), result.requests.times, result.batches
    asked, seconds = result.requests.workload, summary["makespan_s"]
    met, of = tokens_in_time(times, asked.terms)
    in_jct, long = times.e2e <= jct_targets(asked), asked.prompt_len >= LONG
    place = PLACES[case.model]
    compute = np.minimum(batches.num_tokens / place.pivot, 1.0)
    values: dict[str, Any] = {
        "tokens": summary["output_tokens"] / seconds,
        "requests": len(times) / seconds,
        "goodput": met / seconds,
        "jobs": np.count_nonzero(in_jct) / seconds,
        "met": summary["goodput_per_s"],
        "iterations": met / of,
        "in_jct": in_jct.mean(),
        **{name: summary[f"{name}_attainment"] for name in ("ttft", "tbt", "slo")},
        "reachable": (asked.ttft >= prefill_seconds(place, asked.prompt_len)).mean(),
        "jct": times.e2e.mean(),
        "jct_long": times.e2e[long].mean() if long.any() else 0.0,
        "jct_last": seconds,
        "step": batches.duration.mean(),
        "reading": (batches.duration <= READING).mean(),
        "compute": compute.mean(),
        "cache": summary["mean_kv_used"],
        "preemptions": summary["num_preemptions"],
        "bound": summary.get("goodput_bound_per_s") or 0.0,
        "plan": np.mean(timed.seconds) if timed else 0.0,
        "plan_p99": np.quantile(timed.seconds, 0.99) if timed else 0.0,
    }
    quantiles = np.quantile(batches.duration, QUANTILES).tolist() if case.quantiles else ()
    return SloNumbers(**shortened(values), steps=tuple(map(digits, quantiles)))


def jct_targets(asked: Workload) -> np.ndarray:
    """When a job ends whose tokens are all just in time, seconds from its arrival, float64 [n]: the
    paper does not say what JCTs it asks for."""
    return np.asarray(asked.ttft + (asked.output_len - 1) * asked.tbt)
