"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from jaxserve.sched.request import InvalidRequest, Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.choices import (
    LogprobLists,
    UsageCount,
    finish_fields,
    response_head,
    whole_answer,
)
from jaxserve.server.http.openai.logprobs import chat_logprobs
from jaxserve.server.http.openai.multi_prompt import Generating, unless_gone
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import ChatRequest, TokenizeRequest
from jaxserve.server.http.openai.sse import EventStream
from jaxserve.server.requests.templates.chat_template import ChatTemplate


async def chat_response(context: RouteContext, body: ChatRequest, http: HttpRequest) -> Response:
    """The answer, whole or as a stream of events."""
    wanted = await _wanted(context, body, record_of(http).caller)
    generating = Generating(context.requests, wanted, record_of(http))
    answer = _Answer(context, body, generating)
    if body.stream:
        return EventStream(answer.chunks(), generating.end, generating.record)
    try:
        return await unless_gone(http, answer.whole())
    finally:
        generating.end()


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


class _Answer:
    """Of one call."""

    def __init__(self, context: RouteContext, body: ChatRequest, generating: Generating) -> None:
        self._engine, self._requests = context.engine, context.requests
        self._generating = generating
        self._n = generating.wanted[0].sampling.n
        self._model = context.model
        self._usage = UsageCount(generating.wanted)
        self._stream = body.stream_options
        self._with_logprobs = bool(body.logprobs)

    async def whole(self) -> Response:
        """The object."""
        ends: list[dict[str, Any]] = [{} for _ in range(self._n)]
        texts: list[list[str]] = [[] for _ in ends]
        lists = [LogprobLists(refusal=None) if self._with_logprobs else None for _ in ends]
        async for number, delta in self._generating.deltas():
            texts[number] += delta.text
            if (told := lists[number]) is not None:
                told.add(chat_logprobs(self._engine, delta.logprobs))
            self._usage.add(len(delta.token_ids))
            if delta.last is not None:
                ends[number] = finish_fields(delta.last)
        messages = [
            {"role": "assistant", "content": "".join(text), "refusal": None} for text in texts
        ]
        choices = [
            ({"index": number, "message": messages[number], **ends[number]}, lists[number])
            for number in range(self._n)
        ]
        first = response_head("chat.completion", "chatcmpl", self._model, self._generating)
        characters = sum(len(each["content"] or "") for each in messages)
        fields = {**first, "usage": self._usage.as_dict()}
        return await whole_answer(self._requests, fields, choices, characters)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The role of each continuation first, then one for each piece of news."""
        first = response_head("chat.completion.chunk", "chatcmpl", self._model, self._generating)
        for number in range(self._n):
            yield self._chunk(first, number, {"role": "assistant", "content": ""})
        async for number, delta in self._generating.deltas():
            self._usage.add(len(delta.token_ids))
            text = "".join(delta.text)
            chunk = self._chunk(first, number, {"content": text} if text else {})
            (choice,) = chunk["choices"]
            if self._with_logprobs and delta.logprobs:
                choice["logprobs"] = chat_logprobs(self._engine, delta.logprobs)
            if delta.last is not None:
                choice.update(finish_fields(delta.last))
            yield chunk
        if self._stream is not None and self._stream.include_usage:
            yield {**first, "choices": [], "usage": self._usage.as_dict()}

    def _chunk(self, first: dict[str, Any], number: int, delta: dict[str, str]) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**first, "choices": [choice]}
        if self._stream is not None and self._stream.continuous_usage_stats:
            chunk["usage"] = self._usage.as_dict()
        elif self._stream is not None and self._stream.include_usage:
            chunk["usage"] = None
        return chunk
