"""The three measurements: offline throughput, single-stream latency, open-loop load; and the times
of the engine's own steps during them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.bench import load_target
from jaxserve.engine.stats import StepStats
from jaxserve.sched.request import Rule, Tier
from jaxserve.sched.slo.metrics import load_metrics, summarise
from jaxserve.simulator.workloads.workload import Workload, all_at_once, fixed_lengths


def throughput(
    target: load_target.Target, count: int, input_len: int, output_len: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Submits random requests at once, best-effort and without targets, and measures from the first
    submission to the last token.

    Args:
        target: serves the requests.
        count: number of requests.
        input_len: prompt tokens of each.
        output_len: output tokens of each.
        repeats: number of runs.
        seed: seed of the prompts.

    Returns:
        Rates of output tokens, and of prompt and output tokens, and seconds: each with its median
            and its values.
    """
    workload, rng = _all_at_once(count, input_len, output_len), np.random.default_rng(seed)
    workload = replace(workload, tier=np.full_like(workload.tier, Tier.BEST_EFFORT))
    seconds = []
    for _ in range(repeats):
        start, records = load_target.serve_all(target, workload, rng)
        seconds.append(load_target.last_token(records) - start)
    return {
        "output_tokens_per_s": _values([count * output_len / s for s in seconds]),
        "total_tokens_per_s": _values([count * (input_len + output_len) / s for s in seconds]),
        "seconds": _values(seconds),
    }


def latency(
    target: load_target.Target, count: int, input_len: int, output_len: int, seed: int
) -> dict[str, Any]:
    """Sends random requests, each when the one before is done.

    Args:
        target: serves the requests.
        count: number of requests.
        input_len: prompt tokens of each.
        output_len: output tokens of each.
        seed: seed of the prompts.

    Returns:
        TTFT, end-to-end latency, output rate and TPOT, each with its median and its values, one for
            each request. TPOT is the mean time between a request's tokens; None for one token.
    """
    one, rng = _all_at_once(1, input_len, output_len), np.random.default_rng(seed)
    due, served = [], []
    for _ in range(count):
        start, records = load_target.serve_all(target, one, rng)
        due.append(start)
        served += records
    found = load_target.times(np.array(due), served)
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


def load(
    target: load_target.Target,
    workload: Workload,
    seed: int,
    rule: Rule = Rule.SERVER,
    served: np.ndarray | None = None,
) -> dict[str, Any]:
    """Sends every request at its arrival time, whatever happened to earlier ones, with its own
    tier, SLO and max_tokens; a call of a program after those that it waits for. Refused and failed
    requests are counted, and miss their SLO; calls that never come after them are not counted.

    Args:
        target: Serves the requests.
        workload: The requests.
        seed: Seed of the prompts.
        rule: When a request attains its SLO.
        served: float64 [n], seconds of each request on an idle target, for the slowdown of
            programs; None if not known.

    Raises:
        BenchError: The target cannot serve one of the requests.
    """
    info = target.info()
    load_target.check_fits(workload, info)
    jobs = load_target.random_jobs(workload, info["vocab_size"], np.random.default_rng(seed))
    driven = load_target.drive(target, jobs, workload, served)
    records, due = driven.records, driven.start + driven.arrival
    outcomes = [record.outcome for record in records]
    span = float(driven.arrival[-1])
    programs = {} if driven.programs is None else {"programs": driven.programs.summary()}
    return {
        "requests": {name: outcomes.count(name) for name in ("finished", "rejected", "failed")},
        "first_error": next((r.error for r in records if r.error), None),
        "offered_per_s": len(records) / span if span > 0 else None,
        **load_metrics(
            load_target.times(due, records), workload.terms.select(np.array(driven.came)), rule
        ),
        **programs,
        "preemptions": sum(record.preemptions for record in records),
        "sent_late_ms": summarise([r.sent - d for r, d in zip(records, due, strict=True)], 1e3),
    }


def warm_up(
    target: load_target.Target, count: int, input_len: int, output_len: int, seed: int
) -> None:
    """Serves the same kind of work as `throughput`, once and unmeasured, from other prompts.

    Args:
        target, count, input_len, output_len, seed: see `throughput`.

    Raises:
        BenchError: a request was not served.
    """
    load_target.serve_all(
        target, _all_at_once(count, input_len, output_len), np.random.default_rng((seed, 1))
    )


def _all_at_once(count: int, input_len: int, output_len: int) -> Workload:
    """`count` requests of one shape whose limit is their output length."""
    lengths = fixed_lengths(input_len, output_len, count)
    return Workload.create(all_at_once(count), lengths, limit=lengths.output_len)


def _values(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "values": values}


def step_metrics(steps: Sequence[StepStats]) -> dict[str, Any]:
    """Times of all steps, of steps that only decode, of steps with prompt tokens, and of the decode
    steps with the largest number of rows."""
    decode = [s for s in steps if s.num_decodes == s.num_rows]
    most = max((s.num_rows for s in decode), default=0)
    return {
        "all": _group(steps),
        "decode": _group(decode),
        "with_prefill": _group([s for s in steps if s.num_decodes < s.num_rows]),
        "fullest_decode": {"rows": most, **_group([s for s in decode if s.num_rows == most])},
        "preemptions": sum(s.preemptions for s in steps),
        "padded_tokens": sum(s.padded_tokens - s.num_tokens for s in steps),
    }


def _group(steps: Sequence[StepStats]) -> dict[str, Any]:
    return {
        "count": len(steps),
        "step_ms": summarise([s.step_time for s in steps], 1e3),
        "host_ms": summarise([s.host_time for s in steps], 1e3),
    }
