"""Real-time requests one by one, best-effort batches beside them: one simulated trace a case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.experiments.common.runs import Case, Timed, shortened
from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.simulator import default_limits, simulate
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.slo.metrics import Times
from jaxserve.sched.workloads.closed_loop import ClosedLoop
from jaxserve.sched.workloads.lengths import Uniform
from jaxserve.sched.workloads.specs import WorkloadSpec

TTFT, TPOT = 0.4, 0.2  # seconds (section 7.1)
PROMPT, OUTPUT = Uniform(512, 1024), Uniform(32, 128)  # of best-effort requests (section 7.1)
LONGEST = 2048  # tokens that a real-time request is cut to: OPT has no more
BATCH_TOKENS, ROWS = 2048, 256  # C and rows: vLLM's own, then


@dataclass(frozen=True)
class MixedCase(Case):
    """rate: real-time requests/s, Poisson, with the targets of section 7.1. duration: seconds, when
    the trace is cut off. batch: best-effort requests submitted at a time. switches: parameters of
    the policy. timed: measure its plans."""

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


@dataclass(frozen=True)
class MixedNumbers:
    """Of the real-time requests that came: latency, seconds a token, mean over them of their time
    in the system over the tokens they write (who has not ended counts with its time so far: at
    least); ttft, tbt: shares within the targets, the latter with the 99th percentile of its own
    times between tokens; tpot: of those with two tokens, the share whose mean time between them is
    within the target; ended: share that has.

    best_effort, tokens: best-effort requests that ended, and tokens that such wrote, a second.
    step: mean seconds of a batch; kv_used: mean share of the cache. preemptions; recomputed:
    tokens; saved, loaded: slots to host memory and back; shared: blocks with two owners, mean over
    time. plan: the plans' share of the batches' time, and plan_p99 of one in seconds; 0 if not
    measured.
    """

    latency: float
    ttft: float
    tpot: float
    tbt: float
    ended: float
    best_effort: float
    tokens: float
    step: float
    kv_used: float
    preemptions: int
    recomputed: int
    saved: int
    loaded: int
    shared: float
    plan: float = 0.0
    plan_p99: float = 0.0


def run(case: MixedCase) -> MixedNumbers:
    """Simulates it. ValueError if its policy, workload or system is unknown."""
    policy = Timed(make_policy(case.policy, **dict(case.switches)))
    result = _simulated(case, policy)
    summary, batches = result.summary(), result.batches
    tiers = summary["tiers"]
    realtime, best_effort = tiers["realtime"], tiers["best_effort"]
    requests = result.requests
    mine = requests.workload.tier == Tier.REALTIME
    values = {
        "latency": latency_of(result, mine, case.duration),
        "ttft": realtime["slo"]["ttft_attainment"],
        "tpot": within_tpot(requests.times.select(mine)),
        "tbt": realtime["slo"]["tbt_attainment"],
        "ended": realtime["finished"] / realtime["requests"],
        "best_effort": best_effort["finished"] / case.duration,
        "tokens": best_effort["output_tokens"] / case.duration,
        "step": batches.duration.mean(),
        "kv_used": summary["mean_kv_used"],
        "preemptions": summary["num_preemptions"],
        "recomputed": summary["recomputed_tokens"],
        "saved": summary["saved_slots"],
        "loaded": summary["loaded_slots"],
        "shared": summary["mean_shared_blocks"],
        "plan": sum(policy.seconds) / batches.duration.sum() if case.timed else 0.0,
        "plan_p99": np.quantile(policy.seconds, 0.99) if case.timed else 0.0,
    }
    return MixedNumbers(**shortened(values))


def _simulated(case: MixedCase, policy: Policy) -> SimulationResult:
    place = system(case.system)
    spec = WorkloadSpec(case.workload, rate=case.rate, duration=case.duration, slo=SLO(TTFT, TPOT))
    return simulate(
        policy,
        spec.make_workload(case.seed).within(LONGEST),
        place,
        limits=default_limits(policy, place, max_batch_tokens=BATCH_TOKENS, max_rows=ROWS),
        host_tokens=place.kv_tokens,
        best_effort=ClosedLoop(case.batch, PROMPT, OUTPUT),
        until=case.duration,
        seed=case.seed,
        checked=False,
    )


def latency_of(result: SimulationResult, which: np.ndarray, end: float) -> float:
    """Mean normalised latency of those requests, bool [n], seconds a token (section 7.1)."""
    requests = result.requests
    so_far = np.where(requests.finished, requests.latency, end - requests.arrival)
    return float((so_far / requests.output_len)[which].mean())


def within_tpot(times: Times) -> float:
    """The share of the requests with two tokens whose mean time between them is within TPOT; who
    goes on is judged as if its next token came at the end. 1 if there are none."""
    judged = times.judged()
    several = judged.tokens > 1
    if not several.any():
        return 1.0
    span = (judged.last_token - judged.first_token)[several]
    return float((span <= TPOT * (judged.tokens[several] - 1)).mean())
