"""A step that has been launched and whose tokens are not on the host yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.engine.device.executor import Handle, PendingSample
from jaxserve.engine.pooling import Pooling
from jaxserve.engine.prompt_logprobs import PromptLogprobs
from jaxserve.engine.sequence import Continuation
from jaxserve.engine.stats import StepStats
from jaxserve.sched.step_timing import Watched


class Emitting(NamedTuple):
    """A continuation that samples in a step.

    Attributes:
        at: index of its first token in the step's result.
        continuation: the continuation.
        draft: drafted tokens; it also samples after each, at the next index.
        source: name of the drafter.
        masked: number of these indices at which a grammar restricts the token; None without a
        grammar. Tokens at the others are discarded.
    """

    at: int
    continuation: Continuation
    draft: tuple[int, ...] = ()
    source: str = ""
    masked: int | None = None

    def tokens(self, sampled: Sequence[int]) -> Sequence[int]:
        """Its accepted tokens among those that the step has sampled: correct drafts, and one
        more."""
        most = len(self.draft) if self.masked is None else min(len(self.draft), self.masked - 1)
        count = 1
        while count <= most and sampled[self.at + count - 1] == self.draft[count - 1]:
            count += 1
        return sampled[self.at : self.at + count]


@dataclass(frozen=True)
class InFlight:
    """A launched step, and the continuations that get its results.

    Attributes:
        handle: the step on the device. If a grammar constrains one of its tokens, it is a
            `PendingSample` until `StepLoop.sample`.
        emitting: the continuations that sample in it.
        prompts: the prompt log-probabilities that the step computes; None if no request wants any.
        pooling: the vectors that it computes, or parts of them; None if no request wants any.
        watched: its predicted time, for `StepWatch.finished` to compare with the measured one.
        begin: when its planning began, in seconds on the engine's clock.
        stats: its record for the observers, without fields that are known only at its end.
    """

    handle: Handle | PendingSample
    emitting: list[Emitting]
    prompts: PromptLogprobs | None
    pooling: Pooling | None
    watched: Watched
    begin: float
    stats: StepStats

    @property
    def recipients(self) -> list[Continuation]:
        """Continuations that get a token, prompt log-probabilities or a part of their vector from
        this step, without duplicates."""
        told = [
            piece.continuation
            for of in (self.prompts, self.pooling)
            for piece in (() if of is None else of.pieces)
        ]
        return list(dict.fromkeys([*(one.continuation for one in self.emitting), *told]))

    @property
    def drafts(self) -> bool:
        """Whether it has drafts, so that its number of tokens is not known yet."""
        return self.stats.num_draft_tokens > 0
