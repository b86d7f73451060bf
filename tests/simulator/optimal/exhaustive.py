"""The best schedule by looking at all of them: shortest paths over the states of two or three
requests. Shares nothing with the constraint program but the cost model."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.simulator.optimal.solve import Problem

# One request: tokens written, tokens cached. All requests: a tuple of them.
State = tuple[tuple[int, int], ...]


def best(problem: Problem) -> float:
    """The smallest objective, in seconds."""
    workload = problem.workload
    count = len(workload)
    start: State = ((0, 0),) * count
    heap = [(0.0, 0.0, start)]  # what the objective has come to, the time, the state
    earliest: dict[State, float] = {}
    while heap:
        spent, now, state = heapq.heappop(heap)
        if earliest.get(state, np.inf) <= now:
            continue  # reached for less, and not later
        earliest[state] = now
        written = np.array([done for done, _ in state])
        if (written == workload.output_len).all():
            return spent / (count if problem.objective == "mean_ttft" else 1)
        for seconds, ready, after in _batches(problem, state):
            end = max(now, ready) + seconds
            first = (written == 0) & np.array([done > 0 for done, _ in after])
            if problem.objective == "latency":
                step, end = seconds, 0.0  # the time does not matter
            elif problem.objective == "makespan":
                step = end - now
            else:
                step = float((end - workload.arrival[first]).sum())
            heapq.heappush(heap, (spent + step, end, after))
    raise AssertionError("no schedule ends")


def _batches(problem: Problem, state: State) -> Iterator[tuple[float, float, State]]:
    """Every batch that may follow: its seconds, when its requests have arrived, and the state it
    leaves."""
    workload = problem.workload
    choices = [
        list(_choices(problem, i, written, cached)) for i, (written, cached) in enumerate(state)
    ]
    for batch in itertools.product(*choices):
        tokens = np.array([c for c, _ in batch])
        if not tokens.any() or tokens.sum() > problem.max_batch_tokens:
            continue
        size = problem.block_size
        blocks = sum(-(-cached // size) for _, (_, cached) in batch)
        if blocks > problem.kv_tokens // size:
            continue
        known = workload.prompt_len + [written for written, _ in state]
        before = np.array([cached for _, cached in state])
        decoding = (known - before == 1) & np.array([written > 0 for written, _ in state])
        if tokens[~decoding].sum() > problem.prefill_tokens:
            continue
        ran = tokens > 0
        features = BatchFeatures.from_rows(tokens[ran], before[ran], decoding[ran])
        after = tuple(
            (written, 0 if written == out else cached)
            for (_, (written, cached)), out in zip(batch, workload.output_len, strict=True)
        )
        seconds = float(problem.cost_model.batch_time(features))
        yield seconds, float(workload.arrival[ran].max()), after


def _choices(
    problem: Problem, i: int, written: int, cached: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """What request i may do in a batch: tokens computed, and (written, cached) in the batch."""
    yield 0, (written, cached)
    if cached:
        yield 0, (written, 0)
    if written == problem.workload.output_len[i]:
        return
    pending = int(problem.workload.prompt_len[i]) + written - cached
    if problem.chunked:
        for part in range(1, pending):
            yield part, (written, cached + part)
    yield pending, (written + 1, cached + pending)
