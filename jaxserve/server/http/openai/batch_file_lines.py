"""Reads lines of OpenAI's batch files, and writes lines of their results."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import to_json

from jaxserve.sched.request import InvalidRequest, PoolingParams
from jaxserve.server.batches.batch_lines import NO_ROOM, Completion, Line, Result
from jaxserve.server.batches.records import NewLine
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.answer_messages import ended_message
from jaxserve.server.http.openai.body_limits import parse_body, validate_body
from jaxserve.server.http.openai.chat import chat_sampling
from jaxserve.server.http.openai.choices import usage_fields
from jaxserve.server.http.openai.files import MAX_LINE
from jaxserve.server.http.openai.logprobs import CompletionLogprobs, chat_logprobs
from jaxserve.server.http.openai.pooling.pooling_schema import EmbeddingRequest
from jaxserve.server.http.openai.responses.response_lines import (
    digits_of,
    naming_response_fields,
    response_answer,
    response_sampling,
)
from jaxserve.server.http.openai.responses.schema import ResponseRequest
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    Targeted,
    predicted_text,
)
from jaxserve.server.requests.call_outcome import drafted_tokens

MAX_CUSTOM_ID = 128
# A JSON string of at most this many characters.
_CUSTOM_ID = re.compile(
    r'"custom_id"\s*:\s*("(?:[^"\\\x00-\x1f]|\\u[0-9a-fA-F]{4}|\\[^u]){1,128}")'
)
_STATUS = {"INVALID_ARGUMENT": 400, NO_ROOM: 413}


class BatchRequestLine(Body):
    """One line of a batch file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def read_line(context: RouteContext, endpoint: str, text: str, tenant: str) -> NewLine:
    """The journal's line for a line of a batch file. An error in the line becomes its result.

    Args:
        context: what the routes need.
        endpoint: the batch's endpoint.
        text: the line.
        tenant: owner of the batch; tenants take turns at the chat template and the grammars.
    """
    requests, name = context.requests, _custom_id(text)
    try:
        raw = text.encode()
        if len(raw) > MAX_LINE:
            text = text[:MAX_CUSTOM_ID]  # enough to recognise it
            raise InvalidRequest("line", f"takes more than {MAX_LINE:,} bytes")
        request_line = parse_body(raw, BatchRequestLine)
        name = request_line.custom_id[:MAX_CUSTOM_ID]
        if len(request_line.custom_id) > MAX_CUSTOM_ID:
            raise InvalidRequest("custom_id", f"at most {MAX_CUSTOM_ID} characters are allowed")
        if (request_line.method, request_line.url) != ("POST", endpoint):
            raise InvalidRequest("url", f"the batch is for POST {endpoint}")
        of_endpoint = _ENDPOINTS[endpoint]
        body = validate_body(request_line.body, of_endpoint.body)
        _check_best_effort(context, body)
        asked = of_endpoint.asked(context, body, tenant)
        salt, likely = body.cache_salt or "", predicted_text(body)
        line = Line(asked.prompt, asked.sampling, name, salt, likely, asked.note, asked.pooling)
    except (InvalidRequest, ApiError) as error:
        if isinstance(error, ApiError):
            where = error.param or "line"
            error = InvalidRequest(where, str(error).removeprefix(f"{where}: "))
        return Line(text, {}, name).checked(requests, tenant, error)
    return line.checked(requests, tenant, named=asked.named)


def _custom_id(text: str) -> str:
    """The custom_id of a line, even of one that is malformed; "" if none is found."""
    match = _CUSTOM_ID.search(text)
    try:
        return "" if match is None else str(json.loads(match[1])).encode().decode()
    except ValueError:  # such as half a surrogate pair
        return ""


def written_line(
    context: RouteContext, note: Mapping[str, Any], batch: str, number: int, result: Result
) -> dict[str, Any]:
    """A line of the output file, or of the error file.

    Args:
        context: what the routes need.
        note: the batch's endpoint, and when it was created.
        batch: the batch's id.
        number: the line's number.
        result: the line's result.
    """
    if result.error is not None:
        status = _STATUS.get(result.error.code, 500)
        body = ApiError(status, result.error.message).body()
    else:
        head = {"id": f"{batch}-{number}", "created": note["created"], "model": context.model}
        status, body = 200, _ENDPOINTS[note["endpoint"]].answer(context, result, head)
    return {
        "id": f"batch_req-{batch}-{number}",
        "custom_id": result.name,
        "response": {"status_code": status, "request_id": f"{batch}-{number}", "body": body},
        "error": None,
    }


class AskedLine(NamedTuple):
    """What a line asks for.

    Attributes:
        prompt, sampling, note, pooling: as in `Line`.
        named: context that renames fields in errors of its request.
    """

    prompt: Any
    sampling: dict[str, Any]
    named: Callable[[], AbstractContextManager[None]]
    note: Mapping[str, Any] = {}
    pooling: PoolingParams | None = None


