"""What the engine reports about itself: one record a step, one a finished request, one snapshot.

Observers are called on the engine thread and must return quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxserve.engine.output import FinishReason
from jaxserve.sched.request import Tier


@dataclass(frozen=True)
class StepStats:
    """One executed batch. Times in seconds.

    num_decodes: rows that decode. padded_tokens: the size of its bucket, of which num_tokens are
    real, in three kinds as in `sched.step.Step`. preemptions: requests that lost their cache
    since the step before.
    step_time: launch to tokens on the host. host_time: scheduling, batch building,
    detokenising and streaming of this step, whether or not the device hid it.
    """

    num_rows: int
    num_decodes: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_recomputed_tokens: int
    padded_tokens: int
    step_time: float
    host_time: float
    preemptions: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding not counted."""
        return self.num_decode_tokens + self.num_prefill_tokens + self.num_recomputed_tokens


@dataclass(frozen=True)
class RequestStats:
    """One finished continuation. Times in seconds.

    queue_time: arrival to first scheduled; ttft: arrival to first token, None without one; e2e:
    arrival to end. preemptions: how often it lost its cache.
    """

    finish_reason: FinishReason
    tier: Tier
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    queue_time: float
    ttft: float | None
    e2e: float


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    waiting, running: continuations. blocks: how many blocks hold what, `{("kv", "realtime"): 12,
    ...}`. preemptions, steps: since the start. compiles_after_warmup: compilations while serving.
    """

    waiting: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks: dict[tuple[str, str], int]
    preemptions: int
    compiles_after_warmup: int
    steps: int


@dataclass(frozen=True)
class EngineInfo:
    """What is served: fixed from start to stop.

    max_model_len: tokens of a request, prompt and output. block_size: tokens of a block;
    pool_tokens: that K and V in all blocks hold; pool_bytes: over all devices. mesh_tensor: devices
    that share each layer. hidden_read: how hidden caches are read, absorbed or projected, None
    without such caches; rho: seconds a step takes longer for a token of theirs than for one of K
    and V, None likewise.
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
    hidden_read: str | None = None
    rho: float | None = None


class Observer(Protocol):
    """Told of what happens, on the engine thread."""

    def on_step(self, stats: StepStats) -> None:
        """After each batch, once its tokens are on the host."""
        ...

    def on_first_token(self, ttft: float, tier: Tier) -> None:
        """A continuation's first token. ttft: seconds since its arrival."""
        ...

    def on_inter_token(self, tbt: float, tier: Tier) -> None:
        """Every later one. tbt: seconds since the token before."""
        ...

    def on_finish(self, stats: RequestStats) -> None:
        """Once a continuation, whatever ended it."""
        ...
