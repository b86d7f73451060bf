"""One simulation of those asked for, and many of them beside each other."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.registry import make_policy
from jaxserve.sched.simulation import simulator
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.systems import system
from jaxserve.sched.workloads.specs import WorkloadSpec

REFUSED = (ValueError, InvalidPlan, OSError)


@dataclass(frozen=True)
class Run:
    """One simulation: a policy on a workload. Holds only what can go to another process."""

    policy: str
    system: str
    workload: WorkloadSpec
    rules: str
    kv_tokens: int | None
    host_tokens: int
    block_size: int | None
    max_batch_tokens: int | None
    max_prefill_tokens: int | None
    max_rows: int | None
    replicas: int
    routing: str
    seed: int
    record_rows: bool
    hidden_read: str = "auto"
    max_queue: int | None = None

    def result(self, bar: tqdm | None = None) -> SimulationResult:
        """Raises one of REFUSED."""
        place = system(self.system, self.hidden_read)
        workload = self.workload.make(self.seed)
        limits = simulator.default_limits(
            make_policy(self.policy),
            place,
            max_batch_tokens=self.max_batch_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            max_rows=self.max_rows,
        )
        if bar is not None:
            bar.reset(len(workload))
        return simulator.simulate(
            self.policy,
            workload,
            place,
            limits=limits,
            kv_tokens=self.kv_tokens,
            host_tokens=self.host_tokens,
            block_size=self.block_size,
            rules=self.rules,
            replicas=self.replicas,
            routing=self.routing,
            max_queue=self.max_queue,
            seed=self.seed,
            record_rows=self.record_rows,
            progress=None if bar is None else bar.update,
        )

    def summary(self, result: SimulationResult) -> dict[str, Any]:
        """What was run, and its numbers."""
        return {
            "policy": self.policy,
            "rate": self.workload.rate,
            "system": self.system,
            "workload": self.workload.lengths,
            "rules": self.rules,
            "replicas": self.replicas,
            "kv_tokens": result.kv_tokens,
            "seed": self.seed,
            **result.summary(),
        }


def results(
    runs: list[Run], jobs: int, keep: bool
) -> Iterator[tuple[Run, dict[str, Any], SimulationResult | None]]:
    """Every run with its summary, in order; with its result if that is to be kept."""
    quiet = not sys.stderr.isatty()
    if len(runs) == 1 or jobs == 1:
        for run in runs:
            with tqdm(desc=run.policy, unit="request", disable=quiet, leave=False) as bar:
                result = run.result(bar)
            yield run, run.summary(result), result if keep else None
        return
    with (
        ProcessPoolExecutor(min(jobs, len(runs)), multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(runs), unit="run", disable=quiet, leave=False) as bar,
    ):
        futures = [pool.submit(_in_process, run, keep) for run in runs]
        left: set[Future[Any]] = set(futures)
        try:
            while left:
                done, left = wait(left, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                bar.update(len(done))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for run, future in zip(runs, futures, strict=True):
            yield run, *future.result()


def _in_process(run: Run, keep: bool) -> tuple[dict[str, Any], SimulationResult | None]:
    result = run.result()
    return run.summary(result), result if keep else None
