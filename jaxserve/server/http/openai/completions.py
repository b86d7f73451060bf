"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from jaxserve.engine.output import FinishReason
from jaxserve.sched.request import InvalidRequest, Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.choices import Answer, LogprobLists, finish_fields
from jaxserve.server.http.openai.logprobs import CompletionLogprobs
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import MAX_PROMPTS, CompletionRequest
from jaxserve.server.requests.output_streams import Delta

MAX_PROMPT_LOGPROBS = 1 << 18
"""Most log-probability values in one answer: some 10 MB."""


async def completion_response(
    context: RouteContext, body: CompletionRequest, http: HttpRequest
) -> Response:
    """The answer, whole or as a stream of events."""
    prompts = prompts_of(body)
    wanted = await prepare_completion(context, body, prompts, record_of(http).caller)
    echo = [""] * len(prompts)
    if body.echo:
        decode = context.engine.decode
        echo = await context.requests.run_beside(
            record_of(http).caller.name,
            lambda: [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts],
        )
    return await _CompletionAnswer(context, body, echo, wanted, http).response()


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts, each text or token ids. Raises InvalidRequest if there are none."""
    return prompts_in(body.prompt, "prompt", MAX_PROMPTS)


def prompts_in(value: Any, field_name: str, most: int) -> list[str | list[int]]:
    """As `prompts_of`, for any field that has prompts, at most `most` of them."""
    if isinstance(value, str):
        return [value]
    if value and isinstance(value[0], int):
        return [value]
    if not value:
        raise InvalidRequest(field_name, f"has no prompts; 1 to {most} prompts are taken")
    return list(value)


async def prepare_completion(
    context: RouteContext,
    body: CompletionRequest,
    prompts: Sequence[str | list[int]],
    caller: Caller,
) -> list[Request]:
    """One request per prompt, ready to be submitted. Raises what `RouteContext.make_requests` does.

    Args:
        context: what the routes need.
        body: the call's body.
        prompts: its prompts.
        caller: the client.
    """
    request_options.check_stream_options(body)
    try:
        wanted = await context.make_requests(
            body,
            prompts,
            request_options.completion_sampling(body, context.sampling_defaults),
            caller,
        )
    except InvalidRequest as error:
        if error.field_name != "prompt_logprobs":
            raise
        raise error.renamed("logprobs") from None
    asked, n = wanted[0].sampling.prompt_logprobs, wanted[0].sampling.n
    if asked is not None:
        tokens = sum(len(request.prompt) for request in wanted)
        if tokens * n * (1 + asked) > MAX_PROMPT_LOGPROBS:
            few = f"at most {MAX_PROMPT_LOGPROBS:,} values are told in a call"
            problem = f"{asked} and its own of each of {tokens} prompt tokens, n={n} times; {few}"
            raise InvalidRequest("logprobs", problem)
    return wanted


class _CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        context: RouteContext,
        body: CompletionRequest,
        echo: Sequence[str],
        wanted: Sequence[Request],
        http: HttpRequest,
    ) -> None:
        record_of(http).unenforced = request_options.unenforced(body)
        self._echo, self._told = echo, set[int]()
        self._only_prompt = request_options.scores_prompt_only(body)
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(context.engine, request.prompt, bool(body.echo))
                for request in wanted
                for _ in range(request.sampling.n)
            ]
        super().__init__(context, body, wanted, http)

    def lists(self) -> LogprobLists | None:
        return None if self._logprobs is None else LogprobLists()

    def news(self, number: int, delta: Delta) -> tuple[str, Any, dict[str, Any]]:
        text, entries = "".join(delta.text), delta.prompt_logprobs
        ended = {} if delta.last is None else finish_fields(delta.last)
        if self._only_prompt:  # without the token sampled after it
            text = ""
            if ended:
                ended["finish_reason"] = str(FinishReason.LENGTH)
        else:
            entries += delta.logprobs
            self._output_tokens += len(delta.token_ids)
        if number not in self._told:
            self._told.add(number)
            text = self._echo[number // self._n] + text
        logprobs = None if self._logprobs is None else self._logprobs[number].as_dict(entries)
        return text, logprobs, ended

    def whole_fields(self, text: str, ended: dict[str, Any]) -> dict[str, Any]:
        return {"text": text, **ended}

    def chunk_fields(
        self, number: int, text: str, logprobs: Any, ended: dict[str, Any]
    ) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs, "finish_reason": None, **ended}
