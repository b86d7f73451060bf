"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.answer_messages import (
    MessageDeltas,
    PreparedChat,
    call_ids,
    ended_message,
    message_parser,
    parser_note,
    with_calls,
)
from jaxserve.server.http.openai.choices import Answer, LogprobLists, finish_fields
from jaxserve.server.http.openai.logprobs import chat_logprobs
from jaxserve.server.http.openai.reasoning_options import (
    ThoughtUse,
    template_kwargs,
    thought_use,
)
from jaxserve.server.http.openai.route_context import Continues, RouteContext
from jaxserve.server.http.openai.schema import ChatRequest, Message, TokenizeRequest
from jaxserve.server.http.openai.tool_options import (
    ToolUse,
    check_calls,
    shown_tools,
    tool_sampling,
    tool_use,
)
from jaxserve.server.requests.output_streams import Delta
from jaxserve.server.requests.templates.chat_template import ChatTemplate

T = TypeVar("T")
_PARSED_INLINE = 4 << 10
_OF_TOOLS = ("tool", "function")
_MOST_ANSWERED, _MAX_CALL_ID = 16, 256
"""Tool calls of which a chat may be the answer, and characters of their ids; others are not looked
at: none of the server's are longer."""


async def chat_response(context: RouteContext, body: ChatRequest, http: HttpRequest) -> Response:
    """The answer, whole or as a stream of events."""
    request_options.check_stream_options(body)
    asked = await prepare_chat(context, body, record_of(http).caller)
    return await _ChatAnswer(context, body, http, asked).response()


async def prepare_chat(
    context: RouteContext,
    body: ChatRequest,
    caller: Caller,
    continues: Continues = (),
    *,
    shorten: bool = False,
) -> PreparedChat:
    """The chat's request, ready to be submitted. Raises what `RouteContext.make_requests` does.

    Args:
        context: what the routes need.
        body: the chat.
        caller: the client.
        continues: what it continues, beside the tool calls that it answers.
        shorten: whether a limit of its tokens that leaves no room for the prompt is lowered, and
            not refused.
    """
    context.requests.check_open()
    with request_options.naming_grammar_fields(body):
        use, held, places = await beside_if_tools(context, body, caller.name, _calls, context, body)
        if use is not None and use.otherwise is not None:
            await context.requests.check_grammar(use.otherwise, tenant=caller.name)
        if use is not None and "grammar" in held:
            await check_calls(context, use, held["grammar"], caller.name)
    with _naming_chat_fields(body):
        text, prompt = await chat_prompt(context, body, caller.name)
    note, thought = parser_note(context.template, use, text), thought_use(context, body, use, text)
    sampling = {**_sampling(context, body, len(prompt), shorten=shorten), **held}
    sampling |= _parsed(context, note, thought, held="grammar" in sampling)
    with _naming_chat_fields(body):
        known = (*_answered_calls(body.messages), *continues)
        wanted = await context.make_requests(body, [prompt], sampling, caller, known)
    return PreparedChat(wanted, note, thought, places)


async def chat_prompt(
    context: RouteContext, body: ChatRequest | TokenizeRequest, tenant: str
) -> tuple[str, list[int]]:
    """The prompt of a chat: its text, as the template renders it, and its tokens. Raises
    InvalidRequest."""
    rendering = await beside_if_tools(
        context, body, tenant, render_chat, context.template, body, tenant
    )
    text = await asyncio.wrap_future(rendering)
    encode = functools.partial(context.requests.encode, tenant=tenant)
    return text, await context.template.encode(text, encode)


