"""The real engine, put together as `build_engine` does it, over a device that is a cost model, on a
clock that only it moves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import Config
from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.buckets import Buckets
from jaxserve.engine.device.pooling_step import Wanted
from jaxserve.engine.device.sampling import SampleResult
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.assemble import assemble
from jaxserve.engine.startup.blueprint import Programs
from jaxserve.engine.startup.choices.engine_choices import Choices, choose
from jaxserve.engine.stats import Observer, StepStats
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.sched.cache.cache_kinds import PROJECTED, CacheKind
from jaxserve.sched.cost.cost_model import CostModel, LinearCostModel
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.step import Step
from jaxserve.simulator.replica.arrivals import Requests
from jaxserve.simulator.workloads.workload import Workload
from tests.sched.cache.invariants import check_pool

VOCAB, WORD, END = 100, 7, 9
LAYERS = 2
MODEL = {
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "activation_function": "relu",
    "word_embed_proj_dim": 32,
    "eos_token_id": END,
}


def configured(folder: Path, longest: int, initial: LinearCostModel, **fields: Any) -> Config:
    """A configuration as serve.py reads it, with a model whose requests have at most `longest`
    tokens, and a profile with the initial. fields override it, `scheduler__policy="vllm"`."""
    shape = {**MODEL, "max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(shape))
    projects = fields.get("cache__hidden_read") == PROJECTED
    System("initial", initial, kv_tokens=1, rho=0.0, projects=projects).save(
        folder / "initial.json"
    )
    return Config().with_fields(
        model__path=str(folder),
        model__load_format="random",
        engine__compilation_cache_dir="",
        scheduler__profile=str(folder / "initial.json"),
        **{"scheduler__policy": "sarathi", "cache__prefix_caching": False, **fields},
    )


class Clock:
    """meanwhile(time): what other threads do while the engine's waits until then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[float], None] = lambda time: None

    def __call__(self) -> float:
        return self.now

    def wait(self, time: float) -> None:
        """Until then, if that is to come."""
        if time > self.now:
            self.meanwhile(time)
            self.now = time


@dataclass(frozen=True)
class Handle:
    clock: Clock
    end: float
    tokens: np.ndarray

    def result(self) -> SampleResult:
        self.clock.wait(self.end)
        return SampleResult(self.tokens, None, None, None)


