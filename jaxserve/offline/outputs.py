"""What `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.engine.output import FinishReason, Timings, TokenLogprobs, Usage
from jaxserve.sched.slo.verdict import Verdict
from jaxserve.server.requests.output_streams import Delta


@dataclass
class CompletionOutput:
    """One of the n continuations, as far as it has come. finish_reason, usage, timings: once it has
    ended. verdict: whether its targets were met; None without any."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    verdict: Verdict | None = None

    def add(self, delta: Delta) -> None:
        """What the engine says next of it."""
        self.text += "".join(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.last is not None:
            self.finish_reason = delta.last.finish_reason
            self.usage, self.timings = delta.last.usage, delta.last.timings
            self.verdict = delta.last.verdict


@dataclass
class RequestOutput:
    """A prompt and its continuations by index. prompt: as it was given; a chat's is the template's
    text. prompt_logprobs: one entry a token, of which the first is None, as nothing comes before
    it; None where they were not asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, delta: Delta) -> None:
        """What the engine says next of one of them. Each says the same of the prompt."""
        self.outputs[delta.index].add(delta)
        if self.prompt_logprobs is not None and delta.index == 0:
            self.prompt_logprobs += delta.prompt_logprobs


@dataclass(frozen=True)
class Piece:
    """What is new of one continuation of a stream. finish_reason: in the last one of an index.
    logprobs: one entry a token; prompt_logprobs: of the next tokens of the prompt, from the second
    on; if asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
