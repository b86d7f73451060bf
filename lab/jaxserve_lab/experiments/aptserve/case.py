"""Requests that arrive one by one and want their tokens in time: one simulated trace a case."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sched.cost.profiles import System
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Rule
from jaxserve.sched.slo.metrics import request_p99_tbt
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import default_limits, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.claims.cases import Case, Numbers, shortened
from jaxserve_lab.experiments.common.runs import say_compiling

QUANTILES = tuple(q / 100 for q in (*range(0, 100, 2), 99, 100))


@dataclass(frozen=True)
class OnlineCase(Case):
    """One trace under the rules `jaxserve`. P is 512 where prompts are chunked, else C.

    Attributes:
        policy, system, workload: By name.
        rate: Requests/s.
        ttft, tbt: The SLO, seconds.
        cv: Coefficient of variation of the Gamma gaps; 1 is Poisson.
        requests: Of the trace.
        longest: Tokens that a request is cut to; None for no limit.
        max_batch_tokens: C.
        hidden_read: How hidden caches are read, see `systems.system`.
        hidden_cost: Factor on what a token read from a hidden cache costs.
        switches: Parameters of the policy.
        quantiles: Whether to keep QUANTILES of the latencies.
    """

    policy: str
    system: str
    workload: str
    rate: float
    ttft: float
    tbt: float
    cv: float = 1.0
    requests: int = 1000
    longest: int | None = 2048
    max_batch_tokens: int = 2048
    hidden_read: str = "auto"
    hidden_cost: float = 1.0
    switches: tuple[tuple[str, float | str], ...] = ()
    quantiles: bool = False

    @property
    def cost(self) -> float:
        """Larger models have less cache, so that fewer are served at once, in more steps."""
        return self.requests * len(self.system) * self.rate

    @property
    def slo(self) -> SLO:
        """The SLO of every request."""
        return SLO(self.ttft, self.tbt)


def place_of(case: OnlineCase) -> System:
    """The case's system, with the case's cost of hidden caches."""
    place = system(case.system, case.hidden_read)
    if case.hidden_cost == 1 or place.rho is None:
        return place
    model = place.cost_model
    per_token = model.coefficients.hidden_token * case.hidden_cost
    coefficients = replace(model.coefficients, hidden_token=per_token)
    rho = model.num_layers * (per_token - coefficients.decode_kv)
    return replace(place, cost_model=replace(model, coefficients=coefficients), rho=rho)


def workload_of(case: OnlineCase) -> Workload:
    """The case's requests: the same for every system and, at scaled arrivals, every rate."""
    kind = "poisson" if case.cv == 1 else "gamma"
    cv = None if case.cv == 1 else case.cv
    spec = WorkloadSpec(case.workload, case.requests, kind, case.rate, cv, slo=case.slo)
    return (
        spec.make_workload() if case.longest is None else spec.make_workload().within(case.longest)
    )


def simulated(case: OnlineCase, compiled: bool | None = None) -> SimulationResult:
    """Simulates the case. compiled: as `simulate` has it."""
    place, policy = place_of(case), make_policy(case.policy, **dict(case.switches))
    limits = default_limits(policy, place, max_batch_tokens=case.max_batch_tokens)
    workload = workload_of(case)
    return simulate(
        policy,
        workload,
        place,
        engine=EngineOptions(limits=limits),
        run=RunOptions(compiled=compiled, compiling=say_compiling),
    )


def run(case: OnlineCase) -> Numbers:
    """The numbers of a simulation, times in seconds."""
    result = simulated(case)
    summary, requests, batches = result.summary(Rule.PAPERS), result.requests, result.batches
    size, ttft = batches.num_decodes + batches.num_prefills, requests.ttft
    names = {"attainment": "slo", "ttft_attainment": "ttft", "tbt_attainment": "tbt"}
    found = {name: summary[f"{of}_attainment"] for name, of in names.items()}  # shares of requests
    quantiles = QUANTILES if case.quantiles else ()
    numbers = {
        "ttft_p50": np.quantile(ttft, 0.5),  # over requests
        "ttft_p99": np.quantile(ttft, 0.99),
        "step": batches.duration.mean(),
        "batch_size": size.mean(),  # requests
        "hidden": (batches.num_hidden / size).mean(),  # share of a batch's requests
        "kv_used": summary["mean_kv_used"],  # share of the cache, mean over time
        "preemptions": summary["num_preemptions"],  # of all requests
        "makespan": summary["makespan_s"],  # from the first arrival to the last token
        "ttft_quantiles": tuple(np.quantile(ttft, quantiles)),  # over requests
        # Of the requests' 99th percentiles of TBT.
        "tbt_quantiles": tuple(np.quantile(request_p99_tbt(requests.times), quantiles)),
    }
    return found | shortened(numbers, 4)
