"""What a request is: prompt, sampling parameters, service-level objectives, tier.

Everything here is immutable. What changes while a request is served lives in
`jaxserve.sched.state.request_table.RequestTable`. This module never imports jax.
"""

from __future__ import annotations

import enum
import json
import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NO_CLASS = "default"  # the SLO class of requests that name none
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 32
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGIT_BIAS = 300
MAX_N = 16
MAX_SEED = 2**63 - 1
MAX_GRAMMAR = 65_536  # characters
MAX_CHOICES = 1024
_MOST = sys.float_info.max  # an integer may be larger, and no float can be made of it then
MIN_REPETITION_PENALTY = 1e-6
"""Logits are divided by it; with much less there is no float32 for the result."""


class InvalidRequest(ValueError):
    """A request field that cannot be served; the message names the field and its limit."""

    def __init__(self, field_name: str, problem: str) -> None:
        super().__init__(f"{field_name}: {problem}")
        self.field_name, self.problem = field_name, problem


class Tier(enum.IntEnum):
    """Service class (BROS section 3): real-time requests have token deadlines,
    best-effort ones want throughput."""

    REALTIME = 0
    BEST_EFFORT = 1


@dataclass(frozen=True)
class SLO:
    """Targets in seconds; None means that the request does not have that one.

    ttft: arrival to first token. tbt: between two tokens. jct: arrival to last token
    (AccelGen section 2).
    """

    ttft: float | None = None
    tbt: float | None = None
    jct: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt", "jct"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _MOST:
                raise InvalidRequest(f"slo.{name}", f"must be a positive time, got {value}")


class GrammarKind(enum.StrEnum):
    """What the text of a `Grammar` is; the value is the name of the field that says it."""

    JSON_OBJECT = enum.auto()
    JSON_SCHEMA = enum.auto()
    REGEX = enum.auto()
    CHOICE = enum.auto()


@dataclass(frozen=True)
class Grammar:
    """What the generated text has to be. text: a JSON Schema; a regular expression for all of the
    text; a JSON array of strings, of which the text is one; or nothing, for any JSON object."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR:
            problem = f"has {len(self.text)} characters; at most {MAX_GRAMMAR} are allowed"
            raise InvalidRequest(self.field_name, problem)
        if not self.text and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequest(self.field_name, "is empty")

    @property
    def field_name(self) -> str:
        """Of the request, for errors."""
        return f"grammar.{self.kind}"

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that the schema, parsed or not yet, takes for valid."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except RecursionError:
            problem = "is nested too deeply"
            raise InvalidRequest(f"grammar.{GrammarKind.JSON_SCHEMA}", problem) from None
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text all of which the pattern matches."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these. Raises InvalidRequest for none, an empty one, or too many."""
        name = f"grammar.{GrammarKind.CHOICE}"
        at_most_entries(name, len(choices), MAX_CHOICES)
        if not choices or not all(choices):
            raise InvalidRequest(name, "needs at least one string, and none may be empty")
        return cls(GrammarKind.CHOICE, json.dumps(list(choices)))


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Defaults: greedy, 128 tokens.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    repetition_penalty: 1 is off; divides positive and multiplies negative logits of every token
    in prompt or output. presence_penalty, frequency_penalty: subtracted once, or per occurrence,
    from logits of generated tokens.
    logprobs: None for none, else how many alternatives to report beside the chosen token's.
    prompt_logprobs: the same of each token of the prompt, from the second on.
    stop_token_ids end the text and are not part of it; the tokenizer's end-of-sequence token does
    the same unless ignore_eos. stop strings end the text before they appear.
    min_tokens: no end-of-sequence or stop token id is sampled before that many tokens.
    n: how many continuations; continuation i of a seeded request uses seed + i.
    grammar: what the text has to be; only tokens that it allows are drawn, and the text ends where
    nothing can follow.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _in_range("max_tokens", self.max_tokens, 1, None)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, None)
        _in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _in_range("seed", self.seed, 0, MAX_SEED)
        _in_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is not None:
                _in_range(name, asked, 0, MAX_TOP_LOGPROBS)
        _in_range("n", self.n, 1, MAX_N)
        at_most_entries("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -100.0, 100.0)
        at_most_entries("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        at_most_entries("stop", len(self.stop), MAX_STOP_STRINGS)
        for string in self.stop:
            if not 1 <= len(string) <= MAX_STOP_LENGTH:
                raise InvalidRequest(
                    "stop",
                    f"a stop string has {len(string)} characters; 1 to {MAX_STOP_LENGTH} are "
                    "allowed",
                )

    @property
    def is_plain_greedy(self) -> bool:
        """True if the token is the argmax of the raw logits and nothing else is reported of it."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
            and self.logprobs is None
            and self.min_tokens == 0
            and self.grammar is None
        )


@dataclass(frozen=True)
class Request:
    """One prompt to continue. arrival: seconds on the engine's clock. slo_class: by whose name it
    is reported; its targets and its tier are the request's own by now. serve_late: it is not
    refused though its first token is expected late (`sched/slo/slo_admission.py`). tenant: whose it
    is; they share a full engine by weight (`sched/fairness/fair_share.py`). weight: of that tenant
    from now on; None: as before, 1 at first."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    slo: SLO = field(default_factory=SLO)
    tier: Tier = Tier.REALTIME
    arrival: float = 0.0
    slo_class: str = NO_CLASS
    serve_late: bool = False
    tenant: str = ""
    weight: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("prompt", "is empty; at least 1 token is needed")


def validate(request: Request, *, max_model_len: int, vocab_size: int, pool_tokens: int) -> None:
    """Checks a request against what this engine can serve.

    max_model_len: prompt + output tokens. pool_tokens: tokens the whole block pool holds.
    Raises InvalidRequest, naming the field and the limit.
    """
    length = len(request.prompt)
    limit = min(max_model_len, pool_tokens)
    if length >= limit:
        raise too_many_tokens(length, limit - 1)
    total = length + request.sampling.max_tokens
    if total > limit:
        raise InvalidRequest(
            "max_tokens",
            f"{request.sampling.max_tokens} after a prompt of {length} tokens makes {total}; "
            f"at most {limit} in all can be served",
        )
    named = (
        ("prompt", request.prompt),
        ("logit_bias", tuple(token for token, _ in request.sampling.logit_bias)),
        ("stop_token_ids", request.sampling.stop_token_ids),
    )
    for name, tokens in named:
        for kind in set(map(type, tokens)):
            if not issubclass(kind, numbers.Integral):
                raise InvalidRequest(name, f"token ids are integers, got {kind.__name__}")
        bad = next((t for t in tokens if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(name, f"token id {bad} is outside 0..{vocab_size - 1}")


def too_many_tokens(length: int, most: int) -> InvalidRequest:
    """Of a prompt that is too long; for whoever knows before there is a Request."""
    return InvalidRequest("prompt", f"has {length} tokens; at most {most} can be served")


def _in_range(
    name: str, value: float, low: float, high: float | None, *, low_open: bool = False
) -> None:
    ok = (value > low if low_open else value >= low) and value <= (_MOST if high is None else high)
    if not ok:
        above = f"more than {low:g}" if low_open else f"at least {low:g}"
        below = "" if high is None else f" and at most {high:g}"
        raise InvalidRequest(name, f"must be {above}{below}, got {value}")


def at_most_entries(name: str, count: int, limit: int) -> None:
    """Raises InvalidRequest, naming the field, for a longer list."""
    if count > limit:
        raise InvalidRequest(name, f"has {count} entries; at most {limit} are allowed")
