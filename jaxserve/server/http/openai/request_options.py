"""From a body's fields to the engine's fields."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from jaxserve.sched.request import (
    SLO,
    Grammar,
    GrammarKind,
    InvalidRequest,
    Program,
    SamplingParams,
    Tier,
)
from jaxserve.server.http.openai.schema import (
    CompletionRequest,
    Generation,
    OneAnswer,
    SloFields,
    Targeted,
)
from jaxserve.server.requests.slo_classes import own_targets, said_program

# Fields with the same meaning and type in both; the other fields differ.
_PLAIN = Generation.model_fields.keys() & {field.name for field in fields(SamplingParams)}
_PLAIN -= {"top_k", "stop", "stop_token_ids", "logit_bias"}
_DEFAULTS = {"temperature": 1.0}
_REALTIME = ("default", "priority", "fast", "scale")
_SERVICE_TIERS = {**dict.fromkeys(_REALTIME, Tier.REALTIME), "flex": Tier.BEST_EFFORT}
_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "json_object": lambda _: Grammar.json_object(),
}
_SCHEMA = "response_format.json_schema.schema"
_ID_DIGITS = 10
SERVED_AS = {Tier.REALTIME: "default", Tier.BEST_EFFORT: "flex"}
"""The response's `service_tier` for each tier."""


