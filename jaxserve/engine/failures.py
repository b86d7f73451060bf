"""Failures on the engine thread, and which requests end with them.

A failure of one request ends that request alone. If the culprit is unknown (a plan, a batch, a
launch), all requests of the step end. The engine ends only if the device fails, which leaves its
contents unknown, or if step after step fails.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import jax

from jaxserve.engine.device.compilations import CompiledAfterWarmup
from jaxserve.engine.errors import HostLost, NotFinite
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import Observer
from jaxserve.sched.request import Request

log = logging.getLogger(__name__)

IN_VAIN = 16
"""Consecutive failed steps, without a token in between, that the engine survives."""
OF_NEWCOMERS = IN_VAIN // 2
"""After this many, only continuations that came since the last plan end, if there are any."""

MAX_MESSAGE = 500  # characters
_LINES, _WINDOW_S = 10, 60.0  # most log lines in a time window
_DEVICE = (jax.errors.JaxRuntimeError, HostLost, CompiledAfterWarmup)


class Failures:
    """Counts failures since the start. Engine thread only.

    Attributes:
        requests: continuations that were ended alone.
        steps: failed steps, whose continuations were ended together.
        observers: observer calls that raised.
        not_finite: continuations among `requests` whose numbers were NaN or infinite.
        in_vain: failed steps since the last one that brought tokens.
    """

    def __init__(self) -> None:
        self.requests = self.steps = self.observers = self.not_finite = 0
        self.in_vain = 0
        self._logged: deque[float] = deque(maxlen=_LINES)

    def of_request(self, error: BaseException, request_id: str) -> None:
        """Counts a failure that ended only one continuation of this request."""
        self.requests += 1
        self.not_finite += isinstance(error, NotFinite)
        self._log(f"request {request_id!r} failed", error)

    def of_step(self, error: BaseException, ended: int) -> None:
        """Counts a step that failed without a known culprit. ended: continuations that end with it.
        Raises the error after more than IN_VAIN failures without a token in between."""
        self.steps += 1
        self.in_vain += 1
        self._log(f"a step failed, and {ended} continuations with it", error)
        if self.in_vain > IN_VAIN:
            raise error

    def of_observer(self, error: BaseException, observer: Observer) -> None:
        """Counts an observer call that raised. The event is lost to that observer."""
        self.observers += 1
        self._log(f"the observer {type(observer).__name__} failed", error)

    def went_well(self) -> None:
        """Counts a step that has brought its tokens."""
        self.in_vain = 0

    def _log(self, what: str, error: BaseException) -> None:
        now, logged = time.monotonic(), self._logged
        if len(logged) < _LINES or now - logged[0] > _WINDOW_S:
            logged.append(now)
            plain = isinstance(error, NotFinite)  # a traceback would not help
            log.error("%s: %s", what, describe(error) if plain else with_traceback(error))


class Observers:
    """The engine's observers. One that raises still receives later events, and serving goes on."""

    def __init__(self, failures: Failures) -> None:
        self._all: tuple[Observer, ...] = ()
        self._failures = failures

    def add(self, observer: Observer) -> None:
        """Adds an observer, from any thread. It receives all later events."""
        self._all = (*self._all, observer)

    def notify(self, event: Callable[[Observer], None]) -> None:
        """Calls event(observer) for each observer."""
        for observer in self._all:
            try:
                event(observer)
            except BaseException as error:
                self._failures.of_observer(error, observer)


def ends_engine(error: BaseException) -> bool:
    """Whether the error means that the device cannot be used any more."""
    return isinstance(error, _DEVICE)


def describe(error: BaseException) -> str:
    """The error as callers see it: one line of text, whatever it contains."""
    try:
        said = str(error)
    except BaseException:
        said = ""
    text = _encodable(f"{type(error).__name__}: {said}")
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


def with_traceback(error: BaseException) -> str:
    """The error with its traceback, for a log."""
    return _encodable("".join(traceback.format_exception(error)))


def _encodable(text: str) -> str:
    """The text with lone surrogates escaped, which log handlers could fail over."""
    return text.encode(errors="backslashreplace").decode()


def attempt(act: Callable[..., None], *args: object) -> None:
    """Calls act(*args) and logs what it raises."""
    try:
        act(*args)
    except BaseException:
        log.exception("while the engine was ending its requests")


def refuse(
    request: Request,
    on_output: Callable[[Output], None],
    reason: FinishReason,
    error: str = "",
    indices: Sequence[int] | None = None,
    *,
    engine_failed: bool = False,
) -> None:
    """Sends a caller the last `Output` of continuations that never reached the scheduler, or of
    which nothing else is known. Exceptions of the callback are ignored.

    Args:
        request: the request whose continuations end.
        on_output: the caller's callback.
        reason: why they end.
        error: the message, with FinishReason.ERROR.
        indices: which continuations; None for all.
        engine_failed: see `Output.engine_failed`.
    """
    for index in range(request.sampling.n) if indices is None else indices:
        with contextlib.suppress(BaseException):
            on_output(
                Output(
                    request.id,
                    index,
                    finish_reason=reason,
                    error=error,
                    engine_failed=engine_failed,
                )
            )
