"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from jaxserve.server.http.openai.tool_messages import MessageDeltas, message_with_calls
from jaxserve.server.http.openai.tool_options import (
    ToolUse,
    call_parser,
    check_calls,
    shown_tools,
    tool_sampling,
    tool_use,
)
from jaxserve.server.requests.output_streams import Delta
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.tools.parser import CallParser
from jaxserve.server.tools.registry import ToolFormat


async def chat_response(context: RouteContext, body: ChatRequest, http: HttpRequest) -> Response:
    """The answer, whole or as a stream of events."""
    use = tool_use(body)
    wanted = await _wanted(context, body, use, record_of(http).caller)
    answer = _ChatAnswer if use is None else _ToolAnswer
    return await answer(context, body, wanted, http, use).response()


async def _wanted(
    context: RouteContext, body: ChatRequest, use: ToolUse | None, caller: Caller
) -> list[Request]:
    request_options.check_stream_options(body)
    context.requests.check_open()
    held: dict[str, Any] = {}
    if use is not None:
        with request_options.naming_grammar_fields(body):
            if use.otherwise is not None:
                await context.requests.check_grammar(use.otherwise)
            held = tool_sampling(context, use)
            if "grammar" in held:
                await check_calls(context, use, held["grammar"])
    text = await asyncio.wrap_future(render_chat(context.template, body, caller.name))
    prompt = await context.template.encode(text, context.requests.encode)
    sampling = {**_sampling(context, body, len(prompt)), **held}
    return await context.make_requests(body, [prompt], sampling, caller)


def chat_sampling(
    context: RouteContext, body: ChatRequest, tenant: str
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """Prompt and fields of SamplingParams of a batch's line, and the note for `ended_message`; for
    who may wait for the encoding and for grammars. Raises InvalidRequest."""
    use, held, note = tool_use(body), {}, {}
    if use is not None:
        with request_options.naming_grammar_fields(body):
            if use.otherwise is not None:
                context.engine.check_grammar(use.otherwise)
            held, note = tool_sampling(context, use), use.note()
    text = render_chat(context.template, body, tenant).result()
    prompt = tuple(context.template.encode(text, context.engine.encode))
    return prompt, {**_sampling(context, body, len(prompt)), **held}, note


def render_chat(
    template: ChatTemplate, body: ChatRequest | TokenizeRequest, tenant: str = ""
) -> Future[str]:
    """The text of a chat's prompt, as `ChatTemplate.submit` has it."""
    return template.submit(
        [message.plain() for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt,
        kwargs=body.chat_template_kwargs,
        tenant=tenant,
        tools=shown_tools(body),
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


def ended_message(
    form: ToolFormat, note: Mapping[str, Any], text: str, reason: str, ids: Callable[[], str]
) -> dict[str, Any]:
    """Message and reason of a whole answer.

    Args:
        form: how the model writes calls.
        note: of the chat's `ToolUse`; empty where nothing may be called.
        text: the answer.
        reason: why it ended.
        ids: makes those of calls.
    """
    ended = {"finish_reason": reason}
    if not note:
        return {"message": assistant_message(text), **ended}
    message, called = message_with_calls(call_parser(form, note), text, ids)
    return {"message": message, **(_with_calls(ended) if called else ended)}


class _ChatAnswer(Answer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        context: RouteContext,
        body: ChatRequest,
        wanted: Sequence[Request],
        http: HttpRequest,
        use: ToolUse | None,
    ) -> None:
        self._use, self._form = use, context.template.tool_format
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
        delta = {"role": "assistant", "content": "" if self._use is None else None}
        for number in range(self._n):
            yield {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


class _ToolAnswer(_ChatAnswer):
    """Of a chat that may call tools."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._deltas = [MessageDeltas(self._parser(), self._form.new_id) for _ in range(self._n)]

    def _parser(self) -> CallParser:
        assert self._use is not None
        return call_parser(self._form, self._use.note())

    def whole_fields(self, text: str, ended: dict[str, Any]) -> dict[str, Any]:
        assert self._use is not None
        note, reason = self._use.note(), ended["finish_reason"]
        return {**ended, **ended_message(self._form, note, text, reason, self._form.new_id)}

    def chunk_fields(
        self, number: int, text: str, logprobs: Any, ended: dict[str, Any]
    ) -> dict[str, Any]:
        fields = super().chunk_fields(number, text, logprobs, ended)
        deltas = self._deltas[number]
        fields["delta"] = deltas.delta(text, last=bool(ended))
        return _with_calls(fields) if deltas.calls else fields


def _with_calls(ended: dict[str, Any]) -> dict[str, Any]:
    """The fields of an answer with calls that has ended by itself; those of others stay."""
    if ended.get("finish_reason") != "stop":
        return ended
    return {**ended, "finish_reason": "tool_calls"}
