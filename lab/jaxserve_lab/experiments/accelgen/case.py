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
from jaxserve.simulator.workloads.workload import Workload, all_at_once, poisson_arrivals
from jaxserve_lab.experiments.accelgen.places import BLOCK, PLACES, prefill_seconds
from jaxserve_lab.experiments.accelgen.requests import MIXED, READING, drawn_lengths, with_slos
from jaxserve_lab.experiments.claims.cases import Case, Numbers, Timed, shortened
from jaxserve_lab.experiments.common.runs import say_compiling

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


def workload_of(case: SloCase) -> Workload:
    """The case's requests: the same for every policy and, at scaled arrivals, every rate."""
    place, rng = PLACES[case.model], np.random.default_rng((case.seed, 11))
    lengths = drawn_lengths(place, case.data, case.books, case.requests, rng, printed=case.printed)
    count, at_once = len(lengths), case.rate == math.inf
    arrival = all_at_once(count) if at_once else poisson_arrivals(case.rate, count, rng)
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


def run(case: SloCase) -> Numbers:
    """The numbers of a simulation. ValueError if the policy is unknown.

    Rates are from the first arrival to the last token, shares of all requests, times in seconds.
    """
    timed = Timed(make_policy(case.policy)) if case.timed else None
    result = simulated(case, timed)
    summary, times, batches = result.summary(Rule.PAPERS), result.requests.times, result.batches
    asked, seconds = result.requests.workload, summary["makespan_s"]
    met, of = tokens_in_time(times, asked.terms)
    in_jct, long = times.e2e <= jct_targets(asked), asked.prompt_len >= LONG
    place, took = PLACES[case.model], batches.duration
    numbers = {
        "tokens": summary["output_tokens"] / seconds,
        "requests": len(times) / seconds,
        "goodput": met / seconds,  # tokens within their own target, TTFT or TBT
        "jobs": np.count_nonzero(in_jct) / seconds,  # requests within their `jct_targets`
        "met": summary["goodput_per_s"],  # requests within all of their own targets
        "iterations": met / of,  # share of the tokens that are in time
        "in_jct": in_jct.mean(),
        **{name: summary[f"{name}_attainment"] for name in ("ttft", "tbt", "slo")},  # slo: both
        # Whose TTFT is no less than their prompt takes alone.
        "reachable": (asked.ttft >= prefill_seconds(place, asked.prompt_len)).mean(),
        "jct": times.e2e.mean(),
        "jct_long": times.e2e[long].mean() if long.any() else 0.0,  # of LONG prompts
        "jct_last": seconds,  # until all have ended
        "step": took.mean(),
        "reading": (took <= READING).mean(),  # of the steps, those that take no longer
        "compute": np.minimum(batches.num_tokens / place.pivot, 1.0).mean(),  # tokens over it
        "cache": summary["mean_kv_used"],  # share, mean over time
        "preemptions": summary["num_preemptions"],
        "plan": np.mean(timed.seconds) if timed else 0.0,
        "plan_p99": np.quantile(timed.seconds, 0.99) if timed else 0.0,
        "steps": tuple(np.quantile(took, QUANTILES).tolist()) if case.quantiles else (),  # of steps
        "bound": summary.get("goodput_bound_per_s") or 0.0,  # on `met` of any schedule; 0: unknown
    }
    return shortened(numbers)


def jct_targets(asked: Workload) -> np.ndarray:
    """The JCT of a request whose tokens are all just in time, seconds, float64 [n]. The paper does
    not say which JCTs it asks for."""
    return np.asarray(asked.ttft + (asked.output_len - 1) * asked.tbt)
