"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.requests.streams import DuplicateRequest, SlowReader, StreamFailed

RETRY_AFTER_S = 1
"""When a call that was refused for want of room may come again."""


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
_RETRY = {"Retry-After": str(RETRY_AFTER_S)}


def as_api_error(error: Exception) -> ApiError | None:
    """What the front end raises, as the API says it; None for what is none of its errors."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), param=error.field_name, code="invalid_value")
        case DuplicateRequest():
            return ApiError(409, str(error), param="request_id", code="duplicate")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", headers=_RETRY)
        case EngineStopped():
            return ApiError(503, str(error), code="unavailable", headers=_RETRY)
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
        QueueFull,
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
    return told.response()


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """The server's own fault, which goes to the log, too."""
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal").response()


async def _of_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = f"there is no {request.method} {request.url.path}"
    return ApiError(error.status_code, text, headers=error.headers).response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    where, message = validation_message(found)
    unknown = _most_telling(found)["type"] == "extra_forbidden"
    code = "unknown_field" if unknown else "invalid_value" if where else None
    return ApiError(400, message, param=where, code=code).response()


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


def _place(location: Any) -> str | None:
    """The way into the body; pydantic's has the alternatives of a union in it, too."""
    types = ("str", "list[", "Message", "constrained-", "TextPart", "float", "int")
    parts = [str(part) for part in location if not str(part).startswith(types)]
    return ".".join(part for part in parts if part != "body") or None


def _most_telling(errors: Any) -> Any:
    """Of a union all alternatives are in error; the last has the longest way into the value."""
    return max(errors, key=lambda each: (each["type"] == "json_invalid", len(each["loc"])))
