"""Requests: prompt, sampling parameters, service-level objectives, tier.

Everything here is immutable. The changing state of served requests is in
`jaxserve.sched.state.request_table.RequestTable`. This module never imports jax.
"""

from __future__ import annotations

import enum
import itertools
import json
import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # clients have no NumPy
    import numpy as np

NO_CLASS = "default"  # the SLO class of requests without one
MAX_TBT, LEAST_MAX_TBT = 10.0, 2.0
"""The longest time between two tokens, unless a request says otherwise: so many times its TBT, and
at least so many seconds. By the 99th percentile alone a stream may stand still once for as long as
you like."""
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 32
MAX_SHOWN_TOKEN_IDS = 32
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGIT_BIAS = 300
MAX_N = 16
MAX_SEED = 2**63 - 1
MAX_GRAMMAR = 65_536  # characters
MAX_SCORED_TOKENS = 16
MAX_CHOICES = 1024
MAX_PROGRAM_ID = 128  # characters
MAX_EXPECTED_CALLS = 10_000
LEAST_VALUE, MOST_VALUE = 1e-3, 1e3
_LONG = 10**40  # integers that are named by the number of their digits
_MOST = sys.float_info.max  # an integer may be larger, but could not become a float
MIN_REPETITION_PENALTY = 1e-6
"""Logits are divided by it; with much less there is no float32 for the result."""


class InvalidRequest(ValueError):
    """A request field that cannot be served; the message names the field and its limit."""

    def __init__(self, field_name: str, problem: str) -> None:
        super().__init__(f"{field_name}: {problem}")
        self.field_name, self.problem = field_name, problem

    def renamed(self, field_name: str) -> Self:
        """The same error for the field's name in the client's API."""
        return type(self)(field_name, self.problem)


class ContextLengthExceeded(InvalidRequest):
    """A prompt, with its possible output, that does not fit the model's context or the block pool.
    Agents shorten their conversation and try again."""


class Tier(enum.IntEnum):
    """Service class (BROS section 3): real-time requests have token deadlines,
    best-effort ones want throughput."""

    REALTIME = 0
    BEST_EFFORT = 1


class Rule(enum.Enum):
    """Which of its own targets a request must meet to attain its SLO.

    Both: TTFT, the 99th percentile of its TBTs (Apt-Serve section 1), and JCT (AccelGen section 2).
        A server's verdict (`sched/slo/verdict.py`) also requires the longest of its TBTs to be
        within `max_tbt`, so that no stream stalls.
    """

    SERVER = "by a server's verdict: the longest time between two tokens counts"
    PAPERS = "by the papers' rule: the longest time between two tokens does not count"


@dataclass(frozen=True)
class SLO:
    """Latency targets of a request, in seconds (AccelGen section 2). None means no target.

    Attributes:
        ttft: From arrival to the first token.
        tbt: Between two tokens, the 99th percentile.
        jct: From arrival to the last token.
        max_tbt: Between any two tokens, the longest. None: MAX_TBT times `tbt`, at least
            LEAST_MAX_TBT, if there is a `tbt`.

    Raises:
        InvalidRequest: A target is not a positive, finite time.
    """

    ttft: float | None = None
    tbt: float | None = None
    jct: float | None = None
    max_tbt: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt", "jct", "max_tbt"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _MOST:
                problem = f"must be a positive, finite time, got {_shown(value)}"
                raise InvalidRequest(f"slo.{name}", problem)

    def with_max_tbt(self) -> SLO:
        """The targets with the default of `max_tbt` filled in, if there is one."""
        if self.tbt is None or self.max_tbt is not None:
            return self
        most = _MOST / 1000  # frontends report it in milliseconds
        return replace(self, max_tbt=min(max(MAX_TBT * self.tbt, LEAST_MAX_TBT), most))


