"""How calls end, at every frontend: counted for the metrics, and told to logs and traces."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.engine.output import Output
from jaxserve.sched.request import Request
from jaxserve.server.access.api_keys import Caller

log = logging.getLogger(__name__)

_LINES, _WINDOW_S = 10, 60.0  # of one kind that are logged in a while


class CallOutcome(enum.StrEnum):
    """How a call ended, and why."""

    OK = "ok"
    INVALID = "invalid"  # a field is missing, unknown or beyond its limit
    MALFORMED = "malformed"  # no message of the API
    DUPLICATE = "duplicate"  # its id is running
    QUEUE_FULL = "queue_full"  # scheduler.max_queue
    TOO_MANY_CALLS = "too_many_calls"  # server.max_calls
    EXPECTED_LATE = "expected_late"  # server.refuse_late
    UNAUTHENTICATED = "unauthenticated"  # without an API key, or with a wrong one
    RATE_LIMITED = "rate_limited"  # the key's own limits
    SHUTTING_DOWN = "shutting_down"
    ENGINE_FAILED = "engine_failed"  # or stalled
    CANCELLED = "cancelled"  # by the client, or its connection was lost
    TIMED_OUT = "timed_out"  # the client's deadline has passed
    SLOW_READER = "slow_reader"
    REFUSED = "refused"  # for a reason of the method's own
    FAILED = "failed"  # a defect of the server's


class CallSource(enum.StrEnum):
    """Which way a call came."""

    GRPC = "grpc"
    HTTP = "http"
    BATCH = "batch"  # a line of a batch, from the disk


@dataclass
class CallRecord:
    """One call. All but `began` is filled in as it goes on, on the event loop's thread.

    Attributes:
        method: the API's name of it.
        peer: address of its client.
        request_id: the client's, or made up.
        caller: whose it is.
        source: which way it came.
        batch, line: which one, of a batch's line.
        x_request_id: that HTTP's response has.
        requests: what it asks of the engine, once that is known.
        output_tokens: that the engine has generated.
        last: the last output of each continuation.
        keeps_text: whether `texts` is kept.
        texts: all that was generated, by request and continuation.
        carrier: headers of W3C Trace Context that came with it.
        trace_id: of its trace.
        outcome: how it ended.
        reason: what its client is told of an outcome that is not OK, which may quote the client.
        began, submitted, ended: seconds of time.monotonic(); submitted when the engine got the
            first request.
    """

    method: str
    peer: str = ""
    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    source: CallSource = CallSource.GRPC
    batch: str = ""
    line: int | None = None
    x_request_id: str = ""
    requests: Sequence[Request] = ()
    output_tokens: int = 0
    last: list[Output] = field(default_factory=list)
    keeps_text: bool = False
    texts: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    carrier: Mapping[str, str] = field(default_factory=dict)
    trace_id: str = ""
    outcome: CallOutcome = CallOutcome.OK
    reason: str = ""
    began: float = field(default_factory=time.monotonic)
    submitted: float | None = None
    ended: float = 0.0
    _taken: int = 0  # of the caller's concurrency
    _open: int = 0
    _then: Callable[[], None] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of all its requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def longest(self) -> Output | None:
        """The last word on the continuation that took longest."""
        timed = (last for last in self.last if last.timings is not None)
        return max(timed, key=lambda last: last.timings.total, default=None)  # type: ignore[union-attr]

    def charge(self, requests: Sequence[Request]) -> None:
        """Counts what it is about to ask of the engine as its caller's. Raises RateLimited and
        TooManyRequests where the caller may not have as much."""
        self.requests, self.request_id = requests, self.caller.own(requests[0].id)
        count = sum(request.sampling.n for request in requests)
        self.caller.take_requests(count)
        self._taken = count

    def opened(self) -> None:
        """The engine has got one of its requests."""
        self._open += 1
        if self.submitted is None:
            self.submitted = time.monotonic()

    def heard(self, output: Output) -> None:
        """What the engine says of one of them, whether or not anybody still reads."""
        self.output_tokens += len(output.token_ids)
        if self.keeps_text:
            self.texts.setdefault((output.request_id, output.index), []).append(output.text)
        if output.finish_reason is not None:
            self.last.append(output)

    def closed(self) -> None:
        """The engine says nothing more of one of them."""
        self._open -= 1
        if not self._open and self._then is not None:
            self._then()

    def when_closed(self, then: Callable[[], None]) -> None:
        """Calls it once the engine has said all, which may be now."""
        self._then = then
        if not self._open:
            then()

    def give_back(self) -> None:
        """Its requests are its caller's no more."""
        self.caller.give_back_requests(self._taken)
        self._taken = 0


Sink = Callable[[CallRecord], None]


class CallTracker:
    """Counts calls, and tells sinks of them.

    Args:
        methods: all that there are.
        sinks: are told of each call and each batch line, one after the other, once the engine has
            said its last word on it.
        logged: one of them is the log, so nobody else need log a call that is refused.
        keeps_text: for them.

    Attributes:
        counts: calls by (method, outcome), for whoever exports them, from any thread.
        lines: lines of batches by outcome, likewise.
    """

    def __init__(
        self,
        methods: Iterable[str],
        sinks: Sequence[Sink] = (),
        *,
        logged: bool = False,
        keeps_text: bool = False,
    ) -> None:
        self.counts = {(method, outcome): 0 for method in methods for outcome in CallOutcome}
        self.lines = dict.fromkeys(CallOutcome, 0)
        self._sinks, self.logged, self._keeps_text = sinks, logged, keeps_text

    def begin(
        self,
        source: CallSource,
        method: str,
        peer: str = "",
        carrier: Mapping[str, str] | None = None,
    ) -> CallRecord:
        """One more call, or line."""
        kept = self._keeps_text
        return CallRecord(method, peer, source=source, carrier=carrier or {}, keeps_text=kept)

    def ended(self, record: CallRecord) -> None:
        """Once a call."""
        if record.source is CallSource.BATCH:
            self.lines[record.outcome] += 1
        else:
            self.counts[record.method, record.outcome] += 1
        record.ended = time.monotonic()
        record.when_closed(lambda: self._tell(record))

    def _tell(self, record: CallRecord) -> None:
        record.give_back()
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:  # the call has been answered
                log.exception("the end of a call of %s is not told", record.method)


class RateLimitedLog:
    """Warnings of which there may be any number: so many of a kind in a while, and how many more
    there have been. quiet: none, for each call has a line anyway. clock: seconds."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._clock = quiet, clock
        self._times: dict[str, deque[float]] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, kind: str, text: str, *arguments: object) -> None:
        """As logging has it. kind: of which a few are written a minute."""
        if self._quiet:
            return
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
