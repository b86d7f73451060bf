"""A step between its launch and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.device.executor import Handle, PendingSample
from jaxserve.engine.prompt_logprobs import PromptLogprobs
from jaxserve.engine.sequence import Continuation
from jaxserve.engine.stats import StepStats
from jaxserve.sched.step_timing import Watched


@dataclass(frozen=True)
class InFlight:
    """A launched step and whom its results belong to; rows i of the batch that sample. prompts:
    what it tells of prompts, None if nothing. begin: when it was planned, in seconds. stats: of it,
    but for what is known at its end."""

    handle: Handle | PendingSample
    emitting: list[tuple[int, Continuation]]
    prompts: PromptLogprobs | None
    watched: Watched
    begin: float
    stats: StepStats

    @property
    def recipients(self) -> list[Continuation]:
        """Each whom its results say something: who samples, and who is told of a prompt."""
        pieces = [] if self.prompts is None else self.prompts.pieces
        told = [piece.continuation for piece in pieces]
        return list(dict.fromkeys([*(one for _, one in self.emitting), *told]))