class Device:
    """An executor that computes nothing and takes the time that the cost model says. Its requests
    write END when they have as many tokens as the workload says, request i in row `numbers[i]`."""

    def __init__(
        self, clock: Clock, cost_model: CostModel, buckets: Buckets, lengths: np.ndarray
    ) -> None:
        self.buckets, self.lengths = buckets, lengths
        self.copies_beside = self.sends = False
        self.intact = True
        self.numbers: dict[int, int] = {}
        self.step: Step  # the last that was planned
        self._clock, self._cost_model = clock, cost_model
        self._free = 0.0

    def admit(self, slot: int, params: Any) -> None:
        assert 0 <= slot < self.buckets.slots

    def project_to_kv(self, layout: Layout, packed: np.ndarray) -> None:
        pass  # what moves cost is among the step's features

    def copy_slots(self, places: np.ndarray) -> None:
        pass

    def save(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        pass

    def load(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        pass

    def discard(self, keys: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(
        self,
        layout: Layout,
        packed: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None,
        wanted: Wanted | None,
    ) -> Handle:
        assert targets is None, "no request of a simulation asks for log-probabilities"
        assert wanted is None, "nor for vectors"
        self._free = max(self._clock.now, self._free) + self._time(self.step)
        return Handle(self._clock, self._free, self._sampled(layout.rows))

    def move(self, step: Step) -> None:
        """Operations without a batch: what they add to one that is empty."""
        nothing = dataclasses.replace(step, moves=())
        took = self._time(step) - self._time(nothing)
        self._free = max(self._clock.now, self._free) + took

    def _time(self, step: Step) -> float:
        return float(self._cost_model.batch_time(step.features(self.buckets.padding)))

    def _sampled(self, rows: int) -> np.ndarray:
        """END from those that have written enough."""
        step = self.step
        single, kv = step.plan.num_tokens == 1, step.plan.kinds == CacheKind.KV
        order = np.argsort(np.where(single, kv, 2), kind="stable")  # as batches are packed
        wanted = self.lengths[[self.numbers[row] for row in step.rows[order].tolist()]]
        tokens = np.full(rows, WORD, np.int32)
        tokens[: len(order)][step.generated[order] >= wanted] = END
        return tokens


def prompts_of(workload: Workload) -> list[tuple[int, ...]]:
    """Prompts of random tokens, and what the workload says that they share."""
    rng, streams, prompts = np.random.default_rng(11), list[list[int]](), list[tuple[int, ...]]()
    for number in range(len(workload)):
        shared, length = int(workload.prefix_len[number]), int(workload.prompt_len[number])
        begin = streams[workload.prefix_of[number]][:shared] if shared else []
        prompt = begin + rng.integers(10, VOCAB, length - shared).tolist()
        output = int(workload.output_len[number])
        prompts.append(tuple(prompt))
        streams.append([*prompt, *[WORD] * (output - 1), END])
    return prompts


class Served(Observer):
    """An engine that has served a workload on its virtual clock.

    plans: with the requests' numbers instead of rows, and of the operations only who lost all since
    the last batch. token_times: of each request. steps: what observers were told.
    """

    def __init__(self, config: Config, workload: Workload, cost_model: CostModel) -> None:
        self.chosen: Choices = choose(config)
        self.plans: list[BatchPlan] = []
        self.token_times: dict[int, list[float]] = {}
        self.steps: list[StepStats] = []
        self._workload, self._requests, self._sent = workload, Requests(workload), 0
        self._prompts = prompts_of(workload)
        self._clock = Clock()
        buckets = self.chosen.memory.buckets
        self._device = Device(self._clock, cost_model, buckets, workload.output_len)
        self.engine = assemble(
            config,
            self.chosen,
            Programs(self._device),
            load_tokenizer(None),
            clock=self._clock,
        )
        self._gone: list[int] = []
        self._clock.meanwhile = self._submit_all
        self._watch(self.engine)
        self.engine._loop()
        check_pool(self.engine._scheduler.pool)

    def _watch(self, engine: Engine) -> None:
        scheduler = engine._scheduler
        self._book, self._add = scheduler.book, scheduler.add
        self._receive = engine._receive
        scheduler.book = self._booked  # type: ignore[method-assign]
        scheduler.add = self._added  # type: ignore[method-assign]
        engine._receive = self._arrived  # type: ignore[method-assign]
        engine.add_observer(self)

    def _booked(self, plan: BatchPlan) -> Step:
        step = self._device.step = self._book(plan)
        numbers = self._device.numbers
        self._gone += [numbers[row] for row in step.preempted.tolist()]
        if not len(step):
            self._device.move(step)
            return step
        gone = Preempt.whole(np.array(self._gone, np.int64))
        rows = np.array([numbers[row] for row in plan.rows.tolist()])
        self.plans.append(BatchPlan(rows, plan.num_tokens, plan.reserve, plan.kinds, (gone,)))
        self._gone = []
        return step

    def _added(self, request: Any, **known: Any) -> int:
        row = self._add(request, **known)
        self._device.numbers[row] = int(request.id)
        return row

    def _arrived(self, *, wait: bool) -> bool:
        """Requests arrive when the clock has passed their time."""
        arrival, clock = self._workload.arrival, self._clock
        if wait and not self.engine._inbox:
            if self._sent == len(arrival):
                return False
            due = float(arrival[self._sent])
            if due > clock.now:
                clock.now = due
                self.engine._step_loop.woke(due)
        self._submit_all(clock.now)
        return self._receive(wait=False)

    def _submit_all(self, time: float) -> None:
        """Who arrives until then, each at its own time."""
        arrival, clock, now = self._workload.arrival, self._clock, self._clock.now
        while self._sent < len(arrival) and arrival[self._sent] <= time:
            clock.now = float(arrival[self._sent])
            self._submit(self._sent)
            self._sent += 1
        clock.now = now

    def _submit(self, number: int) -> None:
        times = self.token_times[number] = []
        request = self._requests.make_request(number, float(self._workload.arrival[number]))
        request = dataclasses.replace(request, prompt=self._prompts[number])
        self.engine.submit(request, lambda output: times.extend(output.token_times))

    # As an observer.

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)
