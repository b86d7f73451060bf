"""Targets that a request cannot meet, even on an idle engine, or that contradict each other.

Nobody is refused for them: the request is served, and told. What is compared with is what
`View.step_time` predicts for the request alone, without the host's work, so it errs to the
request's favour.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost_model import BatchFeatures
from jaxserve.sched.policy import View
from jaxserve.sched.request import Request, SamplingParams


class SloProblemKind(enum.StrEnum):
    """What is wrong with a target."""

    TTFT_UNREACHABLE = "ttft_unreachable"  # less than the prompt takes alone
    TBT_UNREACHABLE = "tbt_unreachable"  # less than the first decode takes alone
    JCT_UNREACHABLE = "jct_unreachable"  # less than the fewest tokens that it may write take alone
    JCT_BEFORE_TTFT = "jct_before_ttft"  # the last token sooner than the first one has to come


@dataclass(frozen=True)
class SloProblem:
    """target: as it was asked for. limit: what it is below. Both in seconds."""

    kind: SloProblemKind
    target: float
    limit: float


def slo_problems(request: Request, view: View, *, chunked: bool) -> tuple[SloProblem, ...]:
    """What is wrong with the request's targets; any thread may ask. chunked: as of the policy:
    prompts are cut where max_prefill_tokens says, else at max_batch_tokens."""
    slo, length = request.slo, len(request.prompt)
    targets = (slo.ttft, slo.tbt, slo.jct)
    if targets == (None, None, None):
        return ()
    limits = view.limits
    prefill = _prefill_time(
        view, length, limits.max_prefill_tokens if chunked else limits.max_batch_tokens
    )
    least = least_output(request.sampling)
    several = request.sampling.max_tokens > 1
    compared = (
        (SloProblemKind.TTFT_UNREACHABLE, slo.ttft, prefill),
        (SloProblemKind.TBT_UNREACHABLE, slo.tbt, _decode_time(view, length, 2) if several else 0),
        (SloProblemKind.JCT_UNREACHABLE, slo.jct, prefill + _decode_time(view, length, least)),
        (SloProblemKind.JCT_BEFORE_TTFT, slo.jct, slo.ttft or 0.0),
    )
    return tuple(
        SloProblem(kind, target, limit)
        for kind, target, limit in compared
        if target is not None and target < limit
    )


def least_output(sampling: SamplingParams) -> int:
    """Tokens that a request writes at least: all that it may where nothing else ends it, else one
    more than its minimum, which is the first that can end it."""
    if sampling.ignore_eos and not sampling.stop_token_ids and not sampling.stop:
        return sampling.max_tokens
    return min(sampling.min_tokens + 1, sampling.max_tokens)


def _prefill_time(view: View, length: int, chunk: int) -> float:
    """Seconds of the steps that compute a prompt in pieces of `chunk` tokens."""
    if length <= chunk:
        return float(view.step_time(BatchFeatures(length, length, 0, 0, length**2, 1, 0)))
    before = np.arange(0, length, chunk)
    counts = np.minimum(chunk, length - before)
    work = counts * (counts + 2 * before)
    return float(np.sum(view.step_time(BatchFeatures(counts, counts, 0, 0, work, 1, before))))


def _decode_time(view: View, length: int, tokens: int) -> float:
    """Seconds of the steps that write all but the first of so many tokens. Linear in what is read,
    so all of them together take as long as the mean one so many times."""
    steps = tokens - 1
    if not steps:
        return 0.0
    mean = length + 1 + (steps - 1) / 2  # tokens that a step reads, its own included
    return steps * float(view.step_time(BatchFeatures(1, 1, mean, 1, 0, 0, 0)))
