"""How calls end, whichever door they came through: counted for the metrics, and logged."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxserve.engine.output import Timings

log = logging.getLogger(__name__)
calls_log = logging.getLogger("jaxserve.calls")

_LINES, _WINDOW_S = 10, 60.0  # of one kind that are logged in a while


class Ending(enum.StrEnum):
    """How a call ended, and why."""

    OK = "ok"
    INVALID = "invalid"  # a field is missing, unknown or beyond its limit
    MALFORMED = "malformed"  # no message of the API
    DUPLICATE = "duplicate"  # its id is running
    QUEUE_FULL = "queue_full"  # scheduler.max_queue
    TOO_MANY_CALLS = "too_many_calls"  # server.max_calls
    UNAUTHENTICATED = "unauthenticated"  # without an API key, or with a wrong one
    RATE_LIMITED = "rate_limited"  # the key's own limits
    SHUTTING_DOWN = "shutting_down"
    ENGINE_FAILED = "engine_failed"  # or stalled
    CANCELLED = "cancelled"  # by the client, or its connection was lost
    TIMED_OUT = "timed_out"  # the client's deadline has passed
    SLOW_READER = "slow_reader"
    REFUSED = "refused"  # for a reason of the method's own
    FAILED = "failed"  # a defect of the server's


@dataclass
class CallRecord:
    """One call, for the log; nothing of what was asked or answered. method: the API's name of it.
    caller: name of the API key, "" where none is needed. began: seconds, of time.monotonic().
    prompt_tokens, output_tokens: 0 where none are known."""

    method: str
    peer: str = ""
    request_id: str = ""
    caller: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    timings: Timings | None = None
    ending: Ending = Ending.OK
    began: float = field(default_factory=time.monotonic)


class Endings:
    """counts: calls by (method, ending), for whoever exports them, from any thread. methods: all
    that there are. log_calls: one line a call."""

    def __init__(self, methods: Iterable[str], *, log_calls: bool = False) -> None:
        self.counts = {(method, ending): 0 for method in methods for ending in Ending}
        self._log_calls = log_calls
        if log_calls:
            calls_log.setLevel(logging.INFO)  # whatever the level of the others

    def ended(self, record: CallRecord) -> None:
        """Once a call."""
        self.counts[record.method, record.ending] += 1
        if self._log_calls:
            calls_log.info("%s", _line(record))


def _line(record: CallRecord) -> str:
    seconds = time.monotonic() - record.began
    whose = f" as {record.caller}" if record.caller else ""
    where = f"from {record.peer or '-'}{whose}"
    parts = [
        f"{record.method} {record.request_id or '-'} {where}: {record.ending}",
        f"{record.prompt_tokens} + {record.output_tokens} tokens",
    ]
    if record.timings is not None:
        ms = {name: 1000 * getattr(record.timings, name) for name in ("queue", "ttft", "total")}
        parts.append(", ".join(f"{name} {value:.1f} ms" for name, value in ms.items()))
    return "; ".join([*parts, f"{1000 * seconds:.1f} ms open"])


class RateLimitedLog:
    """Warnings of which there may be any number: so many of a kind in a while, and how many more
    there have been. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, deque[float]] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, kind: str, text: str, *arguments: object) -> None:
        """As logging has it. kind: of which a few are written a minute."""
        now = self._clock()
        times = self._times.setdefault(kind, deque())
        while times and now - times[0] >= _WINDOW_S:
            times.popleft()
        if len(times) >= _LINES:
            self._left_out[kind] += 1
            return
        times.append(now)
        left_out = self._left_out.pop(kind, 0)
        more = f" (and {left_out} more like it before)" if left_out else ""
        log.warning(text + "%s", *arguments, more)
