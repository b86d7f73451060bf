"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.access.keys import RateLimited, TooManyRequests, Unauthenticated
from jaxserve.server.requests.admission import retry_s
from jaxserve.server.requests.endings import CallRecord, Ending
from jaxserve.server.requests.late import ExpectedLate
from jaxserve.server.requests.requests import SHUTTING_DOWN
from jaxserve.server.requests.streams import DuplicateRequest, SlowReader, StreamFailed

RECORD = "jaxserve.record"
"""Where the scope of a call has its CallRecord, if somebody keeps one."""


class ApiError(Exception):
    """A call that ends with an error object. param: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def ending(self) -> Ending:
        """What the log calls it."""
        if self.code in _ENDINGS:
            return _ENDINGS[self.code]
        if self.status == 503:
            stopping = str(self) == SHUTTING_DOWN
            return Ending.SHUTTING_DOWN if stopping else Ending.ENGINE_FAILED
        return Ending.FAILED if self.status == 500 else Ending.INVALID

    def note(self, record: CallRecord) -> None:
        """So the call has ended."""
        record.ending, record.reason = self.ending, str(self)

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _INVALID)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


_INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}
_ENDINGS = {
    "queue_full": Ending.QUEUE_FULL,
    "too_many_calls": Ending.TOO_MANY_CALLS,
    "expected_late": Ending.EXPECTED_LATE,
    "invalid_api_key": Ending.UNAUTHENTICATED,
    "rate_limit_exceeded": Ending.RATE_LIMITED,
    "duplicate": Ending.DUPLICATE,
    "slow_reader": Ending.SLOW_READER,
    "cancelled": Ending.CANCELLED,
    "engine_failed": Ending.ENGINE_FAILED,
    "not_json": Ending.MALFORMED,
    "internal": Ending.FAILED,
}


def retry_after(seconds: float | None = None) -> dict[str, str]:
    """The header that says when a refused call may come again; by default as one that was refused
    for want of room."""
    return {"Retry-After": str(math.ceil(retry_s() if seconds is None else seconds))}


def too_many_calls(message: str) -> ApiError:
    """More are open than the server takes."""
    return ApiError(429, message, code="too_many_calls", headers=retry_after())


def no_key(error: Unauthenticated) -> ApiError:
    """The call has no API key that is known (RFC 6750 section 3)."""
    why = ', error="invalid_token"' if error.given else ""
    headers = {"WWW-Authenticate": f'Bearer realm="jaxserve"{why}'}
    return ApiError(401, str(error), code="invalid_api_key", headers=headers)


def rate_limited(error: RateLimited) -> ApiError:
    """The key's own limits are reached."""
    headers = retry_after(error.retry_s)
    return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)


def as_api_error(error: Exception) -> ApiError | None:
    """What the front end raises, as the API says it; None for what is none of its errors."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), param=error.field_name, code="invalid_value")
        case DuplicateRequest():
            return ApiError(409, str(error), param="request_id", code="duplicate")
        case TooManyRequests():
            return ApiError(400, str(error), param="n", code="too_many_requests")
        case RateLimited():
            return rate_limited(error)
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", headers=retry_after())
        case ExpectedLate():
            headers = retry_after(error.retry_s)
            return ApiError(
                429, str(error), param="slo.ttft_ms", code="expected_late", headers=headers
            )
        case EngineStopped():
            return ApiError(503, str(error), code="unavailable", headers=retry_after())
        case SlowReader():
            return ApiError(429, str(error), code="slow_reader")
        case StreamFailed():
            return ApiError(500, str(error), code="engine_failed")
    return None


def add_handlers(app: FastAPI) -> None:
    """Has every error of the app end as an error object."""
    for kind in (
        ApiError,
        InvalidRequest,
        DuplicateRequest,
        TooManyRequests,
        RateLimited,
        QueueFull,
        ExpectedLate,
        EngineStopped,
        SlowReader,
        StreamFailed,
    ):
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _unexpected)


async def _known(request: Request, error: Exception) -> JSONResponse:
    told = as_api_error(error)
    assert told is not None
    return answered(request, told)


def answered(request: Request, error: ApiError) -> JSONResponse:
    """The error's answer, once the call's record has how it ended."""
    error.note(record_of(request))
    return error.response()


def record_of(request: Request) -> CallRecord:
    """What the log is to say of the call; nobody keeps it where nothing is logged."""
    record = request.scope.get(RECORD)
    return record if isinstance(record, CallRecord) else CallRecord("")


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """The server's own fault, which goes to the log, too."""
    told = ApiError(500, f"internal error: {type(error).__name__}", code="internal")
    return answered(request, told)


async def _of_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = f"there is no {request.method} {request.url.path}"
    return answered(request, ApiError(error.status_code, text, headers=error.headers))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    where, message = validation_message(found)
    code = _CODES.get(_most_telling(found)["type"], "invalid_value")
    return answered(request, ApiError(400, message, param=where, code=code))


_TYPE = re.compile(r"str|int|float|[A-Z]\w*|[a-z-]+\[.*\]|constrained-\w+")
_CODES = {"extra_forbidden": "unknown_field", "json_invalid": "not_json"}


def validation_message(found: Sequence[Any]) -> tuple[str | None, str]:
    """The field that pydantic finds wrong, None for the whole body, and one line."""
    first = _most_telling(found)
    where = _place(first["loc"])
    if first["type"] == "json_invalid":
        return None, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    if where is None:
        return None, "the body: must be an object, sent as Content-Type: application/json"
    if first["type"] == "extra_forbidden":
        return where, f"{where}: this server has no such field"
    return where, f"{where}: {str(first['msg']).removeprefix('Value error, ')}"


def _place(location: Sequence[Any]) -> str | None:
    """The way into the body; pydantic's has the alternatives of a union in it, too: types."""
    names = (part for part in map(str, location) if part != "body")
    return ".".join(name for name in names if not _TYPE.fullmatch(name)) or None


def _most_telling(errors: Any) -> Any:
    """Of a union all alternatives are in error; the last has the longest way into the value."""
    return max(errors, key=lambda each: (each["type"] == "json_invalid", len(each["loc"])))
