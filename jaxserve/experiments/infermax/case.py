"""InferMax's rules: one simulation a case."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.experiments.common.runs import say_compiling
from jaxserve.sched.parameters import with_parameters
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.simulator import RULES, default_limits, policy_under, simulate
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.workloads.specs import WorkloadSpec

UNLIMITED = 10**9  # tokens of cache


@dataclass(frozen=True)
class Case:
    """One simulation under the rules `infermax_paper`. workload: as `WorkloadSpec.lengths`;
    num_requests: of a mix. kv_tokens: M; C is the system's, P as in InferMax's Table 1. switches:
    parameters of the policy."""

    policy: str
    workload: str
    kv_tokens: int
    num_requests: int | None = None
    system: str = "llama-2-7b@a100"
    switches: tuple[tuple[str, bool | str], ...] = ()

    @property
    def cost(self) -> int:
        """A guess of how long it takes to simulate, to start with the longest."""
        if not self.workload.startswith("fixed:"):
            return 10**6 * (self.num_requests or 20)
        prompt, output, count = map(int, self.workload[6:].split("x"))
        at_once = max(1, min(count, self.kv_tokens // (prompt + output)))
        return output * count // at_once

    def named(self) -> dict[str, Any]:
        """A trace without its folder."""
        switches = dict(self.switches)
        return {**asdict(self), "workload": Path(self.workload).name, "switches": switches}


@dataclass(frozen=True)
class Numbers:
    """What a case came to. Times in seconds. tpot_p99: of the requests' means. kv_used: mean share
    of M."""

    latency: float
    tps: float
    ttft: float
    tpot: float
    tpot_p99: float
    batches: int
    preemptions: int
    batch_size: float
    kv_used: float
    requests: int
    output_tokens: int


def simulated(case: Case, compiled: bool | None = None) -> SimulationResult:
    """The case, from the same requests each time. compiled: as `simulate` has it. ValueError if its
    policy, workload or system is unknown, or does not suit the others, or the policy has no such
    parameter."""
    place = system(case.system)
    policy = policy_under(case.policy, RULES["infermax_paper"])
    policy = with_parameters(case.policy, policy, dict(case.switches))
    spec = WorkloadSpec(case.workload, num_requests=case.num_requests)
    return simulate(
        policy,
        spec.make_workload(),
        place,
        limits=default_limits(policy, place),
        kv_tokens=case.kv_tokens,
        rules="infermax_paper",
        compiled=compiled,
        compiling=say_compiling,
    )


def run(case: Case) -> Numbers:
    """What it comes to. ValueError as `simulated`."""
    result = simulated(case)
    summary = result.summary()
    tpot = result.requests.tpot
    return Numbers(
        summary["latency_s"],
        summary["tps"],
        summary["mean_ttft_s"],
        summary["mean_tpot_s"] or 0.0,
        float(np.quantile(tpot, 0.99)) if len(tpot) else 0.0,
        summary["num_batches"],
        summary["num_preemptions"],
        summary["mean_batch_requests"],
        summary["mean_kv_used"],
        summary["num_requests"],
        summary["output_tokens"],
    )