class GrammarKind(enum.StrEnum):
    """Kind of a `Grammar`'s text; the value is the name of the request field that holds it."""

    JSON_OBJECT = enum.auto()
    JSON_SCHEMA = enum.auto()
    REGEX = enum.auto()
    CHOICE = enum.auto()
    LARK = enum.auto()


@dataclass(frozen=True)
class Grammar:
    """A constraint on the generated text.

    Attributes:
        kind: Kind of `text`.
        text: A JSON Schema; a regular expression that matches the whole output; a JSON array of
        strings to choose from; "" for any JSON object; or a JSON object with `lark`, a grammar in
        llguidance's dialect of Lark, and `schemas`, the JSON Schemas that it refers to, by name.
        Only the server makes the last kind.

    Raises:
        InvalidRequest: The text is empty or too long.
    """

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
        """The request's field that holds it, for error messages."""
        return f"grammar.{self.kind}"

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that is valid for the schema, which may be parsed or text."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except RecursionError:
            problem = "is nested too deeply"
            raise InvalidRequest(f"grammar.{GrammarKind.JSON_SCHEMA}", problem) from None
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that the pattern matches as a whole."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of the strings. InvalidRequest if there are none or too many, or any is empty."""
        name = f"grammar.{GrammarKind.CHOICE}"
        at_most_entries(name, len(choices), MAX_CHOICES)
        if not choices or not all(choices):
            raise InvalidRequest(name, "needs at least one string, and none may be empty")
        return cls(GrammarKind.CHOICE, json.dumps(list(choices)))

    @classmethod
    def lark(cls, rules: str, schemas: Mapping[str, Mapping[str, Any]]) -> Grammar:
        """Text that follows the rules, in which @NAME stands for JSON valid for the schema of that
        name. InvalidRequest if both together are too long."""
        return cls(GrammarKind.LARK, json.dumps({"lark": rules, "schemas": schemas}))


@dataclass(frozen=True)
class Thinking:
    """The thought before a model's answer: its text begins with it. Only the server makes these.

    Attributes:
        ends: Texts that end the thought.
        begins: Texts that begin it; if empty, it has begun with the prompt.
        close: Tokens that are appended to end the thought once the budget is spent.
        budget: Most tokens of the thought; None for no limit.

    Raises:
        InvalidRequest: The budget is negative.
    """

    ends: tuple[str, ...]
    begins: tuple[str, ...] = ()
    close: tuple[int, ...] = ()
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            _in_range("thinking_token_budget", self.budget, 0, None)


