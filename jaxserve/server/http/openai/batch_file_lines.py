"""Reads lines of OpenAI's batch files, and writes lines of their results."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import to_json

from jaxserve.sched.request import InvalidRequest
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
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    Generation,
    predicted_text,
)
from jaxserve.server.requests.call_outcome import drafted_tokens

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_BODIES: Mapping[str, type[Generation]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
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
        body = validate_body(request_line.body, _BODIES[endpoint])
        prompt, sampling, note = _asked(context, body, tenant)
        salt = body.cache_salt or ""
        line = Line(prompt, sampling, name, salt, predicted_text(body), note)
    except (InvalidRequest, ApiError) as error:
        if isinstance(error, ApiError):
            where = error.param or "line"
            error = InvalidRequest(where, str(error).removeprefix(f"{where}: "))
        return Line(text, {}, name).checked(requests, tenant, error)
    return line.checked(
        requests, tenant, named=functools.partial(request_options.naming_grammar_fields, body)
    )


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
        status, body = 200, {**head, **_answer(context, note["endpoint"], result, head["id"])}
    return {
        "id": f"batch_req-{batch}-{number}",
        "custom_id": result.name,
        "response": {"status_code": status, "request_id": f"{batch}-{number}", "body": body},
        "error": None,
    }


def _asked(
    context: RouteContext, body: Generation, tenant: str
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Prompt, sampling fields, and the note that the answer will need."""
    if body.model not in (None, "", context.model):
        problem = f"a batch is for {context.model!r}, and for no adapter; got {body.model!r:.80}"
        raise InvalidRequest("model", problem)
    if body.stream:
        raise InvalidRequest("stream", "a batch has no streams")
    for name in ("slo", "slo_class", "serve_late"):
        if getattr(body, name):
            raise InvalidRequest(name, "a batch is best-effort, and has no targets")
    for name in request_options.PROGRAM_FIELDS:
        if getattr(body, name) is not None:
            raise InvalidRequest(name, "lines of a batch are calls of no program")
    if body.tier == "realtime":
        raise InvalidRequest("tier", "a batch is best-effort")
    if body.priority is not None and body.priority < 0:
        raise InvalidRequest("priority", "a batch is best-effort, which is 0 or more")
    if isinstance(body, ChatRequest):
        return chat_sampling(context, body, tenant)
    assert isinstance(body, CompletionRequest)
    if body.echo:
        raise InvalidRequest("echo", "is not for batches")
    request_options.check_told(request_options.unenforced(body))
    prompt: Any = body.prompt
    if not isinstance(prompt, str):
        if not all(isinstance(token, int) for token in prompt):
            raise InvalidRequest("prompt", "a line has one prompt")
        prompt = tuple(prompt)
    return prompt, request_options.completion_sampling(body, context.sampling_defaults), {}


def _answer(context: RouteContext, endpoint: str, result: Result, name: str) -> dict[str, Any]:
    completions, chat = result.completions, endpoint == CHAT
    first = completions[0].usage
    output = sum(completion.usage.output_tokens for completion in completions)
    accepted, rejected = drafted_tokens([completion.usage for completion in completions])
    return {
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
            lambda: template.tool_format.id_of(_digits(f"{name}-{next(count)}")),
        )
    return {"index": completion.index, "logprobs": logprobs, **said}


def _digits(name: str) -> bytes:
    """Digits for an id that is the same whenever the results are read."""
    return hashlib.sha256(name.encode()).digest()[:12]


def jsonl_line(line: dict[str, Any]) -> bytes:
    """The line as JSONL."""
    return to_json(line, inf_nan_mode="null") + b"\n"
