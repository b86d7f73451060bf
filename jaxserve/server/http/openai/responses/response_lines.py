"""Responses in lines of batches. They are not stored, and continue no others."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxserve.engine.output import FinishReason
from jaxserve.sched.request import InvalidRequest, SamplingParams, Tier
from jaxserve.server.batches.batch_lines import Result
from jaxserve.server.http.openai.answer_messages import message_parser
from jaxserve.server.http.openai.chat import chat_sampling
from jaxserve.server.http.openai.request_options import naming_grammar_fields, renaming
from jaxserve.server.http.openai.responses.chat_request import NAMES, as_chat
from jaxserve.server.http.openai.responses.input_items import (
    check_calls,
    kept_items,
    messages_of,
)
from jaxserve.server.http.openai.responses.output_items import OutputItems
from jaxserve.server.http.openai.responses.response_fields import asked_fields
from jaxserve.server.http.openai.responses.schema import ResponseRequest
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import ChatRequest

_FIELDS = "response"  # in the note


def response_sampling(
    context: RouteContext, body: ResponseRequest, tenant: str
) -> tuple[ChatRequest, tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """The chat that serves a line, its prompt, SamplingParams fields and note. May block. Raises
    InvalidRequest.

    Args:
        context: what the routes need.
        body: the line's body.
        tenant: the batch's owner.
    """
    for name, problem in (
        ("previous_response_id", "a line of a batch continues no response"),
        ("store", "responses of a batch are not stored"),
        ("include", "a batch's responses include nothing more"),
    ):
        if getattr(body, name):
            raise InvalidRequest(name, problem)
    items = kept_items(body.input)
    check_calls(items, 0)
    messages = messages_of(items)
    unsaid = any(tool.strict is None for tool in body.tools or ())
    for strict in (True, False) if unsaid else (False,):
        try:
            with renaming(NAMES):
                chat = as_chat(body, messages, strict=strict)
                prompt, sampling, note = chat_sampling(context, chat, tenant)
                params = SamplingParams(**sampling)
            break
        except InvalidRequest as error:  # as for calls: strict as far as grammars can be
            if not strict or not error.field_name.startswith("tools"):
                raise
    fields = asked_fields("", 0, body, Tier.BEST_EFFORT, params, context.model, strict=strict)
    return chat, prompt, sampling, {**note, _FIELDS: fields}


@contextmanager
def naming_response_fields(chat: ChatRequest) -> Iterator[None]:
    """Makes errors of the request name the response's fields. chat: that serves it."""
    with renaming(NAMES), naming_grammar_fields(chat):
        yield


def response_answer(
    context: RouteContext, result: Result, head: Mapping[str, Any]
) -> dict[str, Any]:
    """The response of a line.

    Args:
        context: what the routes need.
        result: the line's result.
        head: its id, and when the batch was created.
    """
    (completion,) = result.completions
    name, count, template = head["id"], itertools.count(), context.template
    items = OutputItems(
        lambda: template.tool_format.id_of(digits_of(f"{name}-{next(count)}")),
        lambda what: digits_of(f"{name}-{what}"),
    )
    parser = message_parser(template, result.note)
    cut = completion.finish_reason is FinishReason.LENGTH
    status: Any = "incomplete" if cut else "completed"
    for _ in items.add([*parser.feed(completion.text), *parser.finish()]):
        pass
    for _ in items.finish(status):
        pass
    usage = completion.usage
    return {
        **result.note[_FIELDS],
        "id": f"resp_{digits_of(name).hex()}",
        "created_at": head["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "store": False,
        "output": items.items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        },
    }


def digits_of(name: str) -> bytes:
    """Digits for an id that is the same whenever the results are read."""
    return hashlib.sha256(name.encode()).digest()[:12]
