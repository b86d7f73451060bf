"""ASGI middleware in front of the HTTP application: authenticates calls, limits how many are open
and how large they are, and records how they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.access.api_keys import Caller, RateLimited, Unauthenticated, authorization
from jaxserve.server.access.browser_origins import NotAllowed
from jaxserve.server.access.options import Access
from jaxserve.server.http.errors import RECORD, ApiError, as_api_error
from jaxserve.server.http.openai.files import FORM_BYTES, MAX_FILE_BYTES
from jaxserve.server.http.openai.sse import STREAMS
from jaxserve.server.http.transport.connections import Place
from jaxserve.server.http.transport.protocol import ARRIVED, LOST, PLACE, REQUEST_ID
from jaxserve.server.http.web_console import PAGE
from jaxserve.server.moves.passage import PASSAGE
from jaxserve.server.requests.admission import NOBODY, Admission, Overloaded
from jaxserve.server.requests.call_outcome import (
    CallOutcome,
    CallRecord,
    CallSource,
    CallTracker,
    RateLimitedLog,
)
from jaxserve.server.requests.engine_load import LOAD_HEADER
from jaxserve.server.requests.output_streams import SlowReader
from jaxserve.server.requests.target_headers import ANSWER_HEADERS, answer_headers, target_headers
from jaxserve.server.requests.write_timeout import WriteTimeout
from jaxserve.server.telemetry.metrics import READER
from jaxserve.server.telemetry.trace_context import trace_context

_FILES = "/v1/files"
_SCORES = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
_POOLED = ("/v1/embeddings", "/pooling", "/api/embed", *_SCORES)
_COUNTED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate"),
    *_POOLED,
)
_WITH_PROMPTS = (*_COUNTED, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
_LABELS = {path: f"http {path}" for path in (*_WITH_PROMPTS, "/v1/models", _FILES, "/v1/batches")}
_OTHER = "http other"
_HEALTH = ("/health", "/ready")
_EVENTS = "/console/events"
_QUIET = (*PAGE, "/metrics", "/console/info", _EVENTS)  # polled often: not counted against rates
METHODS = (*_LABELS.values(), _OTHER)
_CONSOLES = 64
_SMALL_BYTES = 64 << 10  # body of a call without a prompt
# Body of a call for vectors, whose prompts may have MAX_INPUT_TOKENS together: 13 bytes for each
# token; an id takes 8.
_POOLED_BYTES = 4 << 20
_RETRY = ("Retry-After", "retry-after-ms", LOAD_HEADER)
_EXPOSED = (*_RETRY, "WWW-Authenticate", "x-request-id", *ANSWER_HEADERS)
_REFUSALS = (NotAllowed, Unauthenticated, RateLimited, Overloaded)
BODY_S = 30.0
"""Seconds that a body may take, plus one for every _BODY_BYTES_PER_S bytes received."""
_BODY_BYTES_PER_S = 64 << 10


class AdmissionMiddleware:
    """Admits, measures and counts the calls of one application.

    Args:
        access: who may call.
        admission: limits calls that generate, over all frontends.
        few: limits calls for files, batches and tokenizers, since each may be large; likewise.
        tracker: counts how calls end.
        body_bytes: the longest body of a call with prompts, except calls for vectors.
        writes: limits how long a client may take to read a piece.
    """

    def __init__(
        self,
        access: Access,
        admission: Admission,
        few: Admission,
        tracker: CallTracker,
        *,
        body_bytes: int,
        writes: WriteTimeout,
    ) -> None:
        self._keys, self._browsers = access.keys, access.browsers
        self._cors_origins = access.cors_origins
        self._admission, self._few = admission, few
        self._consoles = Admission(_CONSOLES, "this server takes of consoles")
        self._tracker = tracker
        self._body_bytes = body_bytes
        self._writes = writes
        self._log = RateLimitedLog(quiet=tracker.logged)
        self._log_of_quiet = RateLimitedLog()  # such calls have no line in the request log

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application behind this middleware, with CORS if pages of other sites may call
        (https://fetch.spec.whatwg.org/#http-cors-protocol). Browsers send a preflight before they
        send a key. Cookies are never used."""

        async def kept(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in _HEALTH:
                _place(scope).known()
                await app(scope, receive, send)
            elif scope["path"] in _QUIET:
                await self._quietly(app, scope, receive, send)
            else:
                await self._recorded(app, scope, receive, send)

        if not self._cors_origins:
            return kept
        return CORSMiddleware(
            kept,
            allow_origins=self._cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )

    async def _recorded(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a call, whatever happens, and records how it has ended."""
        headers, state = scope["headers"], scope.get("state", {})
        record = self._tracker.begin(
            *(CallSource.HTTP, _label(scope["path"]), _peer(scope), trace_context(headers)),
            began=state.get(ARRIVED),
            passage=state.get(PASSAGE),
        )
        record.x_request_id = state.get(REQUEST_ID, "")
        done, too_slow = False, ""

        async def sent(message: Message) -> None:
            nonlocal done, too_slow
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_told(message, record)]}
            try:
                await self._writes.wait(send(message))
            except SlowReader as error:
                too_slow = str(error)  # the application may turn it into another error
                raise
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and LOST not in state:  # otherwise nobody received it
                done = True

        try:
            await self._admitted(app, {**scope, RECORD: record}, receive, sent)
        except asyncio.CancelledError:
            record.outcome = CallOutcome.CANCELLED
            raise
        except Exception:
            if too_slow:
                record.outcome, record.reason = CallOutcome.SLOW_READER, too_slow
            else:
                record.outcome = CallOutcome.FAILED
                logging.exception("%s failed", record.method)
        finally:
            if not done and record.outcome is CallOutcome.OK:
                unread = isinstance(state.get(LOST), TimeoutError)
                record.outcome = CallOutcome.SLOW_READER if unread else CallOutcome.CANCELLED
            if record.outcome is CallOutcome.SLOW_READER:
                text = "gave up on %r, whose client reads too slowly"
                self._log.warning("slow", text, record.request_id)
            self._tracker.ended(record)

    async def _admitted(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope[RECORD]
        with contextlib.ExitStack() as places:
            try:
                caller = self._caller(scope, self._log)
                record.of(caller)
                places.enter_context(caller.enter())
                admission = self._admission if scope["path"] in _COUNTED else self._few
                if scope["method"] == "POST":
                    admission.enter(caller)
                    places.callback(admission.leave, caller)
                places.enter_context(_place(scope).calling())
            except _REFUSALS as error:
                kind = {RateLimited: "rate", Overloaded: "overload"}.get(type(error))
                if kind is not None:
                    self._log.warning(kind, "refused a call: %s", error)
                refusal = refusal_of(error)
                refusal.note(record)
                await refusal.response(scope["path"])(scope, receive, send)
            else:
                limit = self._body_bytes if scope["path"] in _WITH_PROMPTS else _SMALL_BYTES
                if scope["path"] in _POOLED:
                    limit = max(limit, _POOLED_BYTES)
                if scope["path"] == _FILES:
                    limit = MAX_FILE_BYTES + FORM_BYTES
                await app(scope, limited_receive(receive, scope, limit), send)

    async def _quietly(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a call that is not recorded. A console's stream is one of its key's open
        calls."""
        unread = False

        async def sent(message: Message) -> None:
            nonlocal unread
            try:
                await self._writes.wait(send(message))
            except SlowReader:
                unread = True
                raise

        with contextlib.ExitStack() as places:
            try:
                caller = self._caller(scope, self._log_of_quiet)
                READER.set(caller)
                if scope["path"] == _EVENTS:
                    places.enter_context(caller.enter(rated=False))
                    self._consoles.enter(caller)
                    places.callback(self._consoles.leave, caller)
                    places.enter_context(_place(scope).calling())
            except _REFUSALS as error:
                await refusal_of(error).response()(scope, receive, sent)
            else:
                try:
                    await app(scope, receive, sent)
                except Exception:  # whatever the application made of a SlowReader
                    if not unread:
                        raise

    def _caller(self, scope: Scope, log: RateLimitedLog) -> Caller:
        """The caller of a call. Raises NotAllowed if a foreign web page may have made a browser
        call, and Unauthenticated; both are logged."""
        kind = "browser"
        try:
            if self._browsers is not None:
                headers = Headers(scope=scope)
                self._browsers.check(headers.getlist("host"), headers.getlist("origin"))
            if scope["path"] in PAGE:  # the page itself needs no key
                return NOBODY
            kind = "key"
            caller = self._keys.caller(authorization(scope["headers"]))
            caller.target_headers = target_headers(scope["headers"])
        except (NotAllowed, Unauthenticated) as error:
            log.warning(kind, "refused a call from %s: %s", _peer(scope), error)
            raise
        _place(scope).known()
        return caller


def refusal_of(error: Exception) -> ApiError:
    """The error for a call that is refused before it is read."""
    known = as_api_error(error)
    assert known is not None
    return known


def limited_receive(receive: Receive, scope: Scope, limit: int) -> Receive:
    """A `receive` that raises HTTPException if the body has more than `limit` bytes or comes too
    slowly."""
    said = Headers(scope=scope).get("content-length", "0")
    length = float(said) if said.isdecimal() else math.inf  # int() refuses very long texts
    begun, got, whole = asyncio.get_running_loop().time(), 0, False

    async def within() -> Message:
        nonlocal got, whole
        if length > limit:
            raise _too_long(limit)
        if whole:  # the application waits for the client to hang up
            return await receive()
        seconds = BODY_S + got / _BODY_BYTES_PER_S
        try:
            async with asyncio.timeout_at(begun + seconds):
                message = await receive()
        except TimeoutError:
            text = f"the body: only {got:,} bytes of it have come within {seconds:.1f} s"
            raise HTTPException(408, text) from None
        got += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if got > limit:
            raise _too_long(limit)
        return message

    return within


def _told(start: Message, record: CallRecord) -> Iterator[tuple[bytes, bytes]]:
    """The answer's headers about SLO targets; for a stream, what is known at its beginning."""
    streams = Headers(raw=start["headers"]).get("content-type", "").startswith(STREAMS)
    for name, value in answer_headers(record, ended=start["status"] < 300 and not streams):
        yield name.encode(), value.encode()


def _place(scope: Scope) -> Place:
    """The place of the call's connection; a new one if another server keeps the connections."""
    place = scope.get("state", {}).get(PLACE)
    return Place() if place is None else place


def _label(path: str) -> str:
    if path in _LABELS:
        return _LABELS[path]
    known = (label for begin, label in _LABELS.items() if path.startswith(begin + "/"))
    return next(known, _OTHER)


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else ""


def _too_long(limit: int) -> HTTPException:
    return HTTPException(413, f"the body: at most {limit:,} bytes are taken")