def _answered_calls(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """The calls of the last assistant's turn that the messages answer, as `Request.continues`."""
    ends = itertools.takewhile(lambda message: message.role != "assistant", reversed(messages))
    ids = (message.tool_call_id or "" for message in ends)
    known = (("tool", call_id) for call_id in ids if 0 < len(call_id) <= _MAX_CALL_ID)
    return itertools.islice(known, _MOST_ANSWERED)


@contextmanager
def _naming_chat_fields(body: ChatRequest) -> Iterator[None]:
    """Makes errors of the chat's request name the chat's own field."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    names = {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": limit}
    try:
        yield
    except InvalidRequest as error:
        if error.field_name not in names:
            raise
        raise error.renamed(names[error.field_name]) from None


def chat_sampling(
    context: RouteContext, body: ChatRequest, tenant: str
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """Prompt and SamplingParams fields for a line of a batch, and the note for `ended_message`. May
    block for encoding and for grammars. Raises InvalidRequest."""
    with request_options.naming_grammar_fields(body):
        use, held, places = _calls(context, body)
        request_options.check_told(places)
        if use is not None and use.otherwise is not None:
            context.requests.wait_for_grammar(use.otherwise, None, tenant)
    text = render_chat(context.template, body, tenant).result()
    prompt = tuple(context.template.encode(text, context.engine.encode))
    note, thought = parser_note(context.template, use, text), thought_use(context, body, use, text)
    sampling = {**_sampling(context, body, len(prompt)), **held}
    return prompt, sampling | _parsed(context, note, thought, held="grammar" in sampling), note


def _parsed(
    context: RouteContext, note: Mapping[str, Any], thought: ThoughtUse | None, *, held: bool
) -> dict[str, Any]:
    """The fields of SamplingParams that a parsed answer needs: the special tokens that its parser
    has to see, and the thought before the answer. held: whether there is a grammar."""
    shown = {"shown_token_ids": tuple(context.special_markers.values())} if note else {}
    return shown if thought is None else {**shown, **thought.sampling(held=held)}


async def beside_if_tools(
    context: RouteContext,
    body: ChatRequest | TokenizeRequest,
    tenant: str,
    work: Callable[..., T],
    *arguments: Any,
) -> T:
    """work(*given), off the event loop for a chat with tools or calls: writing those out repeatedly
    may take a tenth of a second.

    Args:
        context: what the routes need.
        body: the chat.
        tenant: its tenant.
        work: the function.
        given: its arguments.
    """
    messages = body.messages or ()
    if body.tools or any(message.tool_calls or message.role in _OF_TOOLS for message in messages):
        return await context.requests.run_beside(tenant, work, *arguments)
    return work(*arguments)


def _calls(
    context: RouteContext, body: ChatRequest
) -> tuple[ToolUse | None, dict[str, Any], list[str]]:
    """The chat's tools, the SamplingParams fields for them, and `PreparedChat.unenforced`. Raises
    InvalidRequest."""
    use, places = tool_use(body), request_options.unenforced(body)
    if use is None:
        return None, {}, places
    try:
        return use, tool_sampling(context, use), places + use.unenforced
    except (MemoryError, RecursionError):
        raise InvalidRequest("tools", "their schemas take too much to be read") from None


def render_chat(
    template: ChatTemplate, body: ChatRequest | TokenizeRequest, tenant: str = ""
) -> Future[str]:
    """The text of a chat's prompt, as `ChatTemplate.submit` has it."""
    return template.submit(
        [message.plain() for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt,
        kwargs=template_kwargs(template, body),
        tenant=tenant,
        tools=shown_tools(body),
    )


def _sampling(
    context: RouteContext, body: ChatRequest, prompt_tokens: int, *, shorten: bool = False
) -> dict[str, Any]:
    fields = request_options.sampling_fields(body, context.sampling_defaults)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and limit != body.max_tokens:
        raise InvalidRequest("max_tokens", "contradicts max_completion_tokens")
    room = context.requests.max_output_tokens(prompt_tokens)
    if limit is None or (shorten and limit > room):
        limit = room
    fields["max_tokens"] = limit
    return fields


class _ChatAnswer(Answer):
    """asked: the prepared chat."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        context: RouteContext,
        body: ChatRequest,
        http: HttpRequest,
        asked: PreparedChat,
    ) -> None:
        self._template, self._note = context.template, asked.note
        record = record_of(http)
        count = range(asked.wanted[0].sampling.n)
        self._new_ids = [call_ids(context.template, record, number) for number in count]
        self._engine, self._with_logprobs = context.engine, bool(body.logprobs)
        if self._note:  # parsing takes up to 1 us per character
            self.inline_bytes = _PARSED_INLINE
        self._deltas: list[MessageDeltas] = []
        record.unenforced = asked.unenforced
        super().__init__(context, body, asked.wanted, http)
        if self._note and self._streams:
            parsers = [message_parser(self._template, self._note) for _ in range(self._n)]
            self._deltas = list(map(MessageDeltas, parsers, self._new_ids))
        thought = asked.thought
        self._thoughts = [] if thought is None else [thought.count() for _ in range(self._n)]

    def reasoning_tokens(self) -> int:
        return sum(count.tokens for count in self._thoughts)

    def lists(self) -> LogprobLists | None:
        return LogprobLists(refusal=None) if self._with_logprobs else None

    def news(self, number: int, delta: Delta) -> tuple[str, Any, dict[str, Any]]:
        self._output_tokens += len(delta.token_ids)
        if self._thoughts:
            self._thoughts[number].feed(delta.token_ids)
        ended = {} if delta.last is None else finish_fields(delta.last)
        logprobs = chat_logprobs(self._engine, delta.logprobs) if self._with_logprobs else None
        return "".join(delta.text), logprobs, ended

    def whole_fields(self, text: str, ended: dict[str, Any]) -> dict[str, Any]:
        reason = ended["finish_reason"]
        fields = ended_message(self._template, self._note, text, reason, self._new_ids[0])
        self._note_tools(fields["message"])
        return {**ended, **fields}

    def chunk_fields(
        self, number: int, text: str, logprobs: Any, ended: dict[str, Any]
    ) -> dict[str, Any]:
        delta, called = {"content": text} if text else {}, False
        if self._deltas:
            deltas = self._deltas[number]
            delta, called = deltas.delta(text, last=bool(ended)), bool(deltas.calls)
            self._note_tools(delta)
        shown = logprobs if logprobs is not None and logprobs["content"] else None
        fields = {"delta": delta, "logprobs": shown, "finish_reason": None, **ended}
        return with_calls(fields, called)

    def _note_tools(self, message: Mapping[str, Any]) -> None:
        """Notes the calls that begin in a message or a delta."""
        calls = message.get("tool_calls", ())
        tools = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        self._requests.note_tools(self._generating.wanted[0], tools)

    def beginnings(self) -> Iterable[dict[str, Any]]:
        delta = {"role": "assistant", "content": None if self._note else ""}
        for number in range(self._n):
            yield {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