def _check_best_effort(context: RouteContext, body: Targeted) -> None:
    """Raises InvalidRequest for what lines of batches cannot have."""
    if body.model not in (None, "", context.model):
        problem = f"a batch is for {context.model!r}, and for no adapter; got {body.model!r:.80}"
        raise InvalidRequest("model", problem)
    if getattr(body, "stream", None):
        raise InvalidRequest("stream", "a batch has no streams")
    for name in ("slo", "slo_class", "serve_late"):
        if getattr(body, name):
            raise InvalidRequest(name, "a batch is best-effort, and has no targets")
    for name in request_options.PROGRAM_FIELDS:
        if getattr(body, name, None) is not None:
            raise InvalidRequest(name, "lines of a batch are calls of no program")
    if body.tier == "realtime":
        raise InvalidRequest("tier", "a batch is best-effort")
    if body.priority is not None and body.priority < 0:
        raise InvalidRequest("priority", "a batch is best-effort, which is 0 or more")


def _chat(context: RouteContext, body: ChatRequest, tenant: str) -> AskedLine:
    prompt, sampling, note = chat_sampling(context, body, tenant)
    named = functools.partial(request_options.naming_grammar_fields, body)
    return AskedLine(prompt, sampling, named, note)


def _response(context: RouteContext, body: ResponseRequest, tenant: str) -> AskedLine:
    chat, prompt, sampling, note = response_sampling(context, body, tenant)
    return AskedLine(prompt, sampling, functools.partial(naming_response_fields, chat), note)


def _embedding(context: RouteContext, body: EmbeddingRequest, tenant: str) -> AskedLine:
    info = context.requests.info()
    pooling = info.pooling.with_own(body.pooling, body.normalize, body.dimensions)
    note = {"encoding": body.encoding_format or "float"}
    named = functools.partial(request_options.renaming, (("prompt", "input"),))
    return AskedLine(_one_prompt(body.input, "input"), {}, named, note, pooling)


def _completion(context: RouteContext, body: CompletionRequest, tenant: str) -> AskedLine:
    if body.echo:
        raise InvalidRequest("echo", "is not for batches")
    request_options.check_told(request_options.unenforced(body))
    sampling = request_options.completion_sampling(body, context.sampling_defaults)
    named = functools.partial(request_options.naming_grammar_fields, body)
    return AskedLine(_one_prompt(body.prompt, "prompt"), sampling, named)


def _one_prompt(prompt: Any, field_name: str) -> Any:
    if isinstance(prompt, str):
        return prompt
    if not all(isinstance(token, int) for token in prompt):
        raise InvalidRequest(field_name, f"a line has one {field_name}")
    return tuple(prompt)


def _embedded(context: RouteContext, result: Result, head: Mapping[str, Any]) -> dict[str, Any]:
    (completion,) = result.completions
    vector: Any = completion.pooled
    if result.note["encoding"] == "float":
        vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
    tokens = completion.usage.prompt_tokens
    return {
        **head,
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector}],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _generated(
    context: RouteContext, result: Result, head: Mapping[str, Any], *, chat: bool
) -> dict[str, Any]:
    completions, name = result.completions, head["id"]
    first = completions[0].usage
    output = sum(completion.usage.output_tokens for completion in completions)
    accepted, rejected = drafted_tokens([completion.usage for completion in completions])
    return {
        **head,
        "object": "chat.completion" if chat else "text_completion",
        "choices": [
            _choice(context, chat, completion, result.note, f"{name}-{completion.index}")
            for completion in completions
        ],
        "usage": usage_fields(
            prompt_tokens=first.prompt_tokens,
            output_tokens=output,
            cached_tokens=first.cached_tokens,
            accepted=accepted,
            rejected=rejected,
        ),
    }


def _choice(
    context: RouteContext, chat: bool, completion: Completion, note: Mapping[str, Any], name: str
) -> dict[str, Any]:
    # Whether its first space belongs to the text depends on the prompt, which is not known here.
    before = completion.token_ids if completion.text.startswith(" ") else ()
    tell: Callable[..., Any] = CompletionLogprobs(context.engine, before).as_dict
    if chat:
        tell = functools.partial(chat_logprobs, context.engine)
    logprobs = tell(completion.logprobs) if completion.logprobs else None
    said: dict[str, Any] = {"text": completion.text, "finish_reason": str(completion.finish_reason)}
    if chat:
        template, count = context.template, itertools.count()
        said = ended_message(
            template,
            note,
            completion.text,
            str(completion.finish_reason),
            lambda: template.tool_format.id_of(digits_of(f"{name}-{next(count)}")),
        )
    return {"index": completion.index, "logprobs": logprobs, **said}


class _Endpoint(NamedTuple):
    """How lines of an endpoint are read, and their results written. answer: the body, which begins
    with the given fields."""

    body: type[Targeted]
    asked: Callable[[RouteContext, Any, str], AskedLine]
    answer: Callable[[RouteContext, Result, Mapping[str, Any]], dict[str, Any]]


_ENDPOINTS = {
    "/v1/completions": _Endpoint(
        CompletionRequest, _completion, functools.partial(_generated, chat=False)
    ),
    "/v1/chat/completions": _Endpoint(ChatRequest, _chat, functools.partial(_generated, chat=True)),
    "/v1/responses": _Endpoint(ResponseRequest, _response, response_answer),
    "/v1/embeddings": _Endpoint(EmbeddingRequest, _embedding, _embedded),
}


def jsonl_line(line: dict[str, Any]) -> bytes:
    """The line as JSONL."""
    return to_json(line, inf_nan_mode="null") + b"\n"
