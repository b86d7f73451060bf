"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from jaxserve.engine.output import FinishReason
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
from jaxserve.server.http.openai.logprobs import CompletionLogprobs
from jaxserve.server.http.openai.multi_prompt import Generating, unless_gone
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import MAX_PROMPTS, CompletionRequest
from jaxserve.server.http.openai.sse import EventStream
from jaxserve.server.requests.output_streams import Delta

MAX_PROMPT_LOGPROBS = 1 << 18
"""Values of one answer: some 10 MB of it."""


async def completion_response(
    context: RouteContext, body: CompletionRequest, http: HttpRequest
) -> Response:
    """The answer, whole or as a stream of events."""
    prompts = prompts_of(body)
    wanted = await _wanted(context, body, prompts, record_of(http).caller)
    echo = [""] * len(prompts)
    if body.echo:
        echo = await context.requests.run_beside(_texts, context, prompts)
    generating = Generating(context.requests, wanted, record_of(http))
    try:
        answer = _Answer(context, body, echo, generating)
    except BaseException:
        generating.end()
        raise
    if body.stream:
        return EventStream(answer.chunks(), generating.end, generating.record)
    try:
        return await unless_gone(http, answer.whole())
    finally:
        generating.end()


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Each by itself, text or token ids. Raises InvalidRequest for none at all."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    if not given:
        raise InvalidRequest("prompt", f"has no prompts; 1 to {MAX_PROMPTS} prompts are taken")
    return list(given)


def _texts(context: RouteContext, prompts: Sequence[str | list[int]]) -> list[str]:
    return [each if isinstance(each, str) else context.engine.decode(each) for each in prompts]


async def _wanted(
    context: RouteContext,
    body: CompletionRequest,
    prompts: Sequence[str | list[int]],
    caller: Caller,
) -> list[Request]:
    request_options.check_stream_options(body)
    try:
        wanted = await context.make_requests(
            body, prompts, request_options.completion_sampling(body), caller
        )
    except InvalidRequest as error:
        if error.field_name != "prompt_logprobs":
            raise
        raise InvalidRequest("logprobs", error.problem) from None
    asked, n = wanted[0].sampling.prompt_logprobs, wanted[0].sampling.n
    if asked is not None:
        tokens = sum(len(request.prompt) for request in wanted)
        if tokens * n * (1 + asked) > MAX_PROMPT_LOGPROBS:
            few = f"at most {MAX_PROMPT_LOGPROBS:,} values are told in a call"
            problem = f"{asked} and its own of each of {tokens} prompt tokens, n={n} times; {few}"
            raise InvalidRequest("logprobs", problem)
    return wanted


class _Answer:
    """Of one call: continuations in the order of their numbers."""

    def __init__(
        self,
        context: RouteContext,
        body: CompletionRequest,
        echo: Sequence[str],
        generating: Generating,
    ) -> None:
        self._generating, self._requests = generating, context.requests
        wanted = generating.wanted
        self._n = wanted[0].sampling.n
        self._head = response_head("text_completion", "cmpl", context.model, generating)
        self._usage = UsageCount(wanted)
        self._stream = body.stream_options
        self._echo = echo
        self._only_prompt = request_options.scores_prompt_only(body)
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(context.engine, request.prompt[0] if body.echo else None)
                for request in wanted
                for _ in range(self._n)
            ]

    async def whole(self) -> Response:
        """The object."""
        numbers = range(self._n * len(self._generating.wanted))
        ends: list[dict[str, Any]] = [{} for _ in numbers]
        texts = [[self._prefix(number)] for number in numbers]
        lists = [None if self._logprobs is None else LogprobLists() for _ in numbers]
        async for number, delta in self._generating.deltas():
            ends[number] = self._choice(number, delta)
            texts[number].append(ends[number].pop("text"))
            logprobs, told = ends[number].pop("logprobs"), lists[number]
            if told is not None:
                told.add(logprobs)
        choices = [
            ({"index": number, "text": "".join(texts[number]), **ends[number]}, lists[number])
            for number in numbers
        ]
        characters = sum(len(each["text"]) for each, _ in choices)
        fields = {**self._head, "usage": self._usage.as_dict()}
        return await whole_answer(self._requests, fields, choices, characters)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """One for each piece of news."""
        told: set[int] = set()
        async for number, delta in self._generating.deltas():
            choice = self._choice(number, delta)
            if number not in told:
                told.add(number)
                choice["text"] = self._prefix(number) + choice["text"]
            chunk = {**self._head, "choices": [choice]}
            if self._stream is not None and self._stream.continuous_usage_stats:
                chunk["usage"] = self._usage.as_dict()
            elif self._stream is not None and self._stream.include_usage:
                chunk["usage"] = None
            yield chunk
        if self._stream is not None and self._stream.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage.as_dict()}

    def _prefix(self, number: int) -> str:
        return self._echo[number // self._n]

    def _choice(self, number: int, delta: Delta) -> dict[str, Any]:
        """What is new of a continuation."""
        text, entries = "".join(delta.text), delta.prompt_logprobs
        ended: dict[str, Any] = {"finish_reason": None}
        if delta.last is not None:
            ended = finish_fields(delta.last)
        if self._only_prompt:  # without the token that was drawn behind it, however that ended
            text = ""
            if delta.last is not None:
                ended["finish_reason"] = str(FinishReason.LENGTH)
        else:
            entries += delta.logprobs
            self._usage.add(len(delta.token_ids))
        logprobs = None if self._logprobs is None else self._logprobs[number].as_dict(entries)
        return {"index": number, "text": text, "logprobs": logprobs, **ended}
