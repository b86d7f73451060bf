"""How each error is reported, the same at every frontend: HTTP's status and error object, gRPC's
status, the error of a batch's line, and the outcome in logs and metrics."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from jaxserve.engine.adapters import UnknownAdapter
from jaxserve.engine.errors import AdapterError, EngineStopped, QueueFull
from jaxserve.sched.request import ContextLengthExceeded, InvalidRequest
from jaxserve.server.access.api_keys import RateLimited, TooManyRequests, Unauthenticated
from jaxserve.server.requests.admission import Overloaded, retry_s
from jaxserve.server.requests.call_outcome import CallOutcome
from jaxserve.server.requests.engine_requests import SHUTTING_DOWN
from jaxserve.server.requests.output_streams import (
    DuplicateRequest,
    RequestCancelled,
    RequestFailed,
    SlowReader,
    StreamFailed,
)
from jaxserve.server.requests.slo_admission import ExpectedLate


@dataclass(frozen=True)
class CallError:
    """How a failed call ends.

    Attributes:
        code: for programs, in HTTP's error object.
        http_status: HTTP's status.
        grpc_code: name of the grpc.StatusCode.
        outcome: for logs and metrics.
        field_name: the field that is wrong; None if it is not a single field.
        retry_s: when the same call may succeed, in seconds from now; None if a retry does not help.
        message: replaces the error's own message unless empty.
    """

    code: str
    http_status: int
    grpc_code: str
    outcome: CallOutcome
    field_name: str | None = None
    retry_s: float | None = None
    message: str = ""


class CallRefused(ValueError):
    """A method refuses a call for a reason of its own. call_error: the class's call error."""

    call_error = CallError("conflict", 409, "FAILED_PRECONDITION", CallOutcome.REFUSED)


def call_error_of(error: Exception) -> CallError | None:
    """The call error of an exception; None for a defect of the server."""
    match error:
        case CallRefused():
            return error.call_error
        case UnknownAdapter():
            return CallError("model_not_found", 404, "NOT_FOUND", CallOutcome.INVALID, "model")
        case AdapterError():
            return CallError("invalid_adapter", 400, "INVALID_ARGUMENT", CallOutcome.INVALID)
        case ContextLengthExceeded():
            return _invalid("context_length_exceeded", error.field_name)
        case InvalidRequest():
            return _invalid("invalid_value", error.field_name)
        case TooManyRequests():
            return _invalid("too_many_requests", "n")
        case DuplicateRequest():
            outcome = CallOutcome.DUPLICATE
            return CallError("duplicate", 409, "ALREADY_EXISTS", outcome, "request_id")
        case Unauthenticated():
            outcome = CallOutcome.UNAUTHENTICATED
            return CallError("invalid_api_key", 401, "UNAUTHENTICATED", outcome)
        case RateLimited():
            return _too_many("rate_limit_exceeded", CallOutcome.RATE_LIMITED, error.retry_s)
        case Overloaded():
            return _too_many("too_many_calls", CallOutcome.TOO_MANY_CALLS, retry_s())
        case QueueFull():
            return _too_many("queue_full", CallOutcome.QUEUE_FULL, retry_s())
        case ExpectedLate():
            outcome, again = CallOutcome.EXPECTED_LATE, error.retry_s
            return _too_many("expected_late", outcome, again, error.field_name)
        case SlowReader():
            return _too_many("slow_reader", CallOutcome.SLOW_READER, None)
        case EngineStopped():
            stopping = str(error) == SHUTTING_DOWN
            outcome = CallOutcome.SHUTTING_DOWN if stopping else CallOutcome.ENGINE_FAILED
            return CallError("unavailable", 503, "UNAVAILABLE", outcome, retry_s=retry_s())
        case RequestCancelled():
            return CallError("cancelled", 499, "CANCELLED", CallOutcome.CANCELLED)
        case RequestFailed():
            return CallError("internal", 500, "INTERNAL", CallOutcome.FAILED)
        case StreamFailed():
            return CallError("engine_failed", 500, "INTERNAL", CallOutcome.ENGINE_FAILED)
        case sqlite3.Error():
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            code, status = ("disk_full", 507) if full else ("unavailable", 503)
            said = f"the batches' disk: {error}"
            return CallError(code, status, "UNAVAILABLE", CallOutcome.REFUSED, message=said)
    return None


def _invalid(code: str, field_name: str) -> CallError:
    return CallError(code, 400, "INVALID_ARGUMENT", CallOutcome.INVALID, field_name)


def _too_many(
    code: str, outcome: CallOutcome, again_s: float | None, field_name: str | None = None
) -> CallError:
    return CallError(code, 429, "RESOURCE_EXHAUSTED", outcome, field_name, again_s)
