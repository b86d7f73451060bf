"""The updates that a caller receives for a request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from jaxserve.sched.slo.verdict import Verdict


class FinishReason(enum.StrEnum):
    """Why a continuation ended."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"
    ERROR = "error"  # it failed, alone or with the engine; `Output.error` says how


COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons of continuations that ended by themselves."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token, as natural logarithms of the model's own distribution (before
    temperature and penalties).

    Attributes:
        token_id: the sampled token, or the prompt's.
        logprob: its log-probability.
        top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Latencies of one continuation, in seconds.

    Attributes:
        queue: submission to first scheduled, or to the end if it never was.
        ttft: arrival to first token, or to the end if there was none.
        total: arrival to the end.
        tbt: 99th percentile of the times between tokens; None with fewer than two tokens.
        tbt_mean: mean of the times between tokens, or None.
        tbt_max: the longest time between two tokens, or None.
        preempted: when it lost all of its cache, counted from arrival.
        preprocess: arrival to submission, such as reading the call, the chat template, compiling a
            grammar and encoding.
        moved: when it moved to another engine, counted from arrival. `queue` and `preprocess` are
            then about the last one.
    """

    queue: float
    ttft: float
    total: float
    tbt: float | None = None
    tbt_mean: float | None = None
    tbt_max: float | None = None
    preempted: tuple[float, ...] = ()
    preprocess: float = 0.0
    moved: tuple[float, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of one continuation.

    Attributes:
        prompt_tokens: tokens of the prompt.
        output_tokens: generated tokens.
        preemptions: how often it lost its cache.
        cached_tokens: prompt tokens found in the cache when it was first scheduled.
        accepted_draft_tokens: output tokens that had been drafted.
        rejected_draft_tokens: drafted tokens that were computed and are not in the output.
    """

    prompt_tokens: int
    output_tokens: int
    preemptions: int = 0
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0


@dataclass(frozen=True)
class Output:
    """An update of one continuation since its last `Output`.

    The last `Output` of an index has a finish_reason, usage and timings, and no other follows it.
    With FinishReason.ERROR usage and timings may be missing. Prompt log-probabilities all come
    before the first new token.

    Attributes:
        request_id: `Request.id`.
        index: which of the request's n continuations.
        token_ids: new tokens.
        text: new text.
        logprobs: one entry per new token, if requested.
        finish_reason: why the continuation ended; None while it goes on.
        usage: token counts, in the last one.
        timings: latencies, in the last one.
        error: what failed, with FinishReason.ERROR.
        token_times: when each new token came, in seconds on the engine's clock.
        verdict: whether its targets were met, in the last one; None if it has no targets.
        prompt_logprobs: one entry for each of the next prompt tokens, if requested. They start with
            the second token, as the first has no probability.
        engine_failed: whether the whole engine has failed, not only this request.
        expected_missed: whether the policy has just given up its targets; reported at most once.
        stop_string: the stop string that ended it, in the last one; "" if none did.
        replayed: whether it repeats what another engine has generated before the request moved. All
            of it comes before anything new.
        pooled: float32, the vector or the logits that `Request.pooling` asks for, in the last one.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: str = ""
    token_times: tuple[float, ...] = field(default=(), repr=False)
    verdict: Verdict | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    engine_failed: bool = False
    expected_missed: bool = False
    stop_string: str = ""
    replayed: bool = False
    pooled: np.ndarray | None = field(default=None, compare=False)
