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
        text: the text, cut off at a stop string.
        token_ids: all generated tokens.
        logprobs: one entry per token, if asked for.
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
        prompt: the text (for a chat, the template's text); None if token ids were given.
        prompt_token_ids: its tokens.
        outputs: the continuations by index.
        prompt_logprobs: one entry per token, None for the first one; None if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, delta: Delta) -> None:
        """Adds the engine's next output for one continuation. All outputs have the same prompt."""
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
    """The next piece of one continuation in a stream.

    Attributes:
        index: which of the n continuations.
        text: new text.
        token_ids: its tokens.
        finish_reason: why the continuation ended; None before its last piece.
        logprobs: one entry per token, if asked for.
        prompt_logprobs: entries of further prompt tokens, from the second token on, if asked for.
        expected_missed: whether its targets have just been given up; set at most once.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    expected_missed: bool = False
