"""InferMax's rules: one simulation a case."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.parameters import with_parameters
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import RULES, default_limits, policy_under, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve_lab.experiments.claims.cases import Numbers
from jaxserve_lab.experiments.common.runs import say_compiling

UNLIMITED = 10**9  # tokens of cache


@dataclass(frozen=True)
class InferMaxCase:
    """A simulation under the rules `infermax_paper`; C is the system's, P that of its Table 1.

    Attributes:
        policy: Its name.
        workload: As `WorkloadSpec.lengths`.
        kv_tokens: M.
        num_requests: Of a mix.
        system: Name of the system.
        switches: Parameters of the policy.
    """

    policy: str
    workload: str
    kv_tokens: int
    num_requests: int | None = None
    system: str = "llama-2-7b@a100"
    switches: tuple[tuple[str, bool | str], ...] = ()

    @property
    def cost(self) -> int:
        """A guess of the simulation time, so that the longest can start first."""
        if not self.workload.startswith("fixed:"):
            return 10**6 * (self.num_requests or 20)
        prompt, output, count = map(int, self.workload[6:].split("x"))
        at_once = max(1, min(count, self.kv_tokens // (prompt + output)))
        return output * count // at_once

    def named(self) -> dict[str, Any]:
        """Its fields; a trace without its folder."""
        switches = dict(self.switches)
        return {**asdict(self), "workload": Path(self.workload).name, "switches": switches}


def simulated(case: InferMaxCase, compiled: bool | None = None) -> SimulationResult:
    """Simulates the case, on the same requests each time. compiled: as `simulate` has it.
    ValueError if its policy, parameters, workload or system are unknown, or do not go together."""
    place = system(case.system)
    policy = policy_under(case.policy, RULES["infermax_paper"])
    policy = with_parameters(case.policy, policy, dict(case.switches))
    spec = WorkloadSpec(case.workload, num_requests=case.num_requests)
    return simulate(
        policy,
        spec.make_workload(),
        place,
        engine=EngineOptions(
            limits=default_limits(policy, place), kv_tokens=case.kv_tokens, rules="infermax_paper"
        ),
        run=RunOptions(compiled=compiled, compiling=say_compiling),
    )


def run(case: InferMaxCase) -> Numbers:
    """The numbers of a simulation, times in seconds. ValueError as `simulated`."""
    result = simulated(case)
    summary, tpot = result.summary(), result.requests.tpot
    return {
        "latency": summary["latency_s"],  # sum of the batch times (section 4.1)
        "tps": summary["tps"],  # output tokens over latency
        "ttft": summary["mean_ttft_s"],  # mean over requests
        "tpot": summary["mean_tpot_s"] or 0.0,  # mean over requests
        "tpot_p99": float(np.quantile(tpot, 0.99)) if len(tpot) else 0.0,  # over their mean TPOTs
        "batches": summary["num_batches"],
        "preemptions": summary["num_preemptions"],  # of all requests
        "batch_size": summary["mean_batch_requests"],
        "kv_used": summary["mean_kv_used"],  # share of M
        "requests": summary["num_requests"],
        "output_tokens": summary["output_tokens"],
    }
