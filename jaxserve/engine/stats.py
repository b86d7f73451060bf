"""What the engine reports about itself: a record of each step and each finished request, and
snapshots.

Observers are called on the engine thread and must return quickly. Their exceptions are logged and
counted, and they are still called for later events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.output import FinishReason
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.programs.program_table import ProgramCall
from jaxserve.sched.programs.verdict import ProgramVerdict
from jaxserve.sched.request import USUAL_POOLING, PoolingParams, Request, Tier
from jaxserve.sched.slo.verdict import Verdict


@dataclass(frozen=True)
class StepStats:
    """One executed batch. Times are in seconds, whether or not the device hid them.

    Attributes:
        num_rows: rows of the batch.
        num_decodes: rows that decode.
        num_decode_tokens: newest generated tokens, see `sched.step.Step`.
        num_prefill_tokens: prompt tokens computed for the first time.
        num_recomputed_tokens: tokens computed again after a preemption.
        padded_tokens: size of its bucket, padding included.
        preemptions: requests that lost their cache since the previous step.
        num_live: continuations in the engine when it was planned.
        num_received: continuations that arrived since the previous step was planned.
        num_admitted: rows that took a device slot for sampling.
        num_moves: operations on the pool that were sent to the device.
        num_emitting: rows that sample a token.
        after_idle: whether the device was idle when the step was launched.
        features: the batch's features for the cost model.
        kv_used: tokens of K and V that the used blocks can hold, after planning.
        num_hidden: rows with hidden caches.
        num_shared: blocks that several requests hold.
        predicted_time: what the cost model predicted at the launch.
        lengthening: how much of the predicted time is due to best-effort rows, see
            `sched.slo.tiers.lengthening`.
        wake_time: from a request's arrival until the sleeping engine thread woke up; 0 if it was
            awake.
        receive_time: from the end of the previous step, or from waking up, to planning: observers
            and newly arrived requests.
        plan_time: the policy's plan and its booking.
        launch_time: cache moves, building the batch and handing it to the device.
        num_draft_tokens: drafted tokens in the batch.
        received: numbers of the continuations that got a token (`Observer.on_arrival`), once per
        token.
        accepted: accepted drafted tokens by source (`engine/drafts/draft.py`).
        rejected: rejected drafted tokens by source.
        end: when its tokens were on the host, on the engine's clock.
        step_time: from the start of planning to its tokens on the host.
        device_time: the time on the device, see `sched.step_timing.StepWatch`.
        finish_time: detokenising and streaming.
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
    num_draft_tokens: int = 0
    # Known at the end of the step.
    received: tuple[int, ...] = ()
    accepted: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    end: float = 0.0
    step_time: float = 0.0
    device_time: float = 0.0
    finish_time: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens computed, without padding."""
        known = self.num_decode_tokens + self.num_prefill_tokens + self.num_recomputed_tokens
        return known + self.num_draft_tokens

    @property
    def num_accepted(self) -> int:
        """Accepted drafted tokens."""
        return sum(self.accepted.values())

    @property
    def host_time(self) -> float:
        """Time of the engine thread spent on this step."""
        return self.receive_time + self.plan_time + self.launch_time + self.finish_time


@dataclass(frozen=True)
class RequestStats:
    """One finished continuation. Times are in seconds.

    Attributes:
        number: see `Observer.on_arrival`.
        finish_reason: why it ended.
        tier: the request's tier.
        prompt_tokens: tokens of the prompt.
        output_tokens: generated tokens.
        preemptions: how often it lost its cache.
        queue_time: see `Timings.queue`.
        ttft: arrival to first token; None if there was none.
        e2e: arrival to the end.
        verdict: whether its targets were met; None if it has no targets.
        given_up: whether the policy had given up its targets (`Observer.on_given_up`).
        block_keys: keys of the full blocks of its prompt and output; empty without reuse.
        drafted: drafted tokens that were computed for it.
        accepted: drafted tokens that were accepted.
        guessed: tokens for which there was a draft, computed or not.
        right: tokens that equalled their drafts.
        preprocess_time: see `Timings.preprocess`.
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
    given_up: bool = False
    block_keys: Sequence[bytes] = field(default=(), repr=False)
    drafted: int = 0
    accepted: int = 0
    guessed: int = 0
    right: int = 0
    preprocess_time: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine. Counts are since the start.

    Attributes:
        waiting: continuations that hold no cache.
        running: continuations that hold a cache, or wait for their last token.
        blocks_total: blocks of the pool.
        blocks_free: blocks that an allocation may take.
        blocks: used blocks by kind of cache and tier, `{("kv", "realtime"): 12, ...}`, see
            `sched.slo.tiers.blocks_used`.
        host_slots_total: slots of host memory for caches.
        host_slots_used: slots in use by checkpoints.
        slots_checkpointed: slots copied to host memory.
        slots_restored: slots copied back from there.
        host_full: preemptions whose caches found no room in host memory.
        preemptions: preemptions of continuations.
        compiles_after_warmup: compilations while serving.
        sizes_to_compile: sizes of steps that are not compiled: larger ones run their batches.
        steps: finished steps.
        step_time_error: mean of |predicted / measured - 1| over recent steps.
        expected_wait: by tier, seconds until the first token of the shortest prompt submitted now.
        request_failures: continuations that failed alone, see `failures.py`.
        corrupted_requests: continuations among these whose numbers were NaN or infinite.
        grammar_breaches: continuations that ended because of the time of their grammar.
        step_failures: steps that failed as a whole.
        observer_failures: observer calls that raised.
        prefix_cache_queries: by tier, prompt tokens of started requests that were looked up; empty
        without prefix caching, like the next one.
        prefix_cache_hits: by tier, looked up tokens that were found.
        prefix_cache_host_hits: by tier, found tokens that were in host memory.
        prefix_cache_host_tokens: tokens in host memory that may be found there.
        prefix_cache_evicted: evicted tokens, which are not in host memory either.
        programs_running: programs with calls in the engine, as far as they are named or have had
        several calls.
        programs_waiting: likewise, programs whose next call is expected.
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
    sizes_to_compile: int
    steps: int
    step_time_error: float
    expected_wait: dict[str, float]
    request_failures: int = 0
    corrupted_requests: int = 0
    grammar_breaches: int = 0
    step_failures: int = 0
    observer_failures: int = 0
    prefix_cache_queries: dict[str, int] = field(default_factory=dict)
    prefix_cache_hits: dict[str, int] = field(default_factory=dict)
    prefix_cache_host_hits: dict[str, int] = field(default_factory=dict)
    prefix_cache_host_tokens: int = 0
    prefix_cache_evicted: int = 0
    programs_running: int = 0
    programs_waiting: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks in use, 0 to 1."""
        return (self.blocks_total - self.blocks_free) / max(self.blocks_total, 1)


@dataclass(frozen=True)
class EngineInfo:
    """Description of the served model. It does not change while the engine runs.

    Attributes:
        model: name of the model.
        family: model family that runs it.
        num_params: parameters, tied ones counted once.
        num_layers: layers.
        dtype: of the weights.
        vocab_size: tokens of the vocabulary.
        max_model_len: most tokens of a request, prompt and output.
        policy: the scheduling policy and its parameters, `NAME:key=value`, as for `--policy`.
        num_blocks: blocks of the pool.
        block_size: tokens of a block.
        pool_tokens: tokens of K and V that fit in the pool.
        pool_bytes: size of the pool over all devices.
        device: kind of device.
        mesh_tensor: devices that share each layer.
        attention_backend: name of the attention kernels.
        cost_model: where the initial cost model came from. Served steps correct it.
        hidden_read: how hidden caches are read, absorbed or projected; None without such caches.
        rho: seconds that a step takes longer for a token read from a hidden cache instead of K and
            V; None without such caches.
        prefix_caching: whether prompts reuse cached prefixes (`cache.prefix_caching`).
        retention: which cached prefixes are kept longest.
        cache_dtype: dtype of the pool.
        speculates: whether drafts are checked (the policy variant `+spec`).
        d_model: size of a hidden state, and so of a pooled vector.
        causal: whether it generates text; otherwise only vectors.
        system_fingerprint: identifies what the bits of answers depend on besides the request, see
        `startup.fingerprint`; "" if no model computes them.
        pooling: default pooling of prompts.
        sampling_defaults: fields of SamplingParams that the checkpoint sets for requests without
        them.
        not_deterministic: why requests may not ask for deterministic computation; "" if they may.
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
    prefix_caching: bool = False
    retention: str = "lru"
    cache_dtype: str = ""
    speculates: bool = False
    d_model: int = 0
    pooling: PoolingParams = USUAL_POOLING
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = True
    system_fingerprint: str = ""
    not_deterministic: str = ""


