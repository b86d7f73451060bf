"""A step that has been launched and whose tokens are not on the host yet."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.device.executor import Handle, PendingSample
from jaxserve.engine.prompt_logprobs import PromptLogprobs
from jaxserve.engine.sequence import Continuation
from jaxserve.engine.stats import StepStats
from jaxserve.sched.step_timing import Watched


@dataclass(frozen=True)
class InFlight:
    """A launched step, and the continuations that get its results.

    Attributes:
        handle: the step on the device. If a grammar constrains one of its tokens, it is a
            `PendingSample` until `StepLoop.sample`.
        emitting: the rows of the batch that sample a token: (row, continuation).
        prompts: the prompt log-probabilities that the step computes; None if no request wants any.
        watched: its predicted time, for `StepWatch.finished` to compare with the measured one.
        begin: when its planning began, in seconds on the engine's clock.
        stats: its record for the observers, without what is known only when it has finished.
    """

    handle: Handle | PendingSample
    emitting: list[tuple[int, Continuation]]
    prompts: PromptLogprobs | None
    watched: Watched
    begin: float
    stats: StepStats

    @property
    def recipients(self) -> list[Continuation]:
        """Continuations that get a token or prompt log-probabilities from this step, each once."""
        pieces = [] if self.prompts is None else self.prompts.pieces
        told = [piece.continuation for piece in pieces]
        return list(dict.fromkeys([*(one for _, one in self.emitting), *told]))
