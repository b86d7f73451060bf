"""What goes wrong on the engine's thread, and how much of what is served ends with it.

What fails for one request ends that request alone. Where it cannot be told whose fault it is, in a
plan, a batch, a launch, the requests of that step end. Only a device that fails ends the engine,
and what it holds being unknown, or nothing but failures one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import jax

from jaxserve.engine.device.compile_counter import CompiledAfterWarmup
from jaxserve.engine.errors import HostLost
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import Observer
from jaxserve.sched.request import Request

log = logging.getLogger(__name__)

IN_VAIN = 16
"""Steps that may fail one after the other, with no token in between."""
OF_NEWCOMERS = IN_VAIN // 2
"""Of these, those for which only they end who have come meanwhile, where that may help."""

MAX_MESSAGE = 500  # characters
_LINES, _WINDOW_S = 10, 60.0  # that are logged in a while; the others are counted only
_DEVICE = (jax.errors.JaxRuntimeError, HostLost, CompiledAfterWarmup)


class Failures:
    """Counts since the start, on the engine's thread. requests: continuations that were ended
    alone. steps: whose requests ended together. observers: calls of theirs that raised. in_vain:
    steps that failed since the last one that brought tokens."""

    def __init__(self) -> None:
        self.requests = self.steps = self.observers = 0
        self.in_vain = 0
        self._logged: deque[float] = deque(maxlen=_LINES)

    def of_request(self, error: BaseException, request_id: str) -> None:
        """A continuation of it failed, alone."""
        self.requests += 1
        self._log(f"request {request_id!r} failed", error)

    def of_step(self, error: BaseException, ended: int) -> None:
        """Nobody knows for whom it failed. ended: continuations that end for it. Raises the error
        where no step has brought a token since IN_VAIN others failed."""
        self.steps += 1
        self.in_vain += 1
        self._log(f"a step failed, and {ended} continuations with it", error)
        if self.in_vain > IN_VAIN:
            raise error

    def of_observer(self, error: BaseException, observer: Observer) -> None:
        """What it was told is lost to it."""
        self.observers += 1
        self._log(f"the observer {type(observer).__name__} failed", error)

    def went_well(self) -> None:
        """A step has brought its tokens."""
        self.in_vain = 0

    def _log(self, what: str, error: BaseException) -> None:
        now, logged = time.monotonic(), self._logged
        if len(logged) < _LINES or now - logged[0] > _WINDOW_S:
            logged.append(now)
            log.error("%s: %s", what, with_traceback(error))


class Observers:
    """Those who are told of what happens. One that raises hears of the next event all the same, and
    nobody is served the worse for it."""

    def __init__(self, failures: Failures) -> None:
        self._all: tuple[Observer, ...] = ()
        self._failures = failures

    def add(self, observer: Observer) -> None:
        """From any thread: it is told from now on."""
        self._all = (*self._all, observer)

    def notify(self, event: Callable[[Observer], None]) -> None:
        """Calls event(observer) for each of them."""
        for observer in self._all:
            try:
                event(observer)
            except BaseException as error:
                self._failures.of_observer(error, observer)


def ends_engine(error: BaseException) -> bool:
    """Whether it says that the device is of no use any more."""
    return isinstance(error, _DEVICE)


def describe(error: BaseException) -> str:
    """As the callers are told: one line of text, whatever the error says."""
    try:
        said = str(error)
    except BaseException:
        said = ""
    text = _encodable(f"{type(error).__name__}: {said}")
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


def with_traceback(error: BaseException) -> str:
    """For a log."""
    return _encodable("".join(traceback.format_exception(error)))


def _encodable(text: str) -> str:
    """With what is no Unicode escaped: whoever takes logs in may fail over it."""
    return text.encode(errors="backslashreplace").decode()


def attempt(act: Callable[..., None], *args: object) -> None:
    """If it fails, that is logged."""
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
    """Tells a caller that continuations, by default all, have ended, and nothing else of them: they
    never got as far as the scheduler, or there is nothing that can be said. What it raises is its
    own affair."""
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
