"""A step between its launch and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.executor import Handle, Undrawn
from jaxserve.engine.output import TokenLogprobs
from jaxserve.engine.sampling import SampleResult
from jaxserve.engine.sequence import Continuation
from jaxserve.sched.step import Step
from jaxserve.sched.watch import Watched


@dataclass(frozen=True)
class InFlight:
    """A launched step and whom its results belong to; rows i of the batch that sample. begin: when
    it was planned, in seconds; the others are as `StepStats` has them."""

    handle: Handle | Undrawn
    emitting: list[tuple[int, Continuation]]
    step: Step
    watched: Watched
    lengthening: float
    padded_tokens: int
    preemptions: int
    num_live: int
    num_received: int
    num_admitted: int
    after_idle: bool
    kv_used: int
    num_shared: int
    begin: float
    wake_time: float
    receive_time: float
    plan_time: float
    launch_time: float


def logprobs_of(result: SampleResult, i: int, wanted: int | None) -> tuple[TokenLogprobs, ...]:
    """Of row i's token, with as many alternatives as wanted; none for None."""
    if wanted is None:
        return ()
    assert result.chosen_logprob is not None
    assert result.top_ids is not None and result.top_logprobs is not None
    ids, values = result.top_ids[i, :wanted], result.top_logprobs[i, :wanted]
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return (TokenLogprobs(int(result.tokens[i]), float(result.chosen_logprob[i]), top),)
