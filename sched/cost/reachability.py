"""Latency of a request on an idle engine, and targets below it, which cannot be met.

A request with such a target is served, and its client is told. Policies see the reachable latency
instead, so asking for less gains nothing. The comparison uses what `View.step_time` predicts for
the request alone, without the host's work, and so errs in the request's favour.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.request import SLO, Request, SamplingParams


class SloProblemKind(enum.StrEnum):
    """What is wrong with a target."""

    TTFT_UNREACHABLE = "ttft_unreachable"  # less than the prompt alone takes
    TBT_UNREACHABLE = "tbt_unreachable"  # less than the first decode alone takes
    JCT_UNREACHABLE = "jct_unreachable"  # less than the shortest allowed answer takes alone
    JCT_BEFORE_TTFT = "jct_before_ttft"  # the last token is due before the first
    MAX_TBT_UNREACHABLE = "max_tbt_unreachable"  # like tbt_unreachable, for max_tbt


@dataclass(frozen=True)
class SloProblem:
    """A target that cannot be met, or that contradicts another one.

    Attributes:
        kind: What is wrong with it.
        target: The requested target, in seconds.
        limit: Least latency that can be met, in seconds.
    """

    kind: SloProblemKind
    target: float
    limit: float


# Seconds of a batch, as from `View.step_time`.
StepTime = Callable[[BatchFeatures], Any]


@dataclass(frozen=True, slots=True)
class Alone:
    """Latency of requests on an idle engine, in seconds: numbers, or float64 [n].

    Attributes:
        ttft: To the first token.
        tbt: From the first token to the second; 0 if there is no second.
        jct: To the last token of the shortest answer that the request may get.
    """

    ttft: Any = 0.0
    tbt: Any = 0.0
    jct: Any = 0.0

    @classmethod
    def from_request(
        cls, request: Request, step_time: StepTime, chunk: int, cached: int = 0
    ) -> Alone:
        """Latency of a request; all 0 if it has no targets to compare with. Any thread may ask.

        Args:
            request: The request.
            step_time: Predicts a batch.
            chunk: Prompt tokens that a step computes, `Policy.prefill_limit`.
            cached: Tokens of its prompt that are cached already.
        """
        if request.slo == _NO_TARGETS:
            return NOTHING
        length, sampling = len(request.prompt), request.sampling
        prefill = _prefill_time(step_time, length, chunk, cached)
        gap = _decode_time(step_time, length, 2) if sampling.max_tokens > 1 else 0.0
        rest = _decode_time(step_time, length, least_output(sampling))
        return cls(prefill, gap, prefill + rest)

    @classmethod
    def from_lengths(
        cls, prompt_len: np.ndarray, limit: np.ndarray, step_time: StepTime, chunk: int
    ) -> Alone:
        """Latency of n requests that may end with any token: the numbers of `from_request` for
        each.

        Args:
            prompt_len: int64 [n].
            limit: int64 [n], the max_tokens requested.
            step_time: Predicts a batch.
            chunk: Prompt tokens that a step computes.
        """
        prefill = prefill_times(step_time, prompt_len, chunk)
        gap = np.where(limit > 1, _decode_time(step_time, prompt_len, 2), 0.0)
        return cls(prefill, gap, prefill)


_NO_TARGETS, NOTHING = SLO(), Alone()


JUST_MISSED = 1.0 - 1e-6
"""Of what an idle engine takes: nobody makes room for it as if it could be met. It is missed by
more than what a clock that has run for months rounds to, some 1e-9 s."""


def targets_that_count(slo: SLO, alone: Alone) -> tuple[float, float, float, float]:
    """TTFT, TBT, JCT and the longest TBT as policies see them, in seconds; inf for no target. A
    target below the latency on an idle engine is raised to JUST_MISSED times that latency: policies
    neither rank it before feasible targets nor take it for feasible."""
    longest = slo.with_max_tbt().max_tbt
    return (
        np.inf if slo.ttft is None else max(slo.ttft, alone.ttft * JUST_MISSED),
        np.inf if slo.tbt is None else max(slo.tbt, alone.tbt * JUST_MISSED),
        np.inf if slo.jct is None else max(slo.jct, alone.jct * JUST_MISSED),
        np.inf if longest is None else max(longest, alone.tbt * JUST_MISSED),
    )


def slo_problems(request: Request, alone: Alone) -> tuple[SloProblem, ...]:
    """The request's unreachable targets. alone: its latency on an idle engine."""
    slo = request.slo
    compared = (
        (SloProblemKind.TTFT_UNREACHABLE, slo.ttft, alone.ttft),
        (SloProblemKind.TBT_UNREACHABLE, slo.tbt, alone.tbt),
        (SloProblemKind.JCT_UNREACHABLE, slo.jct, alone.jct),
        (SloProblemKind.MAX_TBT_UNREACHABLE, slo.max_tbt, alone.tbt),
        (SloProblemKind.JCT_BEFORE_TTFT, slo.jct, slo.ttft or 0.0),
    )
    return tuple(
        SloProblem(kind, target, limit)
        for kind, target, limit in compared
        if target is not None and target < limit
    )


def least_output(sampling: SamplingParams) -> int:
    """Fewest tokens that a request writes: its maximum if nothing else can end it, otherwise one
    more than its minimum, which is the first token that can end it."""
    if sampling.ignore_eos and not sampling.stop_token_ids and not sampling.stop:
        return sampling.max_tokens
    return min(sampling.min_tokens + 1, sampling.max_tokens)


def _prefill_time(step_time: StepTime, length: int, chunk: int, cached: int) -> float:
    """Seconds of the steps that compute a prompt, from token `cached` on, in pieces of `chunk`."""
    if cached:
        before = np.arange(cached, length, chunk)
        pieces = _pieces(step_time, np.minimum(length - before, chunk), before)
        return float(np.cumsum(pieces)[-1])  # summed in order, like the compiled simulation
    if length <= chunk:
        return float(step_time(BatchFeatures(length, length, 0, 0, length**2, 1, 0)))
    return float(prefill_times(step_time, np.array([length]), chunk)[0])


def prefill_times(step_time: StepTime, length: np.ndarray, chunk: int) -> np.ndarray:
    """Seconds to compute each of these prompts alone and in pieces, float64 [n].

    Args:
        step_time: Predicts a batch.
        length: int64 [n], tokens of each, at least 1.
        chunk: Tokens of a piece.
    """
    whole = (length - 1) // chunk  # pieces before the last
    most = int(whole.max(initial=0))
    if not most:
        return _pieces(step_time, length, whole)
    before = np.arange(most) * chunk
    sums = np.zeros(len(before) + 1)
    np.cumsum(_pieces(step_time, np.full(len(before), chunk), before), out=sums[1:])
    last = _pieces(step_time, length - whole * chunk, whole * chunk)
    return np.asarray(sums[whole] + last)


def _pieces(step_time: StepTime, count: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Seconds of pieces of prompts, each of `count` tokens after `before` cached ones, float64
    [n]."""
    batch = BatchFeatures(count, count, 0, 0, count * (count + 2 * before), 1, before)
    return np.asarray(step_time(batch) + np.zeros(count.shape))


def _decode_time(step_time: StepTime, length: Any, tokens: int) -> Any:
    """Seconds of the steps that write all but the first of `tokens` tokens. Linear in the tokens
    read, so all steps together take as long as the mean step times their number. length: a number
    or an array."""
    steps = tokens - 1
    if not steps:
        return 0.0
    mean = length + 1 + (steps - 1) / 2  # tokens that a step reads, including its own
    return steps * step_time(BatchFeatures(1, 1, mean, 1, 0, 0, 0))
