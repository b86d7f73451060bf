"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from jaxserve.sched.request import InvalidRequest, Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.choices import Answer, LogprobLists, finish_fields
from jaxserve.server.http.openai.logprobs import chat_logprobs
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import ChatRequest, TokenizeRequest
from jaxserve.server.requests.output_streams import Delta
from jaxserve.server.requests.templates.chat_template import ChatTemplate


async def chat_response(context: RouteContext, body: ChatRequest, http: HttpRequest) -> Response:
    """The answer, whole or as a stream of events."""
    wanted = await _wanted(context, body, record_of(http).caller)
    return await _ChatAnswer(context, body, wanted, http).response()


async def _wanted(context: RouteContext, body: ChatRequest, caller: Caller) -> list[Request]:
    request_options.check_stream_options(body)
    context.requests.check_open()
    text = await asyncio.wrap_future(render_chat(context.template, body, caller.name))
    prompt = await context.template.encode(text, context.requests.encode)
    return await context.make_requests(
        body, [prompt], _sampling(context, body, len(prompt)), caller
    )


def chat_sampling(
    context: RouteContext, body: ChatRequest, tenant: str
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Prompt and fields of SamplingParams, for who may wait for the encoding. Raises
    InvalidRequest."""
    text = render_chat(context.template, body, tenant).result()
    prompt = tuple(context.template.encode(text, context.engine.encode))
    return prompt, _sampling(context, body, len(prompt))


def render_chat(
    template: ChatTemplate, body: ChatRequest | TokenizeRequest, tenant: str = ""
) -> Future[str]:
    """The text of a chat's prompt, as `ChatTemplate.submit` has it."""
    return template.submit(
        [message.plain() for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt,
        kwargs=body.chat_template_kwargs,
        tenant=tenant,
    )


def _sampling(context: RouteContext, body: ChatRequest, prompt_tokens: int) -> dict[str, Any]:
    fields = request_options.sampling_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and limit != body.max_tokens:
        raise InvalidRequest("max_tokens", "contradicts max_completion_tokens")
    fields["max_tokens"] = (
        limit if limit is not None else context.requests.max_output_tokens(prompt_tokens)
    )
    return fields


def assistant_message(text: str) -> dict[str, Any]:
    """What the model says, as a turn of the chat."""
    return {"role": "assistant", "content": text, "refusal": None}


class _ChatAnswer(Answer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, context: RouteContext, body: ChatRequest, wanted: Sequence[Request], http: HttpRequest
    ) -> None:
        self._engine, self._with_logprobs = context.engine, bool(body.logprobs)
        super().__init__(context, body, wanted, http)

    def lists(self) -> LogprobLists | None:
        return LogprobLists(refusal=None) if self._with_logprobs else None

    def news(self, number: int, delta: Delta) -> tuple[str, Any, dict[str, Any]]:
        self._output_tokens += len(delta.token_ids)
        ended = {} if delta.last is None else finish_fields(delta.last)
        logprobs = chat_logprobs(self._engine, delta.logprobs) if self._with_logprobs else None
        return "".join(delta.text), logprobs, ended

    def text_fields(self, text: str) -> dict[str, Any]:
        return {"message": assistant_message(text)}

    def piece_fields(self, text: str, logprobs: Any) -> dict[str, Any]:
        told = logprobs if logprobs is not None and logprobs["content"] else None
        return {"delta": {"content": text} if text else {}, "logprobs": told}

    def beginnings(self) -> Iterable[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        for number in range(self._n):
            yield {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
