"""Many simulations, each once, on all cores."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from tqdm import tqdm

from jaxserve.experiments.common.processes import worked
from jaxserve.sched.parameters import with_parameters
from jaxserve.sched.simulation.dispatch import COMPILING
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.simulator import RULES, default_limits, policy_under, simulate
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.workloads.specs import WorkloadSpec

UNLIMITED = 10**9  # tokens of cache
KEEP = 20.0  # seconds


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


Results = dict[Case, Numbers]


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
        spec.make(),
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


def say_compiling() -> None:
    """In a line on stderr, beside the bar."""
    tqdm.write(COMPILING, file=sys.stderr)


class AnyCase(Protocol):
    """A run that can be done in another process; hashable."""

    @property
    def cost(self) -> float:
        """A guess of how long it takes, in any unit: the longest start first."""

    def named(self) -> dict[str, Any]:
        """What identifies it in a file, ready for JSON."""


C = TypeVar("C", bound=AnyCase)
N = TypeVar("N")


def run_all(
    cases: Iterable[C],
    jobs: int,
    work: Callable[[C], N],
    known: Mapping[C, N] | None = None,
    keep: Callable[[dict[C, N]], None] | None = None,
) -> dict[C, N]:
    """Every case once, those that are known apart, with a progress bar on stderr. keep: called
    every KEEP seconds or so with all that there is, so that a run that ends early is not lost."""
    wanted = set(cases)
    results = {case: n for case, n in (known or {}).items() if case in wanted}
    todo = sorted(wanted - set(results), key=lambda case: (-case.cost, str(case)))
    kept = time.monotonic()
    bar = tqdm(total=len(todo), desc="simulations", unit="run", file=sys.stderr)
    with bar:
        for case, numbers in worked(todo, jobs, work):
            results[case] = numbers
            bar.update()
            if keep is not None and time.monotonic() > kept + KEEP:
                keep(results)
                kept = time.monotonic()
    return results


def run_asked(
    asked: Callable[[dict[C, N]], Iterable[C]],
    jobs: int,
    work: Callable[[C], N],
    known: Known[N] | None,
    keep: Callable[[dict[C, N]], None],
) -> dict[C, N]:
    """What is asked for, given what there is, until nothing new is. known: not run again; keep: as
    `run_all` has it, and at the end."""
    results: dict[C, N] = {}
    while new := set(asked(results)) - set(results):
        kept = partial(_keep_both, keep, results)
        results |= run_all(new, jobs, work, known.of(new) if known else None, kept)
        keep(results)
    return results


def _keep_both(keep: Callable[[dict[C, N]], None], done: dict[C, N], now: dict[C, N]) -> None:
    keep(done | now)


def dump(results: Mapping[C, Any], path: Path) -> None:
    """The numbers, which are dataclasses, as JSON, one line a run, in a fixed order."""
    rows = [{"case": case.named(), "numbers": asdict(n)} for case, n in results.items()]
    lines = sorted(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


class Known(Generic[N]):
    """What `dump` wrote. ValueError if the file is something else."""

    def __init__(self, path: Path, numbers: Callable[..., N]) -> None:
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            self._found = {_key(row["case"]): numbers(**row["numbers"]) for row in rows}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not the numbers of an earlier run ({error})") from error

    def of(self, cases: Iterable[C]) -> dict[C, N]:
        """Those of the cases that are in it."""
        keys = {case: _key(case.named()) for case in cases}
        return {case: self._found[key] for case, key in keys.items() if key in self._found}


def _key(named: dict[str, Any]) -> str:
    return json.dumps(named, sort_keys=True)
