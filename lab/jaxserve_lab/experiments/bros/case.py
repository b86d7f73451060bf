"""Real-time requests one by one, best-effort batches beside them: one simulated trace a case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.metrics import Times
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions, TrafficOptions
from jaxserve.simulator.simulator import default_limits, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.closed_loop import ClosedLoop
from jaxserve.simulator.workloads.lengths import Uniform
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve_lab.experiments.claims.cases import Case, Numbers, Timed, shortened

TTFT, TPOT = 0.4, 0.2  # seconds (section 7.1)
PROMPT, OUTPUT = Uniform(512, 1024), Uniform(32, 128)  # of best-effort requests (section 7.1)
LONGEST = 2048  # tokens that a real-time request is cut to: OPT has no more
BATCH_TOKENS, ROWS = 2048, 256  # C and rows: vLLM's own, then


@dataclass(frozen=True)
class MixedCase(Case):
    """A policy on real-time requests, with the targets of section 7.1, beside best-effort ones.

    Attributes:
        policy, system, workload: By name.
        rate: Real-time requests/s, Poisson.
        seed: Of the trace and of the policy.
        duration: When the trace is cut off, seconds.
        batch: Best-effort requests submitted at a time.
        switches: Parameters of the policy.
        timed: Whether to time the plans.
    """

    policy: str
    system: str
    workload: str
    rate: float
    seed: int = 0
    duration: float = 600.0
    batch: int = 64
    switches: tuple[tuple[str, float | bool], ...] = ()
    timed: bool = False

    @property
    def cost(self) -> float:
        """BROS plans longer than the others do; more requests are longer lists."""
        return self.duration * (5 + self.rate) * (3 if self.policy == "bros" else 1)


def run(case: MixedCase) -> Numbers:
    """The numbers of a simulation. ValueError if its policy, workload or system is unknown.

    Of real-time requests those that have not finished count, too. Times are in seconds.
    """
    policy = Timed(make_policy(case.policy, **dict(case.switches)))
    result = _simulated(case, policy)
    summary, batches = result.summary(), result.batches
    tiers = summary["tiers"]
    realtime, best_effort = tiers["realtime"], tiers["best_effort"]
    mine = result.requests.workload.tier == Tier.REALTIME
    numbers = {
        "latency": latency_of(result, mine, case.duration),  # per token: a lower bound
        "ttft": realtime["slo"]["ttft_attainment"],  # share of the real-time requests within it
        "tpot": within_tpot(result.requests.times.select(mine)),  # of those with two tokens or more
        "tbt": realtime["slo"]["tbt_attainment"],  # of a request the 99th percentile
        "ended": realtime["finished"] / realtime["requests"],  # share of the real-time requests
        "best_effort": best_effort["finished"] / case.duration,  # requests/s
        "tokens": best_effort["output_tokens"] / case.duration,  # best-effort ones/s
        "step": batches.duration.mean(),
        "kv_used": summary["mean_kv_used"],  # share of the cache, mean over time
        "preemptions": summary["num_preemptions"],  # of all requests
        "recomputed": summary["recomputed_tokens"],  # after preemptions
        "saved": summary["saved_slots"],  # copied to host memory
        "loaded": summary["loaded_slots"],  # and back
        "shared": summary["mean_shared_blocks"],  # blocks with two owners, mean over time
        # Planning time as a share of the step time, and of a plan; 0 if not timed.
        "plan": sum(policy.seconds) / batches.duration.sum() if case.timed else 0.0,
        "plan_p99": np.quantile(policy.seconds, 0.99) if case.timed else 0.0,
    }
    return shortened(numbers)


def _simulated(case: MixedCase, policy: Policy) -> SimulationResult:
    place = system(case.system)
    spec = WorkloadSpec(case.workload, rate=case.rate, duration=case.duration, slo=SLO(TTFT, TPOT))
    return simulate(
        policy,
        spec.make_workload(case.seed).within(LONGEST),
        place,
        engine=EngineOptions(
            limits=default_limits(policy, place, max_batch_tokens=BATCH_TOKENS, max_rows=ROWS),
            host_tokens=place.kv_tokens,
        ),
        traffic=TrafficOptions(
            best_effort=ClosedLoop(case.batch, PROMPT, OUTPUT), until=case.duration
        ),
        run=RunOptions(seed=case.seed, checked=False),
    )


def latency_of(result: SimulationResult, which: np.ndarray, end: float) -> float:
    """Mean normalised latency (section 7.1), seconds per token.

    Args:
        result: Of the simulation.
        which: bool [n], the requests to count.
        end: When the run was cut off, seconds.
    """
    requests = result.requests
    so_far = np.where(requests.finished, requests.latency, end - requests.arrival)
    return float((so_far / requests.output_len)[which].mean())


def within_tpot(times: Times) -> float:
    """Share of the requests with two tokens or more whose mean time between tokens is within TPOT;
    1 if there are none. Unfinished requests are judged as if their next token came at the end."""
    judged = times.judged()
    several = judged.tokens > 1
    if not several.any():
        return 1.0
    span = (judged.last_token - judged.first_token)[several]
    return float((span <= TPOT * (judged.tokens[several] - 1)).mean())
