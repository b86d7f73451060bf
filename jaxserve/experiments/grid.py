"""Many simulations, each once, on all cores."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from tqdm import tqdm

from jaxserve.sched.simulator import default_limits, make_policy, simulate
from jaxserve.sched.specs import WorkloadSpec
from jaxserve.sched.systems import system

UNLIMITED = 10**9  # tokens of cache


@dataclass(frozen=True)
class Case:
    """One simulation under the rules `infermax_paper`. workload: as `WorkloadSpec.lengths`;
    num_requests: of a mix. kv_tokens: M; C is the system's, P as in InferMax's Table 1."""

    policy: str
    workload: str
    kv_tokens: int
    num_requests: int | None = None
    system: str = "llama-2-7b@a100"

    @property
    def cost(self) -> int:
        """A guess of how long it takes to simulate, to start with the longest."""
        if not self.workload.startswith("fixed:"):
            return 10**6 * (self.num_requests or 20)
        prompt, output, count = map(int, self.workload[6:].split("x"))
        at_once = max(1, min(count, self.kv_tokens // (prompt + output)))
        return output * count // at_once


@dataclass(frozen=True)
class Numbers:
    """What a case came to. Times in seconds. kv_used: mean share of M."""

    latency: float
    tps: float
    ttft: float
    tpot: float
    batches: int
    evictions: int
    batch_size: float
    kv_used: float
    requests: int
    output_tokens: int


Results = dict[Case, Numbers]


def run(case: Case) -> Numbers:
    place = system(case.system)
    limits = default_limits(make_policy(case.policy), place)
    spec = WorkloadSpec(case.workload, num_requests=case.num_requests)
    result = simulate(
        case.policy,
        spec.make(),
        place,
        limits=limits,
        kv_tokens=case.kv_tokens,
        rules="infermax_paper",
    )
    summary = result.summary()
    return Numbers(
        summary["latency_s"],
        summary["tps"],
        summary["mean_ttft_s"],
        summary["mean_tpot_s"],
        summary["num_batches"],
        summary["num_evictions"],
        summary["mean_batch_requests"],
        summary["mean_kv_used"],
        summary["num_requests"],
        summary["output_tokens"],
    )


def run_all(cases: Iterable[Case], jobs: int) -> Results:
    """Every case once, with a progress bar on stderr."""
    todo = sorted(set(cases), key=lambda case: -case.cost)
    bar = tqdm(total=len(todo), desc="simulations", unit="run", file=sys.stderr)
    results: Results = {}
    with bar:
        if jobs == 1:
            for case in todo:
                results[case] = run(case)
                bar.update()
            return results
        with ProcessPoolExecutor(jobs) as pool:
            futures = {pool.submit(run, case): case for case in todo}
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                bar.update()
    return results
