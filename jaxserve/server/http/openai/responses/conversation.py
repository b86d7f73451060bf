"""The conversation of a call: the previous turns, then its input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai.responses.input_items import (
    KeptItem,
    check_calls,
    kept_items,
    messages_of,
)
from jaxserve.server.http.openai.responses.schema import MAX_ITEMS, Item, ResponseRequest
from jaxserve.server.http.openai.responses.store import ResponseStore, StoredResponse
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import Message

_INLINE_BYTES, _INLINE_ITEMS = 16 << 10, 100  # larger inputs are read off the event loop
_JSON = 4  # most JSON bytes for a byte of text, beside _ROOM
_ROOM = 1 << 20


@dataclass(frozen=True)
class Conversation:
    """The conversation that a call continues.

    Attributes:
        messages: the whole conversation, as a chat.
        previous: the previous turn; None at the beginning.
        input_items: the items of the call's input, a list as JSON.
        count: number of these items.
    """

    messages: Sequence[Message]
    previous: StoredResponse | None
    input_items: bytes
    count: int


async def read_conversation(
    context: RouteContext, store: ResponseStore, body: ResponseRequest, tenant: str
) -> Conversation:
    """The conversation of a call.

    Args:
        context: what the routes need.
        store: has the previous turns.
        body: the call's body.
        tenant: the tenant that the turns belong to.

    Raises:
        ApiError: If the previous turn is not stored.
        InvalidRequest: If the conversation is too long, or the input does not fit to it.
    """
    previous, read = None, 0
    count = 1 if isinstance(body.input, str) else len(body.input)
    if body.previous_response_id is not None:
        previous = store.get(tenant, body.previous_response_id)
        if previous is None:
            raise unknown_response(body.previous_response_id, "previous_response_id")
        _check_length(context, previous, count)
        read = previous.read
    if read > _INLINE_BYTES or count > _INLINE_ITEMS:
        return await context.requests.run_beside(tenant, _read, body.input, previous)
    return _read(body.input, previous)


def unknown_response(response_id: str, param: str) -> ApiError:
    """The error for a response that is not stored, or belongs to another caller."""
    code = "not_found" if param == "response_id" else "previous_response_not_found"
    problem = f"there is no response {response_id!r:.80}: never stored, deleted, or forgotten since"
    return ApiError(404, f"{param}: {problem}", param=param, code=code)


def _check_length(context: RouteContext, previous: StoredResponse, count: int) -> None:
    """Raises InvalidRequest if the conversation is longer than any prompt."""
    if previous.count + count > MAX_ITEMS:
        problem = f"has {count} items, behind {previous.count} of the turns before"
        raise InvalidRequest("input", f"{problem}; {MAX_ITEMS:,} are allowed")
    longest = context.engine.max_text_bytes()
    if longest is not None and previous.read > _JSON * longest + _ROOM:
        problem = f"the turns so far have {previous.read:,} bytes, more than any prompt"
        raise InvalidRequest("previous_response_id", problem)


def _read(source: str | Sequence[Item], previous: StoredResponse | None) -> Conversation:
    own, earlier = kept_items(source), list[KeptItem]()
    for turn in () if previous is None else previous.turns():
        earlier += json.loads(turn.input_items)
        earlier += json.loads(turn.output_items)
    check_calls([*earlier, *own], len(earlier))
    return Conversation(messages_of([*earlier, *own]), previous, to_json(own), len(own))
