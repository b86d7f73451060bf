"""The three measurements: offline throughput, single-stream latency, open-loop load."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.bench.target import (
    Job,
    Record,
    Target,
    check_fits,
    drive,
    must_finish,
    random_jobs,
    times,
)
from jaxserve.sched.metrics import load_metrics, summarise
from jaxserve.sched.request import SLO
from jaxserve.sched.workloads.workload import Workload, all_at_once, fixed_lengths

NO_SLO = SLO()


def throughput(
    target: Target, count: int, input_len: int, output_len: int, repeats: int, seed: int
) -> dict[str, Any]:
    """`count` random requests submitted at once, `repeats` times; seconds are from the first
    submission to the last token. Rates are of output tokens, and of prompt and output tokens."""
    info = target.info()
    workload = Workload.of(all_at_once(count), fixed_lengths(input_len, output_len, count))
    check_fits(workload, info)
    rng = np.random.default_rng(seed)
    seconds = []
    for _ in range(repeats):
        jobs = random_jobs(workload, info["vocab_size"], rng)
        start, records = drive(target, jobs, workload.arrival, NO_SLO)
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
    workload = Workload.of(all_at_once(count), fixed_lengths(input_len, output_len, count))
    check_fits(workload, info)
    rng = np.random.default_rng(seed)
    served = []
    for job in random_jobs(workload, info["vocab_size"], rng):
        start, records = drive(target, [job], np.zeros(1), NO_SLO)
        must_finish([job], records)
        served.append(times(start, records[0]))
    result: dict[str, Any] = {
        "ttft_ms": _values([r.ttft * 1e3 for r in served]),
        "e2e_ms": _values([r.e2e * 1e3 for r in served]),
        "output_tokens_per_s": _values([output_len / r.e2e for r in served]),
        "tpot_ms": None,
    }
    if output_len > 1:
        result["tpot_ms"] = _values([float(r.tbt.mean()) * 1e3 for r in served])
    return result


def load(target: Target, workload: Workload, slo: SLO, seed: int) -> dict[str, Any]:
    """Every request at its arrival time, whatever became of those before. Refused and failed
    requests are counted, and miss their SLO."""
    info = target.info()
    check_fits(workload, info)
    jobs = random_jobs(workload, info["vocab_size"], np.random.default_rng(seed))
    start, records = drive(target, jobs, workload.arrival, slo)
    due = start + workload.arrival
    requests = [times(d, record) for d, record in zip(due.tolist(), records, strict=True)]
    outcomes = [record.outcome for record in records]
    span = float(workload.arrival[-1])
    return {
        "requests": {name: outcomes.count(name) for name in ("finished", "rejected", "failed")},
        "first_error": next((r.error for r in records if r.error), None),
        "offered_per_s": len(jobs) / span if span > 0 else None,
        **load_metrics(requests, slo),
        "preemptions": sum(record.preemptions for record in records),
        "sent_late_ms": summarise([r.sent - d for r, d in zip(records, due, strict=True)], 1e3),
    }


def warm_up(target: Target, count: int, input_len: int, output_len: int, seed: int) -> None:
    """The same kind of work before what is measured. Raises as the measurement would."""
    info = target.info()
    workload = Workload.of(all_at_once(count), fixed_lengths(input_len, output_len, count))
    check_fits(workload, info)
    jobs: Sequence[Job] = random_jobs(
        workload, info["vocab_size"], np.random.default_rng((seed, 1))
    )
    records: Sequence[Record]
    _, records = drive(target, jobs, workload.arrival, NO_SLO)
    must_finish(jobs, records)


def _values(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "values": values}
