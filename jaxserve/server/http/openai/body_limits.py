"""From a body's bytes to its fields. A body is bounded before it is parsed, parsed off the event
loop, and refused at its first error.

Parsers hold the interpreter's lock until they are done, on whichever thread they run, and their
output takes up to twenty times the memory of the body. So the parts of a body are counted first, in
pieces: `MAX_PARTS`, `MAX_ITEMS` and `MAX_DEPTH` bound the time and the memory of the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from email.message import Message as MimeHeaders
from typing import Any, TypeVar

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from jaxserve.server.http.errors import (
    SHOWN,
    ApiError,
    as_api_error,
    error_response,
    record_of,
    validation_message,
)
from jaxserve.server.http.openai.multi_prompt import ClientGone
from jaxserve.server.requests.admission import Admission
from jaxserve.server.requests.call_outcome import CallOutcome
from jaxserve.server.requests.engine_requests import half_surrogate

MAX_PARTS = 1 << 16
"""Most strings (including names of fields), lists and objects in a body: enough for 10,000
messages."""
MAX_ITEMS = 1 << 19
"""Most entries of all lists and objects in a body: mostly token ids."""
MAX_DEPTH = 128
"""Most lists and objects nested in each other. A schema takes two or three for each of its own
levels."""
BODIES_BYTES = 512 << 20
"""Most bytes of bodies being read and parsed at once, not counting the first FREE_BYTES of each."""
FREE_BYTES = 64 << 10
INLINE_BYTES = 16 << 10
"""Longer bodies are parsed off the event loop, which adds some 0.1 ms."""
SHOWN_DEEP = 16
"""Most names in the location that an error gives."""
_PIECE = 256 << 10  # bytes counted at once
_DEEPER = np.zeros(256, np.int8)  # how each character changes the depth
_DEEPER[list(b"[{")], _DEEPER[list(b"]}")] = 1, -1

# A number takes up to 0.1 ms, and there may be half a million of them. Other threads can run
# between calls of Python functions, so long bodies use these parsers.
_HOOKS: dict[str, Any] = {"parse_int": lambda text: int(text), "parse_float": lambda t: float(t)}

Parsed = TypeVar("Parsed", bound=BaseModel)
Beside = Callable[..., Awaitable[Any]]
"""Calls a function on another thread, at a tenant's turn: `run_beside`."""


def body_route(beside: Beside) -> type[APIRoute]:
    """Routes whose JSON body is read here and not by FastAPI, which would parse and validate bodies
    of any size on the event loop, and list all errors. An error of a call is answered by its error
    object."""
    room = Admission(BODIES_BYTES, "this server reads at once", "bytes of bodies are being read")
    turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by tenant

    class BodyRoute(APIRoute):
        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            return super().matches(_as_get(scope))

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            head = scope["method"] == "HEAD"
            await super().handle(_as_get(scope), receive, _head_alone(send) if head else send)

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            field = self.body_field
            kind: Any = None if field is None else field.field_info.annotation

            async def handle(request: Request) -> Response:
                try:
                    if kind is not None:
                        body = await _read(request, kind, beside, room, turns)
                        request = _ReadRequest(request, body)
                    return await handler(request)
                except Exception as error:
                    api_error = as_api_error(error)
                    if api_error is None:
                        raise
                    return error_response(request, api_error)

            return handle

    return BodyRoute