def sampling_fields(body: Generation, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The SamplingParams fields, by its own names, except max_tokens and logprobs. defaults: the
    checkpoint's values for fields that are null or missing; other missing fields have OpenAI's
    defaults. Raises InvalidRequest."""
    fields = {name: getattr(body, name) for name in _PLAIN}
    sampling = {name: value for name, value in fields.items() if value is not None}
    sampling = {**_DEFAULTS, **defaults, **sampling}
    if body.top_k is not None:
        sampling["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.stop is not None:
        sampling["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        sampling["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        sampling["logit_bias"] = tuple(sorted(_bias(key, b) for key, b in body.logit_bias.items()))
    if (grammar := requested_grammar(body)) is not None:
        sampling["grammar"] = grammar
    return sampling


def completion_sampling(body: CompletionRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All SamplingParams fields of a completion. defaults: as in `sampling_fields`. Raises
    InvalidRequest."""
    sampling = sampling_fields(body, defaults)
    if body.max_tokens is not None:
        sampling["max_tokens"] = body.max_tokens
    if scores_prompt_only(body):
        if body.min_tokens:
            raise InvalidRequest("min_tokens", f"must be at most 0, got {body.min_tokens}")
        sampling["max_tokens"] = 1  # the answer leaves this token out
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = body.logprobs
    if body.best_of not in (None, 1, body.n):
        raise InvalidRequest("best_of", "only as many as n are generated")
    return sampling


def scores_prompt_only(body: CompletionRequest) -> bool:
    """Whether the answer is the prompt alone, without new tokens."""
    return bool(body.echo) and body.max_tokens == 0


def requested_targets(body: Targeted) -> tuple[SLO, str]:
    """The request's own targets, in seconds, and the name of its class, or "". Raises
    InvalidRequest."""
    slo, named = body.slo, body.slo_class or ""
    if not isinstance(slo, str):
        return own_targets((slo or SloFields()).model_dump(exclude_none=True)), named
    if named and named != slo:
        raise InvalidRequest("slo", f"{slo!r:.80} contradicts slo_class {named!r:.80}")
    return SLO(), slo


def requested_tier(body: Targeted) -> Tier | None:
    """The tier that `tier`, `service_tier` or `priority` (below 0 real-time, above 0 best-effort)
    asks for; None if none of them does. Raises InvalidRequest if they contradict each other."""
    priority = body.priority or 0  # vLLM's clients send 0 by default
    tiers = {
        "tier": None if body.tier is None else Tier[body.tier.upper()],
        "service_tier": _SERVICE_TIERS.get(body.service_tier or ""),
        "priority": None if not priority else Tier(priority > 0),
    }
    said = {name: tier for name, tier in tiers.items() if tier is not None}
    for one, other in itertools.combinations(said, 2):
        if said[one] is not said[other]:
            problem = f"{getattr(body, one)} contradicts {other} {getattr(body, other)}"
            raise InvalidRequest(one, problem)
    return next(iter(said.values()), None)


PROGRAM_FIELDS = ("program", "program_deadline_ms", "expected_calls", "program_over")
"""What a body says of its program."""


def requested_program(body: Targeted) -> Program | None:
    """What the body says of its program; None if it says nothing. Raises InvalidRequest."""
    if not isinstance(body, OneAnswer):
        return None
    return said_program(
        body.program,
        body.program_deadline_ms,
        body.expected_calls,
        body.program_over,
        PROGRAM_FIELDS,
    )


def check_stream_options(body: Generation) -> None:
    """Raises InvalidRequest for stream_options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "is only for stream: true")


def _bias(key: str, bias: float) -> tuple[int, float]:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _ID_DIGITS):
        raise InvalidRequest("logit_bias", f"{key!r:.80} is not a token id")
    return int(key), bias


def requested_grammar(body: Generation) -> Grammar | None:
    """The grammar of the text; None for any text. Raises InvalidRequest, also if there are
    several."""
    grammars = list(_asked(body))
    if len(grammars) > 1:
        raise InvalidRequest(grammars[1][0], f"contradicts {grammars[0][0]}; one of them is enough")
    if not grammars:
        return None
    with naming_grammar_fields(body):
        return grammars[0][1]()


@contextmanager
def naming_grammar_fields(body: Generation) -> Iterator[None]:
    """Makes errors of the grammar name the field that it came in."""
    try:
        yield
    except InvalidRequest as error:
        if not error.field_name.startswith("grammar."):
            raise
        of_calls = error.field_name.endswith(GrammarKind.LARK)
        where = "tools" if of_calls else grammar_field(body) or "tools"
        raise error.renamed(where) from None


@contextmanager
def renaming(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Makes errors of a chat name the fields of the call that it is made of. names: the chat's
    fields, as regular expressions, and the call's, the longest first."""
    try:
        yield
    except InvalidRequest as error:
        for theirs, ours in names:
            name, count = re.subn(rf"^(?:{theirs})(?=\.|$)", ours, error.field_name)
            if count:
                raise error.renamed(name) from None
        raise


def unenforced(body: Generation) -> list[str]:
    """Places of the keywords in a schema that is not strict that no grammar can hold the text to.
    Raises InvalidRequest."""
    form = body.response_format
    schema = None if form is None else form.json_schema
    if schema is None:
        return []
    with naming_grammar_fields(body):
        return [f"{_SCHEMA}.{place}" for place in schema.held()[1]]


def check_told(places: Sequence[str]) -> None:
    """Raises InvalidRequest if a line of a batch has any `unenforced` keywords."""
    if places:
        problem = "cannot be enforced, of which a batch's answers do not tell"
        raise InvalidRequest(places[0], problem)


def grammar_field(body: Generation) -> str | None:
    """The field that has the body's grammar; None if there is none. Raises InvalidRequest."""
    return next((name for name, _ in _asked(body)), None)


def _asked(body: Generation) -> Iterator[tuple[str, Callable[[], Grammar]]]:
    """The grammars that the body has, by field. Raises InvalidRequest."""
    form, structured = body.response_format, body.structured_outputs
    if form is not None:
        schema = form.json_schema
        if (schema is not None) != (form.type == "json_schema"):
            problem = f"is not for type {form.type}" if schema else "is missing"
            raise InvalidRequest("response_format.json_schema", problem)
        if form.type == "json_object":
            yield "response_format", Grammar.json_object
        if schema is not None:
            yield _SCHEMA, lambda: schema.held()[0]
    if structured is not None:
        fields = structured.model_dump(by_alias=True, exclude_none=True)
        if not fields:
            raise InvalidRequest("structured_outputs", "needs json, regex, choice or json_object")
        for name, value in fields.items():
            yield f"structured_outputs.{name}", functools.partial(_GRAMMARS[name], value)
    for name in ("json", "regex", "choice"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            yield f"guided_{name}", functools.partial(_GRAMMARS[name], value)
