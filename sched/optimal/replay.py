"""Schedules as data: which request computes how many tokens in which batch, and their replay.

A schedule may come from a constraint program (`solve`), from a policy (`Problem.record`) or from
anywhere else. `replay` runs it through the same `Scheduler`, block pool and cost model that
policies run on; a schedule that breaks a limit raises InvalidPlan there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import CostModel
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import State
from jaxserve.sched.workloads.workload import Workload


class ReplayError(ValueError):
    """A schedule that does not serve its workload; one line says what is missing."""


@dataclass(frozen=True)
class Schedule:
    """b batches of n requests, numbered as in the workload.

    tokens: int64 [b, n], how many of its tokens each request computes (c of InferMax section 5).
    preempt: bool [b, n], who loses its cache before the batch (e).
    """

    tokens: np.ndarray
    preempt: np.ndarray

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape != self.preempt.shape:
            raise ReplayError(
                f"tokens {self.tokens.shape} and preempt {self.preempt.shape} must be one matrix "
                "each"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def preemptions(self) -> int:
        """How often a request loses its cache."""
        return int(self.preempt.sum())


class ScriptedPolicy(Policy):
    """Plans the batches of a schedule, one after the other. It waits for a batch's requests to
    have arrived. Requests must be added in the order of the workload, to one scheduler."""

    chunked = True
    hypothetical = True

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.next_batch = 0

    def plan(self, view: View, now: float) -> BatchPlan:
        """The next batch of the schedule; an empty one until its requests have arrived, and after
        the last."""
        if self.next_batch == len(self.schedule):
            return BatchPlan()
        tokens = self.schedule.tokens[self.next_batch]
        preempt = np.flatnonzero(self.schedule.preempt[self.next_batch])
        table = view.table
        live = np.flatnonzero((table.state == State.WAITING) | (table.state == State.RUNNING))
        row_of = dict(zip(table.seq[live].tolist(), live.tolist(), strict=True))
        members = np.flatnonzero(tokens)
        if any(i not in row_of for i in members.tolist()):
            return BatchPlan()  # somebody has yet to arrive
        self.next_batch += 1
        rows = np.array([row_of[i] for i in members.tolist()], np.int64)
        count = tokens[members]
        kinds = np.full(len(rows), CacheKind.KV, np.int64)
        gone = np.array([row_of[i] for i in preempt.tolist() if i in row_of], np.int64)
        operations = (Preempt.whole(gone),) if len(gone) else ()
        return BatchPlan(rows, count, table.computed[rows] + count, kinds, operations)


@dataclass(frozen=True)
class Replay:
    """What happened in b batches of n requests. Times in seconds on the workload's clock.

    start, duration: float64 [b]. kv_used: int64 [b], tokens for which blocks were held during the
    batch. decoding: bool [b, n], which of the requests in a batch were decodes. kv: int64 [b, n],
    tokens of each request in the cache. first_token, finish: float64 [n].
    """

    workload: Workload
    schedule: Schedule
    start: np.ndarray
    duration: np.ndarray
    kv_used: np.ndarray
    decoding: np.ndarray
    kv: np.ndarray
    first_token: np.ndarray
    finish: np.ndarray

    @property
    def latency(self) -> float:
        """Seconds: the sum of the batch times, what the simulator calls latency_s."""
        return float(self.duration.sum())

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last batch."""
        return float(self.start[-1] + self.duration[-1])

    @property
    def mean_ttft(self) -> float:
        """Mean seconds from a request's arrival to its first token."""
        return float((self.first_token - self.workload.arrival).mean())


class _Batch(NamedTuple):
    """One of those that `Replay` holds; its arrays are [n]."""

    tokens: np.ndarray
    preempt: np.ndarray
    start: float
    duration: float
    kv_used: int
    decoding: np.ndarray
    kv: np.ndarray


