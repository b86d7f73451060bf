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
        at: where its first token is in the step's result.
        continuation: whose it is.
        draft: the drafted tokens behind which it samples, too, each at the next place.
        source: who drafted them.
        masked: at how many of these places a grammar says what may come; None without a grammar.
            What is sampled at the others is nobody's.
    """

    at: int
    continuation: Continuation
    draft: tuple[int, ...] = ()
    source: str = ""
    masked: int | None = None

    def tokens(self, sampled: Sequence[int]) -> Sequence[int]:
        """Its tokens, of those that the step has sampled: as far as drafts are right, and one."""
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
        emitting: who samples in it.
        prompts: the prompt log-probabilities that the step computes; None if no request wants any.
        pooling: the vectors that it computes, or parts of them; None likewise.
        watched: its predicted time, for `StepWatch.finished` to compare with the measured one.
        begin: when its planning began, in seconds on the engine's clock.
        stats: its record for the observers, without what is known only when it has finished.
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
        this step, each once."""
        told = [
            piece.continuation
            for of in (self.prompts, self.pooling)
            for piece in (() if of is None else of.pieces)
        ]
        return list(dict.fromkeys([*(one.continuation for one in self.emitting), *told]))

    @property
    def drafts(self) -> bool:
        """Whether it has drafts, so that nobody knows yet how many tokens it makes."""
        return self.stats.num_draft_tokens > 0
