"""The real engine's loop over a device that is a cost model, on a clock that only it moves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.engine.buckets import Buckets, make_buckets
from jaxserve.engine.detokenize import load_tokenizer
from jaxserve.engine.engine import Engine, EngineOptions
from jaxserve.engine.layout import Layout
from jaxserve.engine.sampling import SampleResult
from jaxserve.engine.stats import EngineInfo
from jaxserve.sched.blocks import slots_for
from jaxserve.sched.cost_model import CostModel
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.step import Step
from jaxserve.sched.workloads.workload import Workload

VOCAB, WORD, END = 100, 7, 9


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Handle:
    clock: Clock
    end: float
    tokens: np.ndarray

    def result(self) -> SampleResult:
        self.clock.now = max(self.clock.now, self.end)
        return SampleResult(self.tokens, None, None, None)


class Device:
    """An executor that computes nothing and takes the time that the cost model says."""

    def __init__(
        self, clock: Clock, cost_model: CostModel, buckets: Buckets, scheduler: Recording
    ) -> None:
        self.buckets = buckets
        self._clock, self._cost_model, self._scheduler = clock, cost_model, scheduler
        self._free = 0.0

    def admit(self, slot: int, params: Any) -> None:
        assert 0 <= slot < self.buckets.slots

    def widen(self, layout: Layout, packed: np.ndarray) -> None:
        pass  # what moves cost is among the step's features

    def copy_blocks(self, pairs: np.ndarray) -> None:
        pass

    def save(self, key: int, slots: np.ndarray) -> None:
        pass

    def load(self, key: int, slots: np.ndarray) -> None:
        pass

    def discard(self, keys: tuple[int, ...]) -> None:
        pass

    def submit(self, layout: Layout, packed: np.ndarray, *, full: bool) -> Handle:
        features = self._scheduler.last.features()
        self._free = max(self._clock.now, self._free) + float(self._cost_model.batch_time(features))
        return Handle(self._clock, self._free, self._sampled(layout.rows))

    def move(self, step: Step) -> None:
        """Operations without a batch: what they add to one that is empty."""
        took, nothing = (
            float(self._cost_model.batch_time(one.features()))
            for one in (step, dataclasses.replace(step, moves=()))
        )
        self._free = max(self._clock.now, self._free) + took - nothing

    def _sampled(self, rows: int) -> np.ndarray:
        """END from those that have written enough."""
        step, length = self._scheduler.last, self._scheduler.lengths
        order = np.argsort(step.plan.num_tokens != 1, kind="stable")  # as batches are packed
        wanted = [length[self._scheduler.numbers[row]] for row in step.rows[order].tolist()]
        tokens = np.full(rows, WORD, np.int32)
        tokens[: len(order)][step.generated[order] >= np.array(wanted)] = END
        return tokens


class Recording(Scheduler):
    """Keeps the plans."""

    plans: list[tuple[float, BatchPlan]]
    numbers: dict[int, int]
    lengths: list[int]
    last: Step
    device: Device
    gone: tuple[int, ...] = ()

    def schedule(self, now: float) -> Step:
        self.last = step = super().schedule(now)
        self.gone += tuple(self.numbers[row] for row in step.preempted.tolist())
        if len(step):
            self.plans.append((now, self._named(step)))
            self.gone = ()
        else:
            self.device.move(step)
        return step

    def add(self, request: Request, output_len: int | None = None) -> int:
        row = super().add(request, output_len)
        self.numbers[row] = int(request.id)
        return row

    def _named(self, step: Step) -> BatchPlan:
        """Its plan with the requests' numbers instead of rows; of the operations, who lost all
        since the last batch."""
        name = np.vectorize(self.numbers.__getitem__, otypes=[np.int64])
        plan, gone = step.plan, Preempt.whole(np.array(self.gone, np.int64))
        return BatchPlan(name(plan.rows), plan.num_tokens, plan.reserve, plan.kinds, (gone,))


class VirtualEngine(Engine):
    """Its requests arrive when the clock has passed their time."""

    clock: Clock
    workload: Workload
    token_times: dict[int, list[float]]
    sent = 0

    def _receive(self, *, wait: bool) -> bool:
        arrival = self.workload.arrival
        if wait:
            if self.sent == len(arrival):
                return False
            self.clock.now = max(self.clock.now, float(arrival[self.sent]))
        now = self.clock.now
        while self.sent < len(arrival) and arrival[self.sent] <= now:
            self.clock.now = float(arrival[self.sent])  # what it will have arrived at
            self._submit(self.sent)
            self.sent += 1
        self.clock.now = now
        return super()._receive(wait=False)

    def _submit(self, number: int) -> None:
        prompt = (5,) * int(self.workload.prompt_len[number])
        sampling = SamplingParams(max_tokens=int(self.workload.limit[number]))
        times = self.token_times[number] = []
        request = Request(str(number), prompt, sampling)
        self.submit(request, lambda output: times.extend(output.token_times))


def serve(
    policy: str | Policy,
    workload: Workload,
    cost_model: CostModel,
    limits: Limits,
    *,
    num_blocks: int,
    block_size: int,
    overlap: bool,
    host_tokens: int = 0,
    rho: float | None = None,
) -> tuple[list[tuple[float, BatchPlan]], dict[int, list[float]]]:
    """The engine's plans, with the times at which they were made, and every request's tokens."""
    clock = Clock()
    longest = int((workload.prompt_len + workload.limit).max())
    width = -(-longest // block_size)
    buckets = make_buckets(
        limits.max_rows, limits.max_batch_tokens, width=width, hidden=rho is not None
    )
    scheduler = Recording(
        make_policy(policy) if isinstance(policy, str) else policy,
        limits,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=longest,
        capacity=len(workload) + limits.max_rows,
        cost_model=cost_model,
        host_slots=int(slots_for(host_tokens)),
        rho=rho,
    )
    scheduler.plans, scheduler.numbers = [], {}
    scheduler.lengths = workload.output_len.tolist()
    scheduler.device = Device(clock, cost_model, buckets, scheduler)
    engine = VirtualEngine(
        scheduler.device,
        scheduler,
        load_tokenizer(None),
        _info(str(policy), scheduler, longest),
        eos_ids=(END,),
        options=EngineOptions(overlap=overlap),
        clock=clock,
    )
    engine.clock, engine.workload, engine.token_times = clock, workload, {}
    engine._loop()
    scheduler.pool.check()
    return scheduler.plans, engine.token_times


def _info(policy: str, scheduler: Scheduler, longest: int) -> EngineInfo:
    pool = scheduler.pool
    return EngineInfo(
        model="none",
        family="none",
        num_params=0,
        num_layers=1,
        dtype="float32",
        vocab_size=VOCAB,
        max_model_len=longest,
        policy=policy,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        pool_tokens=pool.pool_tokens,
        pool_bytes=0,
        device="virtual",
        mesh_tensor=1,
        attention_backend="none",
    )
