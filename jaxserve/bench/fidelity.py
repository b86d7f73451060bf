"""How well the simulator predicts the engine: `python -m jaxserve.bench fidelity`.

Profiles the engine's steps, simulates some loads with the same policy, limits and block pool, then
serves the same loads for real, each several times, and compares total time, TTFT and TBT (InferMax
section 4.7).
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxserve.bench.runs import warm_up
from jaxserve.bench.target import EngineTarget, check_fits, drive, must_finish, random_jobs
from jaxserve.machine import machine, versions
from jaxserve.profile import build, host_ms, measure_host, profile_engine
from jaxserve.sched.simulation.profiles import System
from jaxserve.sched.simulation.simulator import simulate
from jaxserve.sched.workloads.workload import (
    Lengths,
    Workload,
    all_at_once,
    fixed_lengths,
    poisson_arrivals,
)

MEASURES = ("total_s", "mean_ttft_s", "mean_tbt_s")


@dataclass(frozen=True)
class Load:
    """A workload, and what to call it."""

    name: str
    workload: Workload


def loads(num_requests: int, max_len: int, rate: float | None, seed: int) -> list[Load]:
    """Five offline loads of different make, and with a rate an online one.
    Lengths are shares of max_len, the longest request."""

    def of(arrival: np.ndarray, lengths: Lengths) -> Workload:
        # Served for real, a request gets max_tokens.
        return Workload.of(arrival, lengths, limit=lengths.output_len)

    shapes = {
        "short in, short out": (0.05, 0.10),
        "short in, long out": (0.05, 0.40),
        "long in, short out": (0.40, 0.10),
        "long in, long out": (0.40, 0.40),
    }
    found = [
        Load(
            name,
            of(
                all_at_once(num_requests),
                fixed_lengths(max(1, int(i * max_len)), max(2, int(o * max_len)), num_requests),
            ),
        )
        for name, (i, o) in shapes.items()
    ]
    rng = np.random.default_rng((seed, 3))
    top = max(3, int(0.45 * max_len))
    mixed = Lengths(rng.integers(1, top, num_requests), rng.integers(2, top, num_requests))
    found.append(Load("mixed lengths", of(all_at_once(num_requests), mixed)))
    if rate is not None:
        arrival = poisson_arrivals(rate, num_requests, rng)
        found.append(Load(f"mixed, {rate:g} requests/s", of(arrival, mixed)))
    return found


def run(
    config: ConfigDict, *, num_requests: int, rate: float | None, seed: int, repeats: int = 3
) -> dict[str, Any]:
    """The JSON object of the command; what is compared is the median of the repeats. Raises
    ConfigError, FitError, WorkloadError, BenchError."""
    where, show = machine(), sys.stderr.isatty()
    config.scheduler.max_queue = max(config.scheduler.max_queue, num_requests)
    engine = build(config, progress=show)
    try:
        system, _, samples = profile_engine(
            engine, lambda work: tqdm(work, desc="measuring", unit="round", disable=not show)
        )
        system = dataclasses.replace(system, host=measure_host(engine, system))
        target = EngineTarget(engine)
        info = target.info()
        longest = min(info["max_model_len"], info["pool_tokens"])
        warm_up(target, 2, 8, 4, seed)
        rows = []
        for load in loads(num_requests, longest, rate, seed):
            check_fits(load.workload, info)
            predicted = predict(load.workload, system, config, engine)
            served = [
                measure(load.workload, target, info["vocab_size"], seed) for _ in range(repeats)
            ]
            rows.append(_compare(load.name, predicted, served))
    finally:
        engine.stop()
    totals = [row["error"]["total_s"] for row in rows]
    return {
        "command": "fidelity",
        "loads": rows,
        "mean_error_of_total": float(np.mean(totals)),
        "worst_error_of_total": float(np.max(totals)),
        "profile": {**system.about, "host_ms": host_ms(system.host), "shapes": len(samples)},
        "model": info,
        "config": config.to_dict(),
        "machine": where,
        "versions": versions(),
    }


def predict(
    workload: Workload, system: System, config: ConfigDict, engine: Any
) -> dict[str, float]:
    """MEASURES by simulation."""
    scheduler = engine._scheduler
    result = simulate(
        engine.info().policy,
        workload,
        system,
        limits=scheduler.view.limits,
        num_blocks=scheduler.pool.num_blocks,
        block_size=scheduler.pool.block_size,
        overlap=config.engine.overlap,
    )
    tbt, _ = result.requests.tbt
    return {
        "total_s": float(result.requests.finish.max()),
        "mean_ttft_s": float(result.requests.ttft.mean()),
        "mean_tbt_s": float(tbt.mean()),
    }


def measure(
    workload: Workload, target: EngineTarget, vocab_size: int, seed: int
) -> dict[str, float]:
    """MEASURES by serving."""
    jobs = random_jobs(workload, vocab_size, np.random.default_rng(seed))
    start, records = drive(target, jobs, workload.arrival)
    must_finish(jobs, records)
    times = [np.array(record.token_times) - start for record in records]
    return {
        "total_s": float(max(t[-1] for t in times)),
        "mean_ttft_s": float(np.mean([t[0] for t in times] - workload.arrival)),
        "mean_tbt_s": float(np.concatenate([np.diff(t) for t in times]).mean()),
    }


def _compare(
    name: str, predicted: dict[str, float], served: list[dict[str, float]]
) -> dict[str, Any]:
    measured = {m: float(np.median([one[m] for one in served])) for m in MEASURES}
    errors = {m: abs(predicted[m] - measured[m]) / measured[m] for m in MEASURES}
    return {
        "load": name,
        "predicted": predicted,
        "measured": measured,
        "repeats": served,
        "error": errors,
    }


def text(result: dict[str, Any]) -> str:
    """The comparison for people."""
    info, where, profile = result["model"], result["machine"], result["profile"]
    r2 = ", ".join(f"{name} {value:.3f}" for name, value in profile["r2"].items())
    lines = [
        f"fidelity: {info['model']} ({info['dtype']}, {info['device']}), policy {info['policy']}",
        f"on {where['cpu']}, {where['cores']} cores, load {where['load_average']}",
        f"  cost model from {profile['shapes']} shapes: R^2 {r2}; left-out error "
        f"{profile['leave_out_error']:.1%}; host {profile['host_ms']} ms",
        f"  {'predicted / measured (error)':<28} {'total, s':>24} {'TTFT, ms':>26} {'TBT, ms':>24}",
    ]
    for row in result["loads"]:
        cells = []
        for name, scale in zip(MEASURES, (1, 1e3, 1e3), strict=True):
            pair = f"{scale * row['predicted'][name]:.2f} / {scale * row['measured'][name]:.2f}"
            cells.append(f"{pair} ({row['error'][name]:.1%})")
        lines.append(f"  {row['load']:<28} {cells[0]:>24} {cells[1]:>26} {cells[2]:>24}")
    lines.append(
        f"  error of total time: mean {result['mean_error_of_total']:.1%}, worst "
        f"{result['worst_error_of_total']:.1%}"
    )
    return "\n".join(lines)