@dataclass(frozen=True)
class SamplingParams:
    """How output tokens are sampled, and when the output ends. The default is greedy, 128 tokens.

    Attributes:
        max_tokens: Most tokens to generate.
        min_tokens: No end-of-sequence or stop token is sampled before this many tokens.
        temperature: 0 is greedy.
        top_k: Sample among the k most likely tokens; 0 is off.
        top_p: Nucleus sampling; 1 is off, 0 leaves the most likely token.
        min_p: Least probability, as a share of the most likely token's; 0 is off.
        seed: For reproducible output, any of 64 bits; None for a random one.
        repetition_penalty: Divides positive and multiplies negative logits of every token in the
            prompt or the output; 1 is off.
        presence_penalty: Subtracted once from the logits of generated tokens.
        frequency_penalty: Subtracted per occurrence from the logits of generated tokens.
        logit_bias: (token id, bias) pairs, added to the logits.
        logprobs: Number of alternatives to report beside each sampled token's logprob; None for no
            logprobs.
        prompt_logprobs: The same for each prompt token from the second on.
        stop_token_ids: Tokens that end the output and are not part of it, like the end-of-sequence
            token.
        stop: Strings that end the text before they appear.
        ignore_eos: Whether to continue after an end-of-sequence token.
        n: Number of continuations. Continuation i of a seeded request uses seed + i.
        grammar: A constraint on the output. Only tokens that it allows are sampled, and the output
        ends where nothing can follow.
        shown_token_ids: Special tokens whose names are part of the text; others add none.
        thinking: The thought before the answer, if that is limited or `grammar` applies only to the
        answer.
        deterministic: Whether tokens and log-probabilities must have the same bits whatever else is
        served, even if that takes longer (docs/exactness.md).

    Raises:
        InvalidRequest: A value is out of range; it names the field.
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
    shown_token_ids: tuple[int, ...] = ()
    thinking: Thinking | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        _in_range("max_tokens", self.max_tokens, 1, None)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, None)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
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
        at_most_entries("shown_token_ids", len(self.shown_token_ids), MAX_SHOWN_TOKEN_IDS)
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
        """Whether the token is the argmax of the raw logits, with nothing else to report."""
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


class PoolingType(enum.StrEnum):
    """Which hidden states make a vector."""

    LAST = enum.auto()
    MEAN = enum.auto()
    CLS = enum.auto()


@dataclass(frozen=True)
class PoolingParams:
    """The result wanted for a prompt, if nothing is to be generated.

    Attributes:
        pooling: Which hidden states, after the model's last norm, make the vector: the last
        token's, the mean of all, or the first token's.
        normalize: Whether to scale its length to 1.
        dimensions: Number of leading numbers to keep, cut before normalising; None for all.
        scored_token_ids: In place of a vector: the logits of these tokens after the prompt.

    Raises:
        InvalidRequest: A value is out of range; it names the field.
    """

    pooling: PoolingType = PoolingType.LAST
    normalize: bool = True
    dimensions: int | None = None
    scored_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            _in_range("dimensions", self.dimensions, 1, None)
        at_most_entries("tokens", len(self.scored_token_ids), MAX_SCORED_TOKENS)

    def with_own(
        self, pooling: str | None, normalize: bool | None, dimensions: int | None
    ) -> PoolingParams:
        """The parameters with these values replaced; None keeps one. Raises InvalidRequest."""
        if pooling is not None and pooling not in list(PoolingType):
            known = ", ".join(PoolingType)
            raise InvalidRequest("pooling", f"{pooling!r:.80} is not known (known: {known})")
        return PoolingParams(
            self.pooling if pooling is None else PoolingType(pooling),
            self.normalize if normalize is None else normalize,
            dimensions,
        )

    @property
    def needs_all(self) -> bool:
        """Whether hidden states before the last token's are needed, so that the whole prompt has to
        be computed."""
        return not self.scored_token_ids and self.pooling is not PoolingType.LAST


@dataclass(frozen=True)
class Program:
    """What a request says of its program: the calls of one agent run, for whose end somebody waits.

    Attributes:
        id: Names the program among its tenant's.
        deadline: From the arrival of the program's first call to the end of its last, in seconds.
            None says nothing.
        expected_calls: Calls that are still to come after this one; None if unknown.
        over: Whether this call is the program's last.
        usual_deadline: Its SLO class's deadline, which counts if no call of the program gives one;
            None without one.

    Raises:
        InvalidRequest: The id is empty, too long or cannot be printed, the deadline is not a
            positive, finite time, or more calls are expected than may be, or after the last.
    """

    id: str
    deadline: float | None = None
    expected_calls: int | None = None
    over: bool = False
    usual_deadline: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.id) <= MAX_PROGRAM_ID:
            limits = f"1 to {MAX_PROGRAM_ID} are allowed"
            raise InvalidRequest("program", f"has {len(self.id)} characters; {limits}")
        if not self.id.isprintable():  # it is logged and encoded
            raise InvalidRequest("program", "has characters that cannot be printed")
        if self.deadline is not None and not 0 < self.deadline <= _MOST:
            problem = f"must be a positive, finite time, got {_shown(self.deadline)}"
            raise InvalidRequest("program.deadline", problem)
        if self.expected_calls is not None:
            _in_range("expected_calls", self.expected_calls, 0, MAX_EXPECTED_CALLS)
            if self.over and self.expected_calls:
                problem = f"must be 0 in a program's last call, got {self.expected_calls}"
                raise InvalidRequest("expected_calls", problem)

    def going_on(self) -> Program:
        """The same, said by a call that is not the last."""
        return replace(self, over=False)


@dataclass(frozen=True)
class Generated:
    """What another engine has generated of a continuation, before the request moved.

    Attributes:
        tokens: Its tokens.
        times: When each came, ascending, in seconds on the engine's clock.
        logprobs: Log-probabilities of each, with those of the likeliest tokens, if the request asks
            for them.
        given_up: Whether its caller knows that its targets will be missed.
    """

    tokens: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    given_up: bool = False


@dataclass(frozen=True)
class Request:
    """A prompt to continue, or to make a vector of.

    Attributes:
        id: Names the request in results, cancellations and logs.
        prompt: Token ids, at least one.
        sampling: How to sample its output.
        slo: Its own targets, with those of its class already merged in.
        tier: Real-time or best-effort.
        arrival: When it came to the server, in seconds on the engine's clock; 0: when it is
            submitted to the engine.
        slo_class: The SLO class to report it under. `slo` and `tier` are already resolved.
        serve_late: Whether to admit it even if its first token is expected late
            (`sched/slo/slo_admission.py`).
        tenant: Tenants share a full engine by weight (`sched/fairness/fair_share.py`).
        weight: The tenant's weight from now on; None keeps the current one, initially 1.
        cache_salt: Only requests of the same tenant with the same salt may reuse its cached
            prefixes.
        block_keys: Keys of the full blocks of its prompt, in order, with which requests find each
            other's cached prefixes: 16 bytes that stand for all tokens up to the end of the block,
            and for the requests that may share them. None without reuse.
        value: The operator's value of meeting its targets, relative to other requests. Clients
            cannot set it: it belongs to the class.
        adapter: Name of the adapter (LoRA) to use; empty for the base model.
        prediction: Token ids of the likely output; drafts from it are checked if the policy
            speculates. It does not change the text.
        pooling: The result wanted in place of an output; None for an output. `sampling` is then
            NOTHING_SAMPLED.
        program: The program that it says it is a call of; None if it says nothing.
        continues: What it continues, as kind and value, by which its program is found if it names
            none: `tool` and the id of a call that it answers, `request` and the id of an earlier
            request, or `key` and a key that calls of a program share.
        generated: What other engines have generated of each continuation; empty for a request that
            begins here.
        moved: When it moved to another engine, in seconds from its arrival.
        pages: Cached blocks that came along with `generated`, by the keys of their tokens: of each
            what `Executor.saved` returns. What is missing, or does not fit, is computed again.

    Raises:
        InvalidRequest: The prompt is empty, the value is not between LEAST_VALUE and MOST_VALUE, or
            sampling is requested beside `pooling`.
    """

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
    value: float = 1.0
    cache_salt: str = ""
    block_keys: tuple[bytes, ...] | None = None
    prediction: tuple[int, ...] = ()
    adapter: str = ""
    pooling: PoolingParams | None = None
    program: Program | None = None
    continues: tuple[tuple[str, str], ...] = ()
    generated: tuple[Generated, ...] = ()
    moved: tuple[float, ...] = ()
    pages: Mapping[bytes, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("prompt", "is empty; at least 1 token is needed")
        if self.pooling is not None and self.sampling != NOTHING_SAMPLED:
            raise InvalidRequest("sampling", "nothing is sampled where a vector is wanted")
        _in_range("value", self.value, LEAST_VALUE, MOST_VALUE)


def validate(
    request: Request, *, max_model_len: int, vocab_size: int, pool_tokens: int, d_model: int
) -> None:
    """Checks a request against what this engine can serve.

    Args:
        request: The request.
        max_model_len: Most prompt and output tokens.
        vocab_size: Token ids are below it.
        pool_tokens: Tokens that fit in the whole block pool.
        d_model: Size of a pooled vector.

    Raises:
        InvalidRequest: A field exceeds a limit; the error names both.
    """
    length = len(request.prompt)
    limit = min(max_model_len, pool_tokens)
    if length >= limit:
        raise too_many_tokens(length, limit - 1)
    total = length + request.sampling.max_tokens
    if total > limit:
        raise ContextLengthExceeded(
            "max_tokens",
            f"{request.sampling.max_tokens} after a prompt of {length} tokens makes {total}; "
            f"at most {limit} in all can be served",
        )
    thinking = request.sampling.thinking
    pooling = request.pooling or PoolingParams()
    if pooling.dimensions is not None:
        _in_range("dimensions", pooling.dimensions, 1, d_model)
    named = (
        ("prompt", request.prompt),
        ("logit_bias", tuple(token for token, _ in request.sampling.logit_bias)),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("shown_token_ids", request.sampling.shown_token_ids),
        ("thinking.close", () if thinking is None else thinking.close),
        ("prediction", request.prediction),
        ("tokens", pooling.scored_token_ids),
        *(("generated", each.tokens) for each in request.generated),
    )
    _check_generated(request)
    for name, tokens in named:
        for kind in set(map(type, tokens)):
            if not issubclass(kind, numbers.Integral):
                raise InvalidRequest(name, f"token ids are integers, got {kind.__name__}")
        bad = next((t for t in tokens if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(name, f"token id {_shown(bad)} is outside 0..{vocab_size - 1}")


def _check_generated(request: Request) -> None:
    """Raises InvalidRequest if what was generated elsewhere cannot be of this request."""
    sampling, generated = request.sampling, request.generated
    if generated and len(generated) != sampling.n:
        problem = f"has {len(generated)} continuations of {sampling.n}"
        raise InvalidRequest("generated", problem)
    for each in generated:
        if len(each.tokens) > sampling.max_tokens:
            problem = f"has {len(each.tokens)} tokens; max_tokens is {sampling.max_tokens}"
            raise InvalidRequest("generated", problem)
        logprobs = 0 if sampling.logprobs is None else len(each.tokens)
        if (len(each.times), len(each.logprobs)) != (len(each.tokens), logprobs):
            raise InvalidRequest("generated", "has not a time, or no logprob, for each token")
        if any(later < earlier for earlier, later in itertools.pairwise(each.times)):
            raise InvalidRequest("generated", "has tokens that came before those before them")


def too_many_tokens(length: int, most: int) -> ContextLengthExceeded:
    """The error for a prompt that is too long, for callers that know before there is a Request."""
    problem = f"has {length} tokens; at most {most} can be served"
    return ContextLengthExceeded(
        "prompt", f"{problem}: this model's maximum context length is {most + 1}"
    )


def _in_range(name: str, value: float, low: float, high: float | None) -> None:
    most = _MOST if high is None else high
    if not low <= value <= most:
        below = "" if high is None and not value > most else f" and at most {most:g}"
        raise InvalidRequest(name, f"must be at least {low:g}{below}, got {_shown(value)}")


def _shown(value: float) -> str:
    """The number, or how many digits it has."""
    if isinstance(value, int) and abs(value) >= _LONG:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return str(value)


def at_most_entries(name: str, count: int, limit: int) -> None:
    """Raises InvalidRequest, naming the field, for a longer list."""
    if count > limit:
        raise InvalidRequest(name, f"has {count} entries; at most {limit} are allowed")


NOTHING_SAMPLED = SamplingParams(max_tokens=1)
"""Of requests with `Request.pooling`: they are prefills with one step that samples, as far as
scheduling goes. Nobody is told of that token."""

USUAL_POOLING = PoolingParams()
"""Of models that do not say how vectors are made: the last token's, normalised."""
