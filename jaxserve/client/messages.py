"""Builds messages to the server from Python values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from jaxserve.server.proto import batches_pb2
from jaxserve.server.proto import generation_pb2 as pb

TIERS = {"realtime": pb.TIER_REALTIME, "best_effort": pb.TIER_BEST_EFFORT}
SAMPLING = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)
POOLING_TYPES = {
    "last": pb.POOLING_TYPE_LAST,
    "mean": pb.POOLING_TYPE_MEAN,
    "cls": pb.POOLING_TYPE_CLS,
}
_OPTIONS = frozenset(
    {"request_id", "slo_class", "serve_late", "cache_salt", "prompt_cache_key", "model"}
)
_PROGRAM = frozenset(pb.Program.DESCRIPTOR.fields_by_name)
_SLO = frozenset(pb.Slo.DESCRIPTOR.fields_by_name)


def make_request(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    slo: Mapping[str, float] | None = None,
    tier: str | None = None,
    slo_class: str = "",
    serve_late: bool = False,
    cache_salt: str = "",
    prompt_cache_key: str = "",
    prediction: str = "",
    model: str = "",
    program: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
    """The message for one prompt. Limits are checked by the server.

    Args:
        prompt: text, or token ids.
        request_id: any id; empty lets the server choose one.
        slo: targets in milliseconds, any of ttft_ms, tbt_ms, jct_ms and max_tbt_ms.
        tier: "realtime" or "best_effort"; None leaves it to the class, or to the server.
        slo_class: one of the server's SLO classes, for the targets and the tier not given here.
        serve_late: whether to serve it even if its first token is expected late.
        cache_salt: only requests with the same salt share computed prompts.
        prompt_cache_key: requests with the same key go to the same of several replicas.
        prediction: the likely output, used for drafts; it changes no text.
        model: name of an adapter; empty for the model itself.
        program: the program that this is a call of: its `id`, and any of `deadline_ms`,
            `expected_calls` and `over`; None says nothing.
        sampling: fields of jaxserve.sched.request.SamplingParams; None leaves the server's default.

    Raises:
        ValueError: If a name does not exist, or a value does not fit its field.
    """
    _known("sampling parameter", sampling, SAMPLING)
    message = pb.GenerateRequest(
        request_id=request_id,
        slo_class=slo_class,
        serve_late=serve_late,
        cache_salt=cache_salt,
        prompt_cache_key=prompt_cache_key,
        prediction=prediction,
        model=model,
    )
    _set_targets(message, slo, tier)
    _set_prompt(message, prompt)
    _fill(message.sampling, sampling)
    if program is not None:
        _known("field of program", program, _PROGRAM)
        message.program.SetInParent()
        _fill(message.program, program)
    return message


def make_embed_request(
    inputs: str | Sequence[str | Sequence[int]],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    slo: Mapping[str, float] | None = None,
    tier: str | None = None,
    **options: Any,
) -> pb.EmbedRequest:
    """The message for vectors. Limits are checked by the server.

    Args:
        inputs: a text, or several texts or lists of token ids.
        pooling: "last", "mean" or "cls"; None leaves it to the checkpoint.
        normalize: whether vectors have length 1; None likewise.
        dimensions: how many of the first numbers to return; None for all.
        slo: as in `make_request`.
        tier: likewise.
        options: any of `request_id`, `slo_class`, `serve_late`, `cache_salt`, `prompt_cache_key`
            and `model`, likewise.

    Raises:
        ValueError: If a name does not exist, or a value does not fit its field.
    """
    if pooling is not None and pooling not in POOLING_TYPES:
        known = ", ".join(POOLING_TYPES)
        raise ValueError(f"pooling: unknown value {pooling!r}; known values are {known}")
    _known("option", options, _OPTIONS)
    message = pb.EmbedRequest(pooling=None if pooling is None else POOLING_TYPES[pooling])
    _fill(message, {"normalize": normalize, "dimensions": dimensions, **options})
    _set_targets(message, slo, tier)
    for prompt in [inputs] if isinstance(inputs, str) else inputs:
        _set_prompt(message.inputs.add(), prompt)
    return message


def make_score_request(
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    *,
    tokens: Sequence[str | int] | None = None,
    template: str | None = None,
    slo: Mapping[str, float] | None = None,
    tier: str | None = None,
    **options: Any,
) -> pb.ScoreRequest:
    """The message for scores of pairs. Limits are checked by the server.

    Args:
        queries: one, or as many as documents.
        documents: one or several.
        tokens: possible answers, as text or ids; the first one means that a pair matches. An empty
            list takes the cosine of two vectors, None the server's default.
        template: the prompt of a pair, with {query} and {document} in it; None for the server's.
        slo: as in `make_request`.
        tier: likewise.
        options: any of `request_id`, `slo_class`, `serve_late`, `cache_salt` and `model`, likewise.

    Raises:
        ValueError: If a name does not exist, or a value does not fit its field.
    """
    _known("option", options, _OPTIONS - {"prompt_cache_key"})
    message = pb.ScoreRequest()
    texts = {"queries": queries, "documents": documents}
    _fill(message, {name: [t] if isinstance(t, str) else t for name, t in texts.items()})
    _fill(message, {"template": template, **options})
    if tokens is not None:
        message.tokens.SetInParent()
        for token in tokens:
            _fill(message.tokens.tokens.add(), {"text" if isinstance(token, str) else "id": token})
    _set_targets(message, slo, tier)
    return message


def make_line(
    prompt: str | Sequence[int],
    *,
    line_id: str = "",
    cache_salt: str = "",
    prompt_cache_key: str = "",
    **sampling: Any,
) -> batches_pb2.BatchLine:
    """The message for one line of a batch.

    Args:
        prompt: text, or token ids.
        line_id: any name, which the result repeats.
        cache_salt: as in `make_request`.
        prompt_cache_key: likewise; only routers before several replicas read it.
        sampling: as in `make_request`.

    Raises:
        ValueError: If a name does not exist, or a value does not fit its field.
    """
    _known("sampling parameter", sampling, SAMPLING)
    message = batches_pb2.BatchLine(
        id=line_id, cache_salt=cache_salt, prompt_cache_key=prompt_cache_key
    )
    _set_prompt(message, prompt)
    _fill(message.sampling, sampling)
    return message


def _set_targets(message: Any, slo: Mapping[str, float] | None, tier: str | None) -> None:
    if tier is not None and tier not in TIERS:
        raise ValueError(f"tier: unknown value {tier!r}; known values are {', '.join(TIERS)}")
    _known("slo", slo or {}, _SLO)
    if tier is not None:
        message.tier = TIERS[tier]
    _fill(message.slo, slo or {})


def _set_prompt(message: Any, prompt: str | Sequence[int]) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.SetInParent()  # an empty list is sent as such, for the server to refuse
        message.token_ids.ids.extend(int(token) for token in prompt)


def _fill(message: Message, fields: Mapping[str, Any]) -> None:
    """Sets fields; None leaves a field unset. Raises ValueError, which names the field, for a value
    that its protobuf type cannot hold."""
    for name, value in fields.items():
        if value is None:
            continue
        field_value = [value] if name == "stop" and isinstance(value, str) else value
        try:
            message.MergeFrom(type(message)(**{name: field_value}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None


def _known(what: str, options: Mapping[str, Any], names: frozenset[str]) -> None:
    unknown = sorted(set(options) - names)
    if unknown:
        known = ", ".join(sorted(names))
        raise ValueError(f"unknown {what} {unknown[0]!r}; known ones are {known}")