def run(
    policy: Policy,
    workload: Workload,
    cost_model: CostModel,
    *,
    limits: Limits,
    kv_tokens: int,
    block_size: int = 1,
) -> Replay:
    """Serves the workload with a policy, one batch after the other, on the engine's own scheduler.

    kv_tokens: M. For small workloads: everything is kept; `simulator.simulate` is for large ones.
    ReplayError if the policy stops before every request has ended, InvalidPlan if it breaks a
    limit.
    """
    lengths = workload.prompt_len + workload.output_len
    scheduler = Scheduler(
        policy,
        limits,
        num_blocks=int(blocks_for(kv_tokens // block_size * block_size, block_size)),
        block_size=block_size,
        max_model_len=int(lengths.max()),
        capacity=len(workload),
        cost_model=cost_model,
    )
    first_token, finish = np.full((2, len(workload)), np.nan)
    batches: list[_Batch] = []
    now, added = 0.0, 0
    while np.isnan(finish).any():
        while added < len(workload) and workload.arrival[added] <= now:
            scheduler.add(_request(workload, added), int(workload.output_len[added]))
            added += 1
        batch = _step(scheduler, cost_model, now, first_token, finish)
        if batch is not None:
            batches.append(batch)
            now += batch.duration
        elif added < len(workload):
            now = float(workload.arrival[added])
        else:
            left = int(np.isnan(finish).sum())
            raise ReplayError(f"after {len(batches)} batches {left} requests have not ended")
    fields = map(np.array, zip(*batches, strict=True))
    tokens, preempt, start, duration, kv_used, decoding, kv = fields
    schedule, ends = Schedule(tokens, preempt), (first_token, finish)
    return Replay(workload, schedule, start, duration, kv_used, decoding, kv, *ends)


def replay(
    schedule: Schedule,
    workload: Workload,
    cost_model: CostModel,
    *,
    limits: Limits,
    kv_tokens: int,
    block_size: int = 1,
) -> Replay:
    """`run` with a schedule in place of a policy. A batch starts when the one before it has ended
    and its requests have arrived. Raises ReplayError also for a schedule of another number of
    requests, or with batches after the end."""
    if schedule.tokens.shape[1] != len(workload):
        raise ReplayError(
            f"the schedule is for {schedule.tokens.shape[1]} requests, not {len(workload)}"
        )
    policy = ScriptedPolicy(schedule)
    played = run(
        policy, workload, cost_model, limits=limits, kv_tokens=kv_tokens, block_size=block_size
    )
    if policy.next_batch < len(schedule):
        raise ReplayError(
            f"all requests have ended after {policy.next_batch} of {len(schedule)} batches"
        )
    return played


def _request(workload: Workload, index: int) -> Request:
    return Request(
        str(index),
        (0,) * int(workload.prompt_len[index]),
        SamplingParams(max_tokens=int(workload.output_len[index]), ignore_eos=True),
        arrival=float(workload.arrival[index]),
    )


def _step(
    scheduler: Scheduler, cost: CostModel, now: float, first_token: np.ndarray, finish: np.ndarray
) -> _Batch | None:
    """One batch, None if the policy has nothing to do. Writes down whose first token it gives, and
    who ends."""
    table = scheduler.table
    step = scheduler.schedule(now)
    if not len(step):
        return None

    def line(rows: np.ndarray, values: np.ndarray | bool) -> np.ndarray:
        found = np.zeros(len(finish), np.asarray(values).dtype)
        found[table.seq[rows]] = values
        return found

    rows, running = step.rows, table.in_state(State.RUNNING)
    batch = _Batch(
        tokens=line(rows, step.plan.num_tokens),
        preempt=line(step.preempted, True),
        start=now,
        duration=float(cost.batch_time(step.features())),
        kv_used=int(scheduler.pool.as_tokens(scheduler.pool.num_used)),
        decoding=line(rows, step.decodes),
        kv=line(running, table.computed[running]),
    )
    end = now + batch.duration
    first_token[table.seq[rows[step.emits & (step.generated == 1)]]] = end
    done = scheduler.release_finished(step)
    finish[table.seq[done]] = end
    scheduler.receive(step.emitting, end)
    for row in done.tolist():
        scheduler.finish(row)
    return batch
