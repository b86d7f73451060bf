"""The three measurements: offline throughput, single-stream latency, open-loop load."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from jaxserve.bench.load_target import (
    Target,
    check_fits,
    drive,
    must_finish,
    random_jobs,
    times,
)
from jaxserve.sched.slo.metrics import load_metrics, summarise
from jaxserve.sched.workloads.workload import Workload, all_at_once, fixed_lengths


def throughput(
    target: Target, count: int, input_len: int, output_len: int, repeats: int, seed: int
) -> dict[str, Any]:
    """`count` random requests submitted at once, `repeats` times; seconds are from the first
    submission to the last token. Rates are of output tokens, and of prompt and output tokens."""
    info = target.info()
    workload = _all_at_once(count, input_len, output_len)
    check_fits(workload, info)
    rng = np.random.default_rng(seed)
    seconds = []
    for _ in range(repeats):
        jobs = random_jobs(workload, info["vocab_size"], rng)
        start, records = drive(target, jobs, workload.arrival)
        must_finish(jobs, records)
        seconds.append(max(record.token_times[-1] for record in records) - start)
    return {
        "output_tokens_per_s": _values([count * output_len / s for s in seconds]),
        "total_tokens_per_s": _values([count * (input_len + output_len) / s for s in seconds]),
        "seconds": _values(seconds),
    }


def latency(
    target: Target, count: int, input_len: int, output_len: int, seed: int
) -> dict[str, Any]:
    """`count` random requests, each sent when the one before is done. TPOT: time between tokens
    after the first, averaged over a request."""
    info = target.info()
    workload = _all_at_once(count, input_len, output_len)
    check_fits(workload, info)
    rng = np.random.default_rng(seed)
    due, served = [], []
    for job in random_jobs(workload, info["vocab_size"], rng):
        start, records = drive(target, [job], np.zeros(1))
        must_finish([job], records)
        due.append(start)
        served += records
    found = times(np.array(due), served)
    result: dict[str, Any] = {
        "ttft_ms": _values((found.ttft * 1e3).tolist()),
        "e2e_ms": _values((found.e2e * 1e3).tolist()),
        "output_tokens_per_s": _values((output_len / found.e2e).tolist()),
        "tpot_ms": None,
    }
    if output_len > 1:
        tbt, _ = found.tbt
        result["tpot_ms"] = _values((tbt.reshape(count, -1).mean(axis=1) * 1e3).tolist())
    return result


def load(target: Target, workload: Workload, seed: int) -> dict[str, Any]:
    """Every request at its arrival time, whatever became of those before, with its own tier, SLO
    and max_tokens. Refused and failed requests are counted, and miss their SLO. seed: of the
    prompts. BenchError if the target cannot serve one of them."""
    info = target.info()
    check_fits(workload, info)
    jobs = random_jobs(workload, info["vocab_size"], np.random.default_rng(seed))
    start, records = drive(target, jobs, workload.arrival)
    due = start + workload.arrival
    outcomes = [record.outcome for record in records]
    span = float(workload.arrival[-1])
    return {
        "requests": {name: outcomes.count(name) for name in ("finished", "rejected", "failed")},
        "first_error": next((r.error for r in records if r.error), None),
        "offered_per_s": len(jobs) / span if span > 0 else None,
        **load_metrics(times(due, records), workload.terms),
        "preemptions": sum(record.preemptions for record in records),
        "sent_late_ms": summarise([r.sent - d for r, d in zip(records, due, strict=True)], 1e3),
    }


def warm_up(target: Target, count: int, input_len: int, output_len: int, seed: int) -> None:
    """The same kind of work before what is measured. Raises as the measurement would."""
    info = target.info()
    workload = _all_at_once(count, input_len, output_len)
    check_fits(workload, info)
    jobs = random_jobs(workload, info["vocab_size"], np.random.default_rng((seed, 1)))
    _, records = drive(target, jobs, workload.arrival)
    must_finish(jobs, records)


def _all_at_once(count: int, input_len: int, output_len: int) -> Workload:
    """`count` requests of one shape that ask for as much as they write."""
    lengths = fixed_lengths(input_len, output_len, count)
    return Workload.create(all_at_once(count), lengths, limit=lengths.output_len)


def _values(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "values": values}
