"""Lines of OpenAI's batch files, and what became of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.batches.batch_lines import NO_ROOM, Completion, Line, Result
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.body_limits import parse, validated
from jaxserve.server.http.openai.chat import chat_sampling
from jaxserve.server.http.openai.files import MAX_LINE
from jaxserve.server.http.openai.logprobs import CompletionLogprobs, chat_logprobs
from jaxserve.server.http.openai.route_context import Front
from jaxserve.server.http.openai.schema import Body, ChatRequest, CompletionRequest, Generation

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_BODIES: Mapping[str, type[Generation]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
MAX_CUSTOM_ID = 128
# As JSON has strings, of at most as many characters.
_CUSTOM_ID = re.compile(
    r'"custom_id"\s*:\s*("(?:[^"\\\x00-\x1f]|\\u[0-9a-fA-F]{4}|\\[^u]){1,128}")'
)
_STATUS = {"INVALID_ARGUMENT": 400, NO_ROOM: 413}


class BatchRequestLine(Body):
    """One line of the file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def read_line(
    front: Front, endpoint: str, text: str, tenant: str
) -> tuple[Line, InvalidRequest | None]:
    """A tenant's line for the journal, and what is wrong with it, which becomes its result."""
    name = _custom_id(text)
    try:
        raw = text.encode()
        if len(raw) > MAX_LINE:
            text = text[:MAX_CUSTOM_ID]  # nobody needs all of it
            raise InvalidRequest("line", f"takes more than {MAX_LINE:,} bytes")
        given = parse(raw, BatchRequestLine)
        name = given.custom_id[:MAX_CUSTOM_ID]
        if len(given.custom_id) > MAX_CUSTOM_ID:
            raise InvalidRequest("custom_id", f"at most {MAX_CUSTOM_ID} characters are allowed")
        if (given.method, given.url) != ("POST", endpoint):
            raise InvalidRequest("url", f"the batch is for POST {endpoint}")
        body = validated(given.body, _BODIES[endpoint])
        return Line(*_asked(front, body, tenant), name), None
    except InvalidRequest as error:
        return Line(text, {}, name), error
    except ApiError as error:
        where = error.param or "line"
        return Line(text, {}, name), InvalidRequest(where, str(error).removeprefix(f"{where}: "))


def _custom_id(text: str) -> str:
    """That of a line that may be no JSON, or have other fields; "" where none is found."""
    found = _CUSTOM_ID.search(text)
    try:
        return "" if found is None else str(json.loads(found[1])).encode().decode()
    except ValueError:  # half a surrogate pair, among others
        return ""


def written_line(
    front: Front, note: Mapping[str, Any], batch: str, number: int, result: Result
) -> dict[str, Any]:
    """What a line of the output, or of the errors, says. note: the batch's endpoint and when it was
    created."""
    if result.error is not None:
        status = _STATUS.get(result.error.code, 500)
        body = ApiError(status, result.error.message).body()
    else:
        head = {"id": f"{batch}-{number}", "created": note["created"], "model": front.model}
        status, body = 200, {**head, **_answer(front, note["endpoint"], result.completions)}
    return {
        "id": f"batch_req-{batch}-{number}",
        "custom_id": result.name,
        "response": {"status_code": status, "request_id": f"{batch}-{number}", "body": body},
        "error": None,
    }


def _asked(front: Front, body: Generation, tenant: str) -> tuple[Any, dict[str, Any]]:
    """Prompt and sampling fields."""
    front.check_model(body.model)
    if body.stream:
        raise InvalidRequest("stream", "a batch has no streams")
    for name in ("slo", "slo_class", "serve_late"):
        if getattr(body, name):
            raise InvalidRequest(name, "a batch is best-effort, and has no targets")
    if body.tier == "realtime":
        raise InvalidRequest("tier", "a batch is best-effort")
    if isinstance(body, ChatRequest):
        return chat_sampling(front, body, tenant)
    assert isinstance(body, CompletionRequest)
    if body.echo:
        raise InvalidRequest("echo", "is not for batches")
    prompt: Any = body.prompt
    if not isinstance(prompt, str):
        if not all(isinstance(token, int) for token in prompt):
            raise InvalidRequest("prompt", "a line has one prompt")
        prompt = tuple(prompt)
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    return prompt, request_options.completion_sampling(body)


def _answer(front: Front, endpoint: str, completions: tuple[Completion, ...]) -> dict[str, Any]:
    chat = endpoint == CHAT
    usage = completions[0].usage
    output = sum(each.usage.output_tokens for each in completions)
    return {
        "object": "chat.completion" if chat else "text_completion",
        "choices": [_choice(front, chat, each) for each in completions],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": usage.prompt_tokens + output,
        },
    }


def _choice(front: Front, chat: bool, found: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": found.index, "finish_reason": str(found.finish_reason)}
    choice["logprobs"] = None
    if found.logprobs:
        if chat:
            choice["logprobs"] = chat_logprobs(front.engine, found.logprobs)
        else:
            choice["logprobs"] = CompletionLogprobs(front.engine).of(found.logprobs)
    if chat:
        choice["message"] = {"role": "assistant", "content": found.text, "refusal": None}
    else:
        choice["text"] = found.text
    return choice


def dumped(line: dict[str, Any]) -> bytes:
    """As a line of JSONL."""
    return to_json(line, inf_nan_mode="null") + b"\n"
