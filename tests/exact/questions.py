"""What is asked of an engine, and the bits of what it answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason, Output, TokenLogprobs
from jaxserve.sched.request import PoolingParams, PoolingType
from tests.engine.harness import Stream, pool, send, vector

# In turn. `top_p` and `min_p` cut by sums and by exponentials, penalties count, `n` shares blocks.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"logprobs": 5},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logprobs": 2, "temperature": 0.9, "seed": 5, "top_p": 0.8},
    {"logprobs": 1, "temperature": 1.3, "seed": 7, "top_k": 20, "min_p": 0.02, "n": 2},
    {
        "logprobs": 1,
        "temperature": 0.7,
        "seed": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.5,
        "min_tokens": 4,
        "logit_bias": ((7, 2.0), (11, -5.0)),
    },
    {"logprobs": 0, "frequency_penalty": 0.9, "prompt_logprobs": 0},
)
POOLING = (
    PoolingParams(PoolingType.MEAN),
    PoolingParams(PoolingType.LAST, normalize=False),
    PoolingParams(PoolingType.MEAN, normalize=False, dimensions=7),
    PoolingParams(scored_token_ids=(7, 3, 7)),
)
WHOLE = (FinishReason.LENGTH, FinishReason.STOP)
LENGTH = 12  # tokens of an answer


@dataclass(frozen=True)
class Question:
    """A request: for a text, or with `pooling` for a vector."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    pooling: PoolingParams | None = None
    adapter: str = ""

    def ask(self, on: Engine, on_output: Callable[[Output], None] | None = None) -> Stream:
        """Submits it. on_output: hears what is said of a text."""
        if self.pooling is not None:
            return pool(on, self.prompt, self.pooling, self.adapter)
        given = {"max_tokens": LENGTH, "ignore_eos": True, **self.sampling}
        return send(on, self.prompt, on_output, adapter=self.adapter, **given)[1]

    def answer(self, stream: Stream) -> Any:
        """All that was said, with the bits of every number."""
        if self.pooling is not None:
            return vector(stream).tobytes()
        stream.wait()
        assert stream.reason in WHOLE, stream.last().error
        return self.said(stream)

    def said(self, stream: Stream) -> dict[int, tuple[list[int], list[Any], list[Any]]]:
        """By continuation what has been said so far: tokens, and bits of log-probabilities of these
        and of the prompt's."""
        said: dict[int, tuple[list[int], list[Any], list[Any]]] = {}
        for output in stream.outputs:
            tokens, logprobs, of_prompt = said.setdefault(output.index, ([], [], []))
            tokens += output.token_ids
            logprobs += map(_bits, output.logprobs)
            of_prompt += map(_bits, output.prompt_logprobs)
        return said


def _bits(entry: TokenLogprobs) -> Any:
    tops = [(token, np.float32(value).tobytes()) for token, value in entry.top]
    return entry.token_id, np.float32(entry.logprob).tobytes(), tops


def questions(count: int = 20, *, vocab: int = 61, longest: int = 40) -> list[Question]:
    """The same ones every time, of prompts of 1 to `longest` tokens; every sixth wants a vector."""
    rng = random.Random(11)
    made = []
    for i in range(count):
        prompt = tuple(rng.randrange(3, vocab) for _ in range(rng.randint(1, longest)))
        if i % 6 == 5:
            made.append(Question(prompt, pooling=POOLING[i // 6 % len(POOLING)]))
        else:
            made.append(Question(prompt, SAMPLING[(i - i // 6) % len(SAMPLING)]))
    return made


def alone(on: Engine, asked: Sequence[Question]) -> list[Any]:
    """What each is answered with nothing beside it."""
    return [question.answer(question.ask(on)) for question in asked]


def together(on: Engine, asked: Sequence[Question]) -> list[Any]:
    """What they are answered, all asked at once."""
    streams = [question.ask(on) for question in asked]
    return [question.answer(stream) for question, stream in zip(asked, streams, strict=True)]


def differing(found: Sequence[Any], expected: Sequence[Any]) -> list[int]:
    """The numbers of those with other bits."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [number for number, (one, other) in pairs if one != other]
