"""What the engine reports about itself: one record a step, one a finished request, one snapshot.

Observers are called on the engine thread and must return quickly. What one raises is logged and
counted, and it goes on being told.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.output import FinishReason
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.request import Request, Tier
from jaxserve.sched.slo.verdict import Verdict


@dataclass(frozen=True)
class StepStats:
    """One executed batch. Times in seconds.

    num_decodes: rows that decode. padded_tokens: the size of its bucket, of which num_tokens are
    real, in three kinds as in `sched.step.Step`. preemptions: requests that lost their cache
    since the step before.
    num_live: requests when it was planned. num_received: of those that have come since the step
    before was planned. num_admitted: rows that took a slot for sampling.
    num_moves: operations on the pool that were sent to the device. num_emitting: rows that sample.
    after_idle: whether the device had nothing to do when it came.
    features: what the cost model knows of it. received: the numbers of the continuations that got a
    token of it. kv_used: tokens whose K and V the blocks in use hold, once it was planned;
    num_hidden: rows with hidden caches; num_shared: blocks that several requests hold.
    end: when its tokens were on the host, on the engine's clock.
    step_time: launch to tokens on the host. device_time: what it took the device, see
    `sched.watch.StepWatch`; predicted_time: what the cost model had said at the launch;
    lengthening: how much of that is for best-effort rows, see `sched.tiers`.
    wake_time: from a request's arrival until the engine's thread, which slept, went on; 0 where it
    did not. receive_time: from the step before, or from there, to the plan: observers, and taking
    requests in. plan_time: the policy's plan and its booking; launch_time: moves, building the
    batch and handing it over; finish_time: detokenising and streaming. All whether or not the
    device hid them.
    """

    num_rows: int
    num_decodes: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_recomputed_tokens: int
    padded_tokens: int
    preemptions: int
    num_live: int
    num_received: int
    num_admitted: int
    num_moves: int
    num_emitting: int
    after_idle: bool
    features: BatchFeatures
    kv_used: int
    num_hidden: int
    num_shared: int
    predicted_time: float
    lengthening: float
    wake_time: float
    receive_time: float
    plan_time: float
    launch_time: float
    # Known at its end.
    received: tuple[int, ...] = ()
    end: float = 0.0
    step_time: float = 0.0
    device_time: float = 0.0
    finish_time: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding not counted."""
        return self.num_decode_tokens + self.num_prefill_tokens + self.num_recomputed_tokens

    @property
    def host_time(self) -> float:
        """All that the engine's thread did for it."""
        return self.receive_time + self.plan_time + self.launch_time + self.finish_time


@dataclass(frozen=True)
class RequestStats:
    """One finished continuation. Times in seconds.

    number: as in `Observer.on_arrival`. queue_time: arrival to first scheduled; ttft: arrival to
    first token, None without one; e2e: arrival to end. preemptions: how often it lost its cache.
    verdict: whether its targets were met; None without any.
    """

    number: int
    finish_reason: FinishReason
    tier: Tier
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    queue_time: float
    ttft: float | None
    e2e: float
    verdict: Verdict | None = None


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    waiting, running: continuations. blocks: how many blocks hold what for whom, `{("kv",
    "realtime"): 12, ...}`, see `sched.tiers.blocks_used`. host_slots_total, host_slots_used: of
    host memory for checkpoints. Since the start, preemptions and steps; slots_checkpointed,
    slots_restored; host_full: preemptions for whose caches host memory had no room.
    compiles_after_warmup: compilations while serving. step_time_error: of the predicted step times
    lately, the mean of |predicted / measured - 1|. expected_wait: by tier, seconds until the first
    token of the shortest prompt that would come now. request_failures, step_failures,
    observer_failures: what went wrong on the engine's thread and did not end it, see `failures.py`.
    """

    waiting: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks: dict[tuple[str, str], int]
    host_slots_total: int
    host_slots_used: int
    slots_checkpointed: int
    slots_restored: int
    host_full: int
    preemptions: int
    compiles_after_warmup: int
    steps: int
    step_time_error: float
    expected_wait: dict[str, float]
    request_failures: int = 0
    step_failures: int = 0
    observer_failures: int = 0


@dataclass(frozen=True)
class EngineInfo:
    """What is served: fixed from start to stop.

    max_model_len: tokens of a request, prompt and output. block_size: tokens of a block;
    pool_tokens: that K and V in all blocks hold; pool_bytes: over all devices. mesh_tensor: devices
    that share each layer. hidden_read: how hidden caches are read, absorbed or projected, None
    without such caches; rho: seconds a step takes longer for a token of theirs than for one of K
    and V, None likewise. cost_model: where the model came from that predicts steps, and that they
    have corrected since.
    """

    model: str
    family: str
    num_params: int
    num_layers: int
    dtype: str
    vocab_size: int
    max_model_len: int
    policy: str
    num_blocks: int
    block_size: int
    pool_tokens: int
    pool_bytes: int
    device: str
    mesh_tensor: int
    attention_backend: str
    cost_model: str
    hidden_read: str | None = None
    rho: float | None = None


class Observer:
    """Told of what happens, on the engine thread; what it does not care for, it leaves as it is."""

    def on_arrival(self, number: int, request: Request) -> None:
        """A continuation. number: of it, from 0 in the order of arrival."""

    def on_step(self, stats: StepStats) -> None:
        """After each batch, once its tokens are on the host."""

    def on_first_token(self, ttft: float, tier: Tier) -> None:
        """A continuation's first token. ttft: seconds since its arrival."""

    def on_inter_token(self, tbt: float, tier: Tier) -> None:
        """Every later one. tbt: seconds since the token before."""

    def on_finish(self, stats: RequestStats) -> None:
        """Once a continuation, whatever ended it."""

    def on_stop(self) -> None:
        """The engine has ended; nothing follows."""


class StepRecorder(Observer):
    """Keeps every step of the engine, in the order they end; nothing else."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        """Keeps it, on the engine thread."""
        self.steps.append(stats)