def _as_get(scope: Scope) -> Scope:
    """HEAD is answered like GET, without the body. The server shares the scope and must still see
    HEAD."""
    return {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope


def _head_alone(send: Send) -> Send:
    """Ends an answer after its head. A stream then sees that the client is gone."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})

    return sent


class _ReadRequest(Request):
    """A request whose body has been read: FastAPI takes an instance of the model as it is."""

    def __init__(self, request: Request, body: BaseModel) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._parsed = body

    async def body(self) -> bytes:
        """Any bytes, so that FastAPI calls `json`."""
        return b"{}"

    async def json(self) -> Any:
        """The body as an instance of its model."""
        return self._parsed


async def _read(
    request: Request,
    kind: type[Parsed],
    beside: Beside,
    room: Admission,
    turns: Mapping[str, asyncio.Lock],
) -> Parsed:
    if not _is_json(request.headers.get("content-type", "")):
        raise _no_object()
    pieces: list[bytes] = []
    caller, length, held = record_of(request).caller, 0, 0
    try:
        async with contextlib.aclosing(request.stream()) as stream:
            async for piece in stream:
                pieces.append(piece)
                length += len(piece)
                more = max(length - FREE_BYTES - held, 0)
                if more:
                    room.enter(caller, more)
                    held += more
                    # However many bodies a tenant sends, the event loop handles a piece of one at a
                    # time; the tenant's other connections are not read meanwhile.
                    async with turns[caller.name]:
                        await asyncio.sleep(0)
        raw = b"".join(pieces)
        pieces.clear()
        if length <= INLINE_BYTES:
            return parse_body(raw, kind)
        parsed: Parsed = await beside(caller.name, parse_body, raw, kind)
        return parsed
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        room.leave(caller, held)


def parse_body(raw: bytes, kind: type[Parsed]) -> Parsed:
    """The body's fields. Any thread may call.

    Args:
        raw: JSON, as UTF-8.
        kind: the model that it has to match.

    Raises:
        ApiError: 400, with the field that is wrong, or None for the whole body.
    """
    return validate_body(_loaded(raw), kind)


def validate_body(value: Any, kind: type[Parsed]) -> Parsed:
    """As `parse_body`, of parsed JSON."""
    if not isinstance(value, dict):
        raise _no_object()
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        where, message, code = validation_message(problems)
        raise ApiError(400, message, param=where, code=code) from None


def _loaded(raw: bytes) -> Any:
    _count(raw)
    hooks = _HOOKS if len(raw) > INLINE_BYTES else {}
    try:
        value = json.loads(raw.decode("utf-8-sig"), **hooks)
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at character {error.pos}") from None
    except ValueError:  # Python's limit on digits
        raise _not_json("a number has more digits than are read") from None
    # In valid UTF-8, only an escape can make half a surrogate pair.
    if b"\\ud" in raw or b"\\uD" in raw:
        _check_text(value)
    return value


def _check_text(value: Any, place: tuple[str | int, ...] = ()) -> None:
    """Raises ApiError for a string with half a surrogate pair: it is not valid text and cannot be
    encoded later."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            where = ".".join(str(each)[:SHOWN] for each in place[:SHOWN_DEEP]) or None
            problem = f"{where or 'the body'}: {half_surrogate(error)}"
            raise ApiError(400, problem, param=where, code="invalid_value") from None
    elif isinstance(value, dict):
        for name, each in value.items():
            _check_text(name, place)
            _check_text(each, (*place, name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            if isinstance(each, str | dict | list):
                _check_text(each, (*place, number))


def _count(raw: bytes) -> None:
    """Raises ApiError if the body is too complex to be parsed. Most bodies pass a first count of
    all quotes, brackets and commas, including those in their strings."""
    quotes = brackets = commas = 0
    for start in range(0, len(raw), _PIECE):
        end = start + _PIECE
        quotes += raw.count(b'"', start, end)
        brackets += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        commas += raw.count(b",", start, end)
    if quotes // 2 + brackets > MAX_PARTS or commas > MAX_ITEMS or brackets > MAX_DEPTH:
        outside_strings(raw)


def outside_strings(raw: bytes, piece_bytes: int = _PIECE) -> tuple[int, int, int]:
    """Counts what stands outside of strings. Raises ApiError as soon as a count is too high.

    Args:
        raw: JSON.
        piece_bytes: bytes that are counted at once.

    Returns:
        Number of strings, lists and objects; number of commas; depth of nested lists and objects.
    """
    inside, depth, deepest, quotes, opened, commas = False, 0, 0, 0, 0, 0
    for piece in _unescaped(raw, piece_bytes):
        characters = np.frombuffer(piece, np.uint8)
        quote = characters == ord('"')
        outside = characters[np.bitwise_xor.accumulate(quote) == inside]
        deeper = _DEEPER[outside]
        quotes += int(np.count_nonzero(quote))
        opened += int(np.count_nonzero(deeper > 0))
        commas += int(np.count_nonzero(outside == ord(",")))
        inside = bool(quotes & 1)
        if len(deeper):
            depths = depth + np.cumsum(deeper, dtype=np.int32)
            deepest, depth = max(deepest, int(depths.max())), int(depths[-1])
        _at_most("strings, lists and objects", quotes // 2 + opened, MAX_PARTS)
        _at_most("entries in its lists and objects", commas, MAX_ITEMS)
        if deepest > MAX_DEPTH:
            raise _too_much(f"is nested more than {MAX_DEPTH} deep")
    return quotes // 2 + opened, commas, deepest


def _unescaped(raw: bytes, piece_bytes: int) -> Iterator[bytes]:
    """The body in pieces, without backslashes and the quotes that they escape."""
    start = 0
    while start < len(raw):
        end = start + piece_bytes
        piece = raw[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it escapes the next character
            end += 1
            piece = raw[start:end]
        yield piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        start = end


def _at_most(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise _too_much(f"has more than {limit:,} {what}")


def _too_much(problem: str) -> ApiError:
    return ApiError(400, f"the body: {problem}", code="body_too_complex")


def _not_json(problem: str) -> ApiError:
    problem = f"the body is not JSON: {problem}"
    return ApiError(400, problem, code="not_json", outcome=CallOutcome.MALFORMED)


def _no_object() -> ApiError:
    problem = "the body: must be an object, sent as Content-Type: application/json"
    return ApiError(400, problem, code="invalid_value")


def _is_json(content_type: str) -> bool:
    headers = MimeHeaders()
    headers["content-type"] = content_type
    kind, _, form = headers.get_content_type().partition("/")
    return kind == "application" and (form == "json" or form.endswith("+json"))
