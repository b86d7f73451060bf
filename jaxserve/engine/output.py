"""What the engine tells the caller of a request, step by step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxserve.sched.slo.verdict import Verdict


class FinishReason(enum.StrEnum):
    """Why a continuation ended."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"
    ERROR = "error"  # it failed, alone or with the engine; `Output.error` says how


COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
"""It has ended by itself."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution (before temperature and penalties).

    top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Seconds. queue: arrival to first scheduled; ttft: arrival to first token; total: to last.
    tbt: the 99th percentile of the times between its tokens, beside their mean and the longest;
    None with fewer than two. preempted: when it lost all of its cache, from its arrival on."""

    queue: float
    ttft: float
    total: float
    tbt: float | None = None
    tbt_mean: float | None = None
    tbt_max: float | None = None
    preempted: tuple[float, ...] = ()


@dataclass(frozen=True)
class Usage:
    """What a continuation took, in tokens. preemptions: how often it lost its cache."""

    prompt_tokens: int
    output_tokens: int
    preemptions: int = 0


@dataclass(frozen=True)
class Output:
    """News of one continuation: new tokens and text since the last `Output`, in order.

    index: which of the n continuations. logprobs: one entry a token, if asked for. The last
    `Output` of an index has a finish_reason, usage and timings, and no other follows it; with
    FinishReason.ERROR the latter may be missing. error: what failed, with that reason;
    engine_failed: it is the engine, and not this request alone.
    token_times: seconds on the engine's clock, one a token. verdict: in the last one, whether its
    targets were met; None without any. prompt_logprobs: one entry for each of the next tokens of
    the prompt, from the second on, for nothing says how likely the first is; if asked for. All of
    them come before the first new token.
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
