"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}. Paths of
other APIs have those APIs' forms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxserve.server.access.api_keys import Unauthenticated
from jaxserve.server.access.browser_origins import NotAllowed
from jaxserve.server.requests.call_errors import call_error_of
from jaxserve.server.requests.call_outcome import CallOutcome, CallRecord
from jaxserve.server.requests.engine_load import LOAD_HEADER, EngineLoad

RECORD = "jaxserve.record"
"""Key of the CallRecord in a call's scope, if one is kept."""


class ApiError(Exception):
    """An error that ends a call with an error object.

    Args:
        status: HTTP status.
        message: for people.
        param: the field that is wrong.
        code: OpenAI's error code.
        headers: of the response.
        outcome: the outcome to record; None chooses it by the status.
        retry_s: seconds after which the same call may succeed; None if a retry does not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        outcome: CallOutcome | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})
        self.outcome = outcome or _OUTCOMES.get(status, CallOutcome.INVALID)
        self.retry_s = retry_s
        self._load: EngineLoad | None = None

    def note(self, record: CallRecord) -> None:
        """Records the call's outcome. If the client may try again, the error includes the load."""
        record.outcome, record.reason = self.outcome, str(self)
        self._load = None if self.retry_s is None else record.load()

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _INVALID)
        error: dict[str, Any] = {
            "message": str(self),
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        if self.retry_s is not None:
            error["retry_after_ms"] = _ms(self.retry_s)
        if self._load is not None:
            error["load"] = asdict(self._load)
        return {"error": error}

    def shaped(self, path: str) -> tuple[int, dict[str, Any]]:
        """The status and the body, in the form of the API that has the path."""
        for begin, shape in _SHAPES.items():
            if path.startswith(begin):
                return shape(self)
        return self.status, self.body()

    def response(self, path: str = "") -> JSONResponse:
        """The HTTP response. OpenAI's clients read retry-after-ms, and others Retry-After. path: of
        the call."""
        headers = dict(self.headers)
        if self.retry_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_s))
            headers["retry-after-ms"] = str(_ms(self.retry_s))
        if self._load is not None:
            headers[LOAD_HEADER] = self._load.header()
        status, body = self.shaped(path)
        return JSONResponse(body, status, headers=headers)


def _anthropic_shape(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Anthropic's form, in which a server that is busy has a status of its own."""
    busy = error.outcome in _BUSY
    status = 529 if busy else error.status
    kind = "overloaded_error" if busy else _ANTHROPIC_TYPES.get(status)
    kind = kind or ("api_error" if status >= 500 else _INVALID)
    return status, {"type": "error", "error": {"type": kind, "message": str(error)}}


_BUSY = (CallOutcome.QUEUE_FULL, CallOutcome.TOO_MANY_CALLS, CallOutcome.EXPECTED_LATE)
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def _ollama_shape(error: ApiError) -> tuple[int, dict[str, Any]]:
    return error.status, {"error": str(error)}


_SHAPES = {"/v1/messages": _anthropic_shape, "/api/": _ollama_shape}


_INVALID = "invalid_request_error"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
_OUTCOMES = {
    403: CallOutcome.REFUSED,
    500: CallOutcome.FAILED,
    503: CallOutcome.ENGINE_FAILED,
    507: CallOutcome.REFUSED,
}


def _ms(seconds: float) -> int:
    return math.ceil(1000 * seconds)


def as_api_error(error: Exception) -> ApiError | None:
    """The error for the client; None if it is a defect of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NotAllowed):
        return ApiError(403, str(error), code=error.code)
    known = call_error_of(error)
    if known is None:
        return None
    headers = {}
    if isinstance(error, Unauthenticated):  # RFC 6750 section 3
        why = ', error="invalid_token"' if error.given else ""
        headers["WWW-Authenticate"] = f'Bearer realm="jaxserve"{why}'
    return ApiError(
        known.http_status,
        known.message or str(error),
        param=known.field_name,
        code=known.code,
        headers=headers,
        outcome=known.outcome,
        retry_s=known.retry_s,
    )


def add_handlers(app: FastAPI) -> None:
    """Makes errors of FastAPI, and unexpected errors, end as an error object. Routes do so with
    errors of calls."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _unexpected)


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """The response for an error; also records the call's outcome."""
    error.note(record_of(request))
    return error.response(request.scope["path"])


def record_of(request: Request) -> CallRecord:
    """The call's record; one that nobody keeps if calls are not logged."""
    record = request.scope.get(RECORD)
    return record if isinstance(record, CallRecord) else CallRecord("")


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """The error for a defect of the server, which is also logged."""
    api_error = ApiError(500, f"internal error: {type(error).__name__}", code="internal")
    return error_response(request, api_error)


async def _of_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = f"there is no {request.method} {request.url.path}"
    return error_response(request, ApiError(error.status_code, text, headers=error.headers))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Locations without their first part, "body" or "query".
    problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
    where, message, code = validation_message(problems)
    return error_response(request, ApiError(400, message, param=where, code=code))


# What pydantic's locations contain beside names and indices: alternatives of a union.
_TYPE = re.compile(
    r"str|bool|SloFields|ChosenTool|NamedTool|(Item|Block)\[\w+\]|(list|dict|function-[a-z]+)\[.*\]"
    r"|constrained-\w+"
)
_UNKNOWN = "extra_forbidden"
SHOWN = 80
"""Most characters of a client's name in an error."""
# Instead of pydantic's messages, which speak of classes and not of the API.
_WORDS = {
    _UNKNOWN: "this server has no such field",
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "has {actual_length} entries; at least {min_length} is needed",
    "too_long": "has {actual_length} entries; at most {max_length} are allowed",
    "string_too_long": "has more than {max_length} characters",
}


def validation_message(problems: Sequence[Any]) -> tuple[str | None, str, str]:
    """Describes what pydantic found wrong: the field, or None for the whole body; one line of text;
    and the error's code."""
    # For a union, pydantic reports all alternatives: take the one with the longest location, and
    # prefer lists to strings.
    first = max(
        problems, key=lambda problem: (len(problem["loc"]), problem["type"] != "string_type")
    )
    unknown = first["type"] == _UNKNOWN
    code = "unknown_field" if unknown else "invalid_value"
    *way, last = map(str, first["loc"] or ("",))
    names = [name for name in way if not _TYPE.fullmatch(name)]
    if unknown or not _TYPE.fullmatch(last):
        names.append(last)
    where = ".".join(name[:SHOWN] for name in names if name)
    if not where:
        return None, "the body: must be an object, sent as Content-Type: application/json", code
    words = _WORDS.get(first["type"], "")
    said = words.format(**first.get("ctx", {})) if words else first["msg"]
    return where, f"{where}: {said.removeprefix('Value error, ')}", code
