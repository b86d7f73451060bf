"""What `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxserve.engine.output import FinishReason, Timings, TokenLogprobs, Usage
from jaxserve.sched.slo.verdict import Verdict
from jaxserve.server.requests.output_streams import Delta


@dataclass
class CompletionOutput:
    """One of a prompt's n continuations.

    Attributes:
        index: 0 to n - 1.
        text: without what a stop string cut off.
        token_ids: all that were generated.
        logprobs: one a token, where they were asked for.
        finish_reason: why it ended.
        usage: tokens of the prompt and of the continuation.
        timings: when its tokens came.
        verdict: whether its targets were met; None without targets.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    verdict: Verdict | None = None

    def add(self, delta: Delta) -> None:
        """Appends the engine's next output for this continuation."""
        self.text += "".join(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.last is not None:
            self.finish_reason = delta.last.finish_reason
            self.usage, self.timings = delta.last.usage, delta.last.timings
            self.verdict = delta.last.verdict


@dataclass
class RequestOutput:
    """A prompt and its continuations.

    Attributes:
        request_id: the engine's name for it.
        prompt: the text, a chat's after the template; None where token ids were given.
        prompt_token_ids: its tokens.
        outputs: the continuations by index.
        prompt_logprobs: one a token, None for the first, which follows nothing; None where they
            were not asked for.
    """

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
class EmbeddingOutput:
    """A prompt's vector.

    Attributes:
        embedding: float32 [dimensions].
        usage: tokens of the prompt.
        timings: when it came.
        verdict: whether its targets were met; None without targets.
    """

    embedding: np.ndarray
    usage: Usage | None = None
    timings: Timings | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Piece:
    """What is new of one continuation of a stream.

    Attributes:
        index: which of the n continuations.
        text: what follows the last piece.
        token_ids: its tokens.
        finish_reason: why the continuation ended; None before its last piece.
        logprobs: one a token, where they were asked for.
        prompt_logprobs: of the prompt's next tokens from the second on, where they were asked for.
        expected_missed: whether its targets have just been given up; told once, if at all.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    expected_missed: bool = False
