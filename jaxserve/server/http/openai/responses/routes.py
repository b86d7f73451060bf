"""/v1/responses."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.http.errors import ApiError, record_of
from jaxserve.server.http.openai.answer_messages import PreparedChat
from jaxserve.server.http.openai.chat import prepare_chat
from jaxserve.server.http.openai.request_options import renaming
from jaxserve.server.http.openai.responses.answer import ResponseAnswer
from jaxserve.server.http.openai.responses.chat_request import NAMES, as_chat
from jaxserve.server.http.openai.responses.conversation import (
    Conversation,
    read_conversation,
    unknown_response,
)
from jaxserve.server.http.openai.responses.response_fields import asked_fields
from jaxserve.server.http.openai.responses.schema import ResponseRequest
from jaxserve.server.http.openai.responses.store import ResponseStore, StoredResponse
from jaxserve.server.http.openai.route_context import RouteContext


def add_response_routes(app: FastAPI, context: RouteContext, store: ResponseStore) -> None:
    """Adds the routes of responses.

    Args:
        app: the application.
        context: what the routes need.
        store: keeps responses.
    """

    def found(response_id: str, http: Request) -> StoredResponse:
        stored = store.get(record_of(http).caller.name, response_id)
        if stored is None:
            raise unknown_response(response_id, "response_id")
        return stored

    @app.post("/v1/responses")
    async def create(body: ResponseRequest, http: Request) -> Response:
        """Continues a conversation."""
        return await _created(context, store, body, http)

    @app.get("/v1/responses/{response_id}")
    async def get(response_id: str, http: Request) -> Response:
        """A stored response."""
        _check_query(http)
        return _json(found(response_id, http).response)

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, http: Request) -> dict[str, Any]:
        """Deletes a response. Conversations that have continued it keep it."""
        if not store.delete(record_of(http).caller.name, response_id):
            raise unknown_response(response_id, "response_id")
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, http: Request) -> Response:
        """Refuses: only responses that run in the background could be cancelled."""
        found(response_id, http)
        problem = "it has ended: no response runs in the background here. To cancel a call, hang up"
        raise ApiError(400, f"response_id: {problem}", param="response_id", code="not_cancellable")

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        http: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """The items of a response's input, without those of previous turns.

        Args:
            response_id: its id.
            http: the call.
            limit: most items.
            order: desc for the latest first.
            after: id of the item after which the page begins.
        """
        _check_query(http, "limit", "order", "after")
        raw = found(response_id, http).input_items
        tenant = record_of(http).caller.name
        return await context.requests.run_beside(tenant, _page, raw, limit, order, after)


async def _created(
    context: RouteContext, store: ResponseStore, body: ResponseRequest, http: Request
) -> Response:
    record = record_of(http)
    conversation = await read_conversation(context, store, body, record.caller.name)
    response_id = f"resp_{record.drawn('response').hex()}"
    if body.request_id is None:  # the id that logs and traces have
        body.request_id = response_id
    with renaming(NAMES):
        strict, prepared = await _prepared(context, body, conversation, http)
    (request,) = prepared.wanted
    model = request.adapter or context.model
    asked = request.tier, request.sampling, model
    fields = asked_fields(response_id, record.created, body, *asked, strict=strict)
    kept = None if body.store is False else store
    answer = ResponseAnswer(context, prepared, conversation, fields, kept, http)
    return answer.stream() if body.stream else await answer.whole()


async def _prepared(
    context: RouteContext, body: ResponseRequest, conversation: Conversation, http: Request
) -> tuple[bool, PreparedChat]:
    """The request, and whether tools that do not say so are strict: they are if grammars can hold
    all schemas."""
    caller, previous = record_of(http).caller, conversation.previous
    continues = () if previous is None else (("request", previous.request),)
    unsaid = any(tool.strict is None for tool in body.tools or ())
    if unsaid:
        try:
            chat = as_chat(body, conversation.messages, strict=True)
            return True, await prepare_chat(context, chat, caller, continues)
        except InvalidRequest as error:
            if not error.field_name.startswith("tools"):
                raise
    chat = as_chat(body, conversation.messages, strict=False)
    return False, await prepare_chat(context, chat, caller, continues)


def _page(raw: bytes, limit: int, order: str, after: str | None) -> dict[str, Any]:
    items = json.loads(raw)
    if order == "desc":
        items.reverse()
    first = 0
    if after is not None:
        first = 1 + next((i for i, item in enumerate(items) if item["id"] == after), len(items))
    page = items[first : first + limit]
    ids = [item["id"] for item in page] or [None]
    more = first + limit < len(items)
    ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": more}
    return {"object": "list", "data": page, **ends}


def _check_query(http: Request, *known: str) -> None:
    """Raises InvalidRequest for a parameter that is not supported, rather than ignoring it."""
    for name in http.query_params:
        if name not in known:
            raise InvalidRequest(name[:80], "this server has no such parameter here")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
