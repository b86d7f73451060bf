"""/v1/messages."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.http.anthropic.answer import MessageAnswer
from jaxserve.server.http.anthropic.chat_request import NAMES, as_chat, check_turns
from jaxserve.server.http.anthropic.schema import (
    Conversation,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai.chat import chat_prompt, prepare_chat
from jaxserve.server.http.openai.request_options import renaming
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import ChatRequest

_FEW_TURNS = 100
_VERSIONS = ("2023-06-01", "2026-10-21")


class MessageErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessageError(BaseModel):
    """The body of every answer that is an error."""

    type: str
    error: MessageErrorDetail


_ERROR: dict[str, Any] = {"model": MessageError, "description": "An error, in Anthropic's shape"}
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}


def add_message_routes(app: FastAPI, context: RouteContext) -> None:
    """Adds the routes of messages.

    Args:
        app: the application.
        context: what the routes need.
    """

    @app.post("/v1/messages", responses=_ERRORS)
    async def messages(body: MessagesRequest, http: Request) -> Response:
        """Answers a conversation."""
        _check_version(http)
        check_turns(body.messages)
        with renaming(NAMES):
            chat = await _chat_of(context, body, http)
            prepared = await prepare_chat(context, chat, record_of(http).caller, shorten=True)
        answer = MessageAnswer(context, body, prepared, http)
        return answer.stream() if body.stream else await answer.whole()

    @app.post("/v1/messages/count_tokens", responses=_ERRORS)
    async def count_tokens(body: CountTokensRequest, http: Request) -> TokenCount:
        """Counts the tokens of a conversation's prompt."""
        _check_version(http)
        caller = record_of(http).caller
        context.adapter_of(body.model, caller)
        with renaming(NAMES):
            chat = await _chat_of(context, body, http)
            _, tokens = await chat_prompt(context, chat, caller.name)
        return TokenCount(input_tokens=len(tokens))


async def _chat_of(context: RouteContext, body: Conversation, http: Request) -> ChatRequest:
    """`as_chat`, off the event loop for many turns, or blocks, whose inputs are written out."""
    turns, template = body.messages, context.template
    if len(turns) <= _FEW_TURNS and all(isinstance(turn.content, str) for turn in turns):
        return as_chat(body, template)
    return await context.requests.run_beside(record_of(http).caller.name, as_chat, body, template)


def _check_version(http: Request) -> None:
    """Raises InvalidRequest for another version of the API. Betas are not looked at: their fields
    are known or refused."""
    given = http.headers.get("anthropic-version", _VERSIONS[0])
    if given not in _VERSIONS:
        known = " or ".join(_VERSIONS)
        raise InvalidRequest("anthropic-version", f"must be {known}, got {given!r:.80}")
