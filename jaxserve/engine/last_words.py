"""Ending requests when the engine itself is about to."""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxserve.engine.output import FinishReason, Output
from jaxserve.sched.request import Request

log = logging.getLogger(__name__)


def attempt(act: Callable[..., None], *args: object) -> bool:
    """Whether it went well; if not, it is logged."""
    try:
        act(*args)
    except Exception:
        log.exception("while the engine was ending its requests")
        return False
    return True


def refuse(
    request: Request, on_output: Callable[[Output], None], reason: FinishReason, error: str = ""
) -> None:
    """Ends a request that never got as far as the scheduler."""
    for index in range(request.sampling.n):
        on_output(Output(request.id, index, finish_reason=reason, error=error))
