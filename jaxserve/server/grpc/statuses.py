"""How gRPC says what is wrong with a call; http/errors.py is the same for HTTP."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.access.api_keys import RateLimited, TooManyRequests
from jaxserve.server.requests.admission import retry_s
from jaxserve.server.requests.call_outcome import Ending
from jaxserve.server.requests.engine_requests import SHUTTING_DOWN
from jaxserve.server.requests.output_streams import DuplicateRequest, RequestFailed, StreamFailed
from jaxserve.server.requests.slo_admission import ExpectedLate

Code = grpc.StatusCode


class Status(NamedTuple):
    """code: for the client. ending: for the log. retry_s: when the call may come again, in seconds;
    None where it is not the moment that is wrong."""

    code: grpc.StatusCode
    ending: Ending
    retry_s: float | None = None


def status_of(error: Exception) -> Status | None:
    """Of what the front end raises; None for what is none of its errors."""
    match error:
        case InvalidRequest():
            return Status(Code.INVALID_ARGUMENT, Ending.INVALID)
        case TooManyRequests():
            return Status(Code.INVALID_ARGUMENT, Ending.INVALID)
        case RateLimited():
            return Status(Code.RESOURCE_EXHAUSTED, Ending.RATE_LIMITED, error.retry_s)
        case DuplicateRequest():
            return Status(Code.ALREADY_EXISTS, Ending.DUPLICATE)
        case ExpectedLate():
            return Status(Code.RESOURCE_EXHAUSTED, Ending.EXPECTED_LATE, error.retry_s)
        case QueueFull():
            return Status(Code.RESOURCE_EXHAUSTED, Ending.QUEUE_FULL, retry_s())
        case EngineStopped():
            stopping = str(error) == SHUTTING_DOWN
            ending = Ending.SHUTTING_DOWN if stopping else Ending.ENGINE_FAILED
            return Status(Code.UNAVAILABLE, ending, retry_s())
        case RequestFailed():
            return Status(Code.INTERNAL, Ending.FAILED)
        case StreamFailed():
            return Status(Code.INTERNAL, Ending.ENGINE_FAILED)
    return None
