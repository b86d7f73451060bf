"""A simulation in the trace-event format, for chrome://tracing and Perfetto.

Source: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.request import Tier
from jaxserve.simulator.results import SimulationResult

QUEUED, PREFILL, DECODE, PREEMPTED = "queued", "prefill", "decode", "preempted"
Event = dict[str, Any]


def write_trace(result: SimulationResult, path: Path, about: Mapping[str, Any]) -> None:
    """Writes the trace as a JSON object, an event per line. about: what was simulated, stored as
    `otherData`. ValueError if the result has no rows (`record_rows`)."""
    events = trace_events(result)
    head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)})
    with open(path, "w", encoding="utf-8") as file:
        between = head[:-1] + ', "traceEvents": [\n'
        for event in events:
            file.write(between + json.dumps(event))
            between = ",\n"
        file.write("\n]}\n")


def trace_events(result: SimulationResult) -> Iterator[Event]:
    """A process per replica, with a track of its steps and a counter of the cache it uses, in
    tokens; and one process with a track per request: the request, from arrival to last token, and
    within it when it was queued, prefilled (again, after a preemption), decoded, and preempted; for
    a refused one, only that. Times in microseconds. For results with `record_rows`; ValueError
    otherwise."""
    if result.rows is None:
        raise ValueError("a trace needs a simulation with record_rows")
    replicas = len(result.rows)
    steps = (_steps(result, replica) for replica in range(replicas))
    return itertools.chain(*steps, _requests(result, process=replicas))


def _steps(result: SimulationResult, replica: int) -> Iterator[Event]:
    yield _name("process_name", replica, 0, f"replica {replica}")
    yield _name("thread_name", replica, 0, "steps")
    batches = result.batches
    mine = np.flatnonzero(batches.replica == replica)
    if not len(mine):
        return
    start = _nanoseconds(batches.start[mine])
    end = _nanoseconds(batches.start[mine] + batches.duration[mine])
    end[:-1] = np.minimum(end[:-1], start[1:])  # rounding may add a nanosecond
    shapes = {
        "tokens": batches.num_tokens,
        "decodes": batches.num_decodes,
        "prefills": batches.num_prefills,
        "hidden": batches.num_hidden,
        "preempted": batches.preemptions,
    }
    columns = zip(*(column[mine].tolist() for column in shapes.values()), strict=True)
    used, before = batches.kv_used[mine].tolist(), -1
    for i, (begin, stop, values) in enumerate(
        zip(start.tolist(), end.tolist(), columns, strict=True)
    ):
        args = dict(zip(shapes, values, strict=True))
        kind = PREFILL if not args["decodes"] else "mixed" if args["prefills"] else DECODE
        yield _slice(kind, replica, 0, begin, stop, {"step": i, **args})
        if used[i] != before:
            before = used[i]
            yield _counter(replica, begin, before)
    yield _counter(replica, int(end[-1]), 0)


def _requests(result: SimulationResult, process: int) -> Iterator[Event]:
    requests, workload = result.requests, result.requests.workload
    arrival, refused = _nanoseconds(requests.arrival), requests.refused
    finish = _nanoseconds(np.where(refused, requests.arrival, requests.left))
    facts = {
        "prompt_tokens": workload.prompt_len.tolist(),
        "output_tokens": workload.output_len.tolist(),
        "tier": [Tier(tier).name.lower() for tier in workload.tier.tolist()],
        "class": [workload.classes[index] for index in workload.slo_class.tolist()],
        "replica": requests.replica.tolist(),
        "preemptions": requests.preemptions.tolist(),
        "ttft_ms": [None if ms != ms else ms for ms in (1e3 * requests.ttft).tolist()],
    }
    yield _name("process_name", process, 0, "requests")
    for number, phases in enumerate(request_phases(result)):
        args = {name: column[number] for name, column in facts.items()}
        start, end = int(arrival[number]), int(finish[number])
        yield _name("thread_name", process, number, f"request {number}")
        if refused[number]:
            at = {"pid": process, "tid": number, "ts": start / 1000}
            yield {"name": "refused", "ph": "i", "s": "t", **at}
            continue
        yield _slice("request", process, number, start, end, args)
        begins = _nanoseconds(np.array([at for _, at in phases])).tolist()
        bounds = itertools.pairwise([*begins, end])
        for (name, _), (begin, stop) in zip(phases, bounds, strict=True):
            if stop > begin:
                yield _slice(name, process, number, begin, stop, {})


def request_phases(result: SimulationResult) -> list[list[tuple[str, float]]]:
    """The history of each request: phases with the time at which each begins, seconds, ascending;
    the first begins with its arrival, the last ends with its last token, or where the run was cut
    off."""
    assert result.rows is not None
    finish = result.requests.left.tolist()
    phases = [[(QUEUED, arrival)] for arrival in result.requests.arrival.tolist()]
    computed = [0.0] * len(phases)  # time of each request's last chunk
    for replica, rows in enumerate(result.rows):
        mine = result.batches.replica == replica
        start = result.batches.start[mine]
        end = (start + result.batches.duration[mine]).tolist()
        for batch, begin, stop in zip(rows, start.tolist(), end, strict=True):
            for number in batch.preempted.tolist():
                if begin < finish[number]:
                    phases[number].append((PREEMPTED, begin))
            who = zip(batch.requests.tolist(), batch.decoding.tolist(), strict=True)
            for number, decoding in who:
                if begin >= finish[number]:
                    continue  # its last token was still in flight
                phase = phases[number][-1][0]
                if not decoding:
                    computed[number] = stop
                    if phase != PREFILL:
                        phases[number].append((PREFILL, begin))
                elif phase != DECODE:
                    since = computed[number] if phase == PREFILL else begin
                    phases[number].append((DECODE, since))
    return phases


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Whole nanoseconds, so that adjacent times are equal."""
    return np.rint(seconds * 1e9).astype(np.int64)


def _slice(name: str, pid: int, tid: int, start: int, end: int, args: Event) -> Event:
    """start, end: nanoseconds."""
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, **times, "args": args}


def _counter(pid: int, at: int, tokens: int) -> Event:
    args = {"tokens": tokens}
    return {"name": "KV cache", "ph": "C", "pid": pid, "tid": 0, "ts": at / 1000, "args": args}


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