class Observer:
    """Receives the engine's events, on the engine thread. Override the methods you need."""

    def on_arrival(self, number: int, request: Request) -> None:
        """A continuation has arrived. number: counts them from 0 in the order of arrival."""

    def on_step(self, stats: StepStats) -> None:
        """A batch has finished and its tokens are on the host."""

    def on_given_up(self, request: Request) -> None:
        """The policy has given up the targets of one of the request's continuations. Called at most
        once for each."""

    def on_first_token(self, ttft: float, tier: Tier) -> None:
        """A continuation's first token has come. ttft: seconds since its arrival."""

    def on_inter_token(self, tbt: float, tier: Tier) -> None:
        """A later token has come. tbt: seconds since the one before."""

    def on_finish(self, stats: RequestStats) -> None:
        """A continuation has ended, for any reason. Called once for each."""

    def on_program(self, verdict: ProgramVerdict) -> None:
        """A program has ended. Called once for each that was named or had several calls."""

    def on_program_call(self, number: int, call: ProgramCall) -> None:
        """The continuation that arrives next is a call of a program. Only a call's first one has
        its pause. number: the continuation's, see `on_arrival`, which follows."""

    def on_moved(self, number: int, generated: int, cached: int) -> None:
        """The continuation that arrives next has moved here from another engine.

        Args:
            number: As for `on_arrival`, which follows.
            generated: Tokens that other engines have generated of it.
            cached: Tokens, from the first on, whose cached blocks came along.
        """

    def on_stop(self) -> None:
        """The engine has stopped. No other call follows."""


class StepRecorder(Observer):
    """An observer that keeps every step in `steps`, in the order in which they end."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        """Appends the step."""
        self.steps.append(stats)
