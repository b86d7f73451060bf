"""Schedules as data (the tokens that each request computes in each batch), and their replay.

A schedule may come from a constraint program (`solve`), from a policy (`Problem.record`) or from
anywhere else. `replay` runs it through the same `Scheduler`, block pool and cost model that
policies run on; a schedule that breaks a limit raises InvalidPlan there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import CostModel
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import State
from jaxserve.simulator.workloads.workload import Workload


class ReplayError(ValueError):
    """A schedule that does not serve its workload; the message says what is missing."""


@dataclass(frozen=True)
class Schedule:
    """b batches of n requests, numbered as in the workload.

    Attributes:
        tokens: int64 [b, n], tokens that each request computes (c of InferMax section 5).
        preempt: bool [b, n], requests that lose their cache before the batch (e).

    Raises:
        ReplayError: The shapes differ.
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
        """Preemptions in all batches."""
        return int(self.preempt.sum())


class ScriptedPolicy(Policy):
    """Plans the batches of a schedule, one after the other, each once its requests have arrived.
    Requests must be added to one scheduler, in the order of the workload."""

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
            return BatchPlan()  # a request has yet to arrive
        self.next_batch += 1
        rows = np.array([row_of[i] for i in members.tolist()], np.int64)
        count = tokens[members]
        kinds = np.full(len(rows), CacheKind.KV, np.int64)
        gone = np.array([row_of[i] for i in preempt.tolist() if i in row_of], np.int64)
        operations = (Preempt.whole(gone),) if len(gone) else ()
        return BatchPlan(rows, count, table.computed[rows] + count, kinds, operations)


@dataclass(frozen=True)
class Replay:
    """The record of b batches of n requests. Times in seconds on the workload's clock.

    Attributes:
        workload: The requests.
        schedule: The computed tokens and preemptions of each batch.
        start: float64 [b].
        duration: float64 [b].
        kv_used: int64 [b], tokens that fit in the blocks in use during the batch.
        decoding: bool [b, n], requests that decode in the batch.
        kv: int64 [b, n], tokens of each request in the cache.
        first_token: float64 [n].
        finish: float64 [n], when the last token came.
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
        """Sum of the batch times in seconds, the simulator's latency_s."""
        return float(self.duration.sum())

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last batch."""
        return float(self.start[-1] + self.duration[-1])

    @property
    def mean_ttft(self) -> float:
        """Mean seconds from a request's arrival to its first token."""
        return float((self.first_token - self.workload.arrival).mean())


def run(
    policy: Policy,
    workload: Workload,
    cost_model: CostModel,
    *,
    limits: Limits,
    kv_tokens: int,
    block_size: int = 1,
) -> Replay:
    """Serves a workload with a policy on the engine's own scheduler, one batch after the other. For
    small workloads, since it keeps everything; `simulator.simulate` is for large ones.

    Args:
        policy: Plans the batches.
        workload: The requests.
        cost_model: How long batches take.
        limits: C, P and rows.
        kv_tokens: M, rounded down to whole blocks.
        block_size: Tokens of a block.

    Raises:
        ReplayError: The policy stops before every request has ended.
        InvalidPlan: The policy breaks a limit.
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
    batches: list[dict[str, Any]] = []
    now, added = 0.0, 0
    while np.isnan(finish).any():
        while added < len(workload) and workload.arrival[added] <= now:
            scheduler.add(_request(workload, added), int(workload.output_len[added]))
            added += 1
        batch = _step(scheduler, cost_model, now, first_token, finish)
        if batch is not None:
            batches.append(batch)
            now += batch["duration"]
        elif added < len(workload):
            now = float(workload.arrival[added])
        else:
            left = int(np.isnan(finish).sum())
            raise ReplayError(f"after {len(batches)} batches {left} requests have not ended")
    columns = {name: np.array([batch[name] for batch in batches]) for name in batches[0]}
    schedule = Schedule(columns.pop("tokens"), columns.pop("preempt"))
    return Replay(workload, schedule, **columns, first_token=first_token, finish=finish)


def replay(schedule: Schedule, workload: Workload, cost_model: CostModel, **where: Any) -> Replay:
    """Runs a schedule in place of a policy, see `run`. A batch starts once the one before it has
    ended and its requests have arrived.

    Args:
        schedule: The batches.
        workload: The requests.
        cost_model: How long batches take.
        **where: limits, kv_tokens and block_size, see `run`.

    Raises:
        ReplayError: The schedule has another number of requests, or ends too early or too late.
        InvalidPlan: The schedule breaks a limit.
    """
    count = schedule.tokens.shape[1]
    if count != len(workload):
        raise ReplayError(f"the schedule is for {count} requests, not {len(workload)}")
    policy = ScriptedPolicy(schedule)
    played = run(policy, workload, cost_model, **where)
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
) -> dict[str, Any] | None:
    """Runs one batch. Returns its part of `Replay` and `Schedule`, or None if the policy plans
    none. Fills in first_token and finish."""
    table = scheduler.table
    step = scheduler.schedule(now)
    if not len(step):
        return None

    def line(rows: np.ndarray, values: np.ndarray | bool) -> np.ndarray:
        found = np.zeros(len(finish), np.asarray(values).dtype)
        found[table.seq[rows]] = values
        return found

    rows, running = step.rows, table.in_state(State.RUNNING)
    duration = float(cost.batch_time(step.features()))
    batch = {
        "tokens": line(rows, step.plan.num_tokens),
        "preempt": line(step.preempted, True),
        "start": now,
        "duration": duration,
        "kv_used": int(scheduler.pool.as_tokens(scheduler.pool.num_used)),
        "decoding": line(rows, step.decodes),
        "kv": line(running, table.computed[running]),
    }
    end = now + duration
    first_token[table.seq[rows[step.emits & (step.generated == 1)]]] = end
    done = scheduler.release_finished(step)
    finish[table.seq[done]] = end
    scheduler.receive(step.emitting, end)
    for row in done.tolist():
        scheduler.finish(row)
    return batch
