"""Requests with targets of their own on one system: one simulated trace a case."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Rule
from jaxserve.sched.slo.metrics import tokens_in_time
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import MAX_ROWS, simulate
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.accelgen.places import BLOCK, PLACES
from jaxserve_lab.experiments.accelgen.requests import (
    MIXED,
    READING,
    drawn_arrivals,
    drawn_lengths,
    prefill_seconds,
    with_slos,
)
from jaxserve_lab.experiments.common.runs import Case, Timed, digits, say_compiling, shortened

BATCH_TOKENS = 2048  # C of those that bound their batches otherwise: Eq. 6, or Sarathi's P
LONG = 4096  # tokens of a long prompt
QUANTILES = tuple(q / 100 for q in range(0, 101, 2))


@dataclass(frozen=True)
class SloCase(Case):
    """A policy on a trace whose requests have targets of their own.

    Attributes:
        policy: Its name with parameters.
        model: A name in PLACES.
        rate: Requests/s; inf for all at once.
        budget: Tokens of a batch; 0 where the policy decides.
        seed: Of the trace and of the policy.
        requests: Length of the trace, which is served to its end.
        data, books, printed: See `drawn_lengths`.
        choices, ease: See `with_slos`.
        timed: Whether to time the plans.
        quantiles: Whether to keep QUANTILES of the step times.
    """

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
        """Policies in Python take the longest, as do requests with many tokens."""
        slow = self.timed or self.policy.startswith(("accelgen", "fastserve", "oracle"))
        return self.requests * (20 if slow else 1) * (4 if self.printed else 1)

    def named(self) -> dict[str, Any]:
        """As `Case`; JSON has no inf."""
        return super().named() | ({"rate": "inf"} if self.rate == math.inf else {})


@dataclass(frozen=True)
class SloNumbers:
    """What a case comes to. Rates are from the first arrival to the last token.

    Attributes:
        tokens: Output tokens/s.
        requests: Finished requests/s.
        goodput: Tokens/s within their own target, TTFT or TBT.
        jobs: Requests/s that end within their JCT, see `jct_targets`.
        met: Requests/s within all of their own targets (`sched/slo/metrics.py`).
        iterations: Share of the tokens that are in time.
        in_jct, ttft, tbt: Share of the requests within that target.
        slo: Share of the requests within all targets.
        reachable: Share of the requests whose TTFT is no less than their prompt takes alone.
        jct: Mean over requests, seconds.
        jct_long: Mean over those with prompts of LONG tokens or more, seconds.
        jct_last: Until all have ended, seconds.
        step: Mean step time, seconds.
        reading: Share of the steps that take at most READING.
        compute: Tokens of a step over the pivot, at most 1, mean over steps.
        cache: Share of the cache in use, mean over time.
        preemptions: Of all requests.
        plan, plan_p99: Mean and 99th percentile of a plan's time, seconds; 0 if not timed.
        steps: QUANTILES of the step times, seconds, if kept.
        bound: No schedule has a larger `met`; 0 if not known.
    """

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
    """The case's requests: the same for every policy and, at scaled arrivals, every rate."""
    place, rng = PLACES[case.model], np.random.default_rng((case.seed, 11))
    lengths = drawn_lengths(place, case.data, case.books, case.requests, rng, printed=case.printed)
    arrival = drawn_arrivals(case.rate, len(lengths), rng)
    return with_slos(place, arrival, lengths, rng, ease=case.ease, choices=case.choices)


def limits_of(case: SloCase, policy: Policy) -> Limits:
    """Policies that do not chunk prompts get batches as large as the pool. For the others the
    budget is C if they fill batches up to it, else P."""
    if not policy.chunked:
        tokens = PLACES[case.model].kv_tokens
        return Limits(tokens, tokens, MAX_ROWS)
    budget = case.budget or BATCH_TOKENS
    if policy.full_prefill:
        return Limits(budget, budget, MAX_ROWS)
    return Limits(max(BATCH_TOKENS, budget), budget, MAX_ROWS)


def simulated(case: SloCase, timed: Timed | None = None) -> SimulationResult:
    """Simulates the case. timed: its policy, wrapped to time the plans. ValueError if the policy is
    unknown."""
    place, policy = PLACES[case.model], make_policy(case.policy)
    return simulate(
        timed or policy,
        workload_of(case),
        place.system,
        engine=EngineOptions(
            limits=limits_of(case, policy),
            kv_tokens=place.kv_tokens,
            block_size=BLOCK,
            host_tokens=place.host_tokens if policy.moves_cache else 0,
        ),
        run=RunOptions(seed=case.seed, checked=False, compiling=say_compiling),
    )


def run(case: SloCase) -> SloNumbers:
    """The numbers of a simulation. ValueError if the policy is unknown."""
    timed = Timed(make_policy(case.policy)) if case.timed else None
    result = simulated(case, timed)
    summary, times, batches = result.summary(Rule.PAPERS), result.requests.times, result.batches
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
    """The JCT of a request whose tokens are all just in time, seconds, float64 [n]. The paper does
    not say which JCTs it asks for."""
    return np.asarray(asked.ttft + (asked.output_len - 1) * asked.tbt)
