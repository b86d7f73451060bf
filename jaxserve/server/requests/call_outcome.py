"""How calls end, at every frontend: counted for metrics, and passed to logs and traces."""

from __future__ import annotations

import enum
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from jaxserve.engine.output import Output, Usage
from jaxserve.sched.request import Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.moves.why import Why
from jaxserve.server.requests.engine_load import EngineLoad

if TYPE_CHECKING:  # slow to import
    from jaxserve.server.moves.passage import Passage

log = logging.getLogger(__name__)

_LINES, _WINDOW_S = 10, 60.0  # lines of one kind logged per window


class CallOutcome(enum.StrEnum):
    """How a call ended, and why."""

    OK = "ok"
    INVALID = "invalid"  # a field is missing, unknown or beyond its limit
    MALFORMED = "malformed"  # not a message of the API
    DUPLICATE = "duplicate"  # a request with its id is running
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
    """Where a call comes from."""

    GRPC = "grpc"
    HTTP = "http"
    BATCH = "batch"  # a line of a batch, from the disk


@dataclass
class CallRecord:
    """What is known of one call. All fields but `began` are filled in as the call goes on, on the
    event loop's thread.

    Attributes:
        method: the API method's name.
        peer: the client's address.
        request_id: the client's id, or a generated one.
        caller: the client.
        source: where the call comes from.
        batch: id of the batch, for a line of one.
        line: its number in the batch.
        x_request_id: the X-Request-Id of the HTTP response.
        requests: its requests to the engine, once they are known.
        unenforced: places of keywords in its schema that its text is not held to.
        output_tokens: tokens generated so far.
        given_up: continuations whose targets the policy has given up.
        last: the final output of each continuation that has ended.
        keeps_text: whether `texts` is filled in.
        texts: generated text, by request id and continuation.
        carrier: W3C Trace Context headers of the call.
        trace_id: id of its trace.
        outcome: how it ended.
        reason: the error message that the client gets if `outcome` is not OK; it may quote the
            client.
        load: the engine's load when a call is refused; None if unknown.
        passage: by which its answer may go on at another replica; None on a server by itself.
        began: when its head had been read by the frontend, in seconds of time.monotonic(); this is
            the arrival time of its requests.
        ended: when it ended.
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
    unenforced: Sequence[str] = ()
    output_tokens: int = 0
    given_up: int = 0
    last: list[Output] = field(default_factory=list)
    keeps_text: bool = False
    texts: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    carrier: Mapping[str, str] = field(default_factory=dict)
    trace_id: str = ""
    outcome: CallOutcome = CallOutcome.OK
    reason: str = ""
    load: Callable[[], EngineLoad | None] = lambda: None
    passage: Passage | None = None
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    _taken: int = 0  # requests counted for the caller's concurrency
    _open: int = 0
    _then: Callable[[], None] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cache hits for the first continuation of each prompt. Other
        continuations may hit what the first one has computed."""
        firsts = (last.usage for last in self.last if not last.index)
        return sum(usage.cached_tokens for usage in firsts if usage is not None)

    @property
    def drafted_tokens(self) -> tuple[int, int]:
        """Numbers of right and of wrong drafted tokens, in continuations that have ended."""
        return drafted_tokens([last.usage for last in self.last])

    @property
    def longest(self) -> Output | None:
        """The final output of the continuation that took longest."""
        timed = (last for last in self.last if last.timings is not None)
        return max(timed, key=lambda last: last.timings.total, default=None)  # type: ignore[union-attr]

    def of(self, caller: Caller) -> None:
        """Sets the caller of the call. The requests arrive when the call did."""
        caller.arrived, caller.drawn, self.caller = self.began, self.drawn, caller
        caller.travels = self.passage is not None

    def drawn(self, what: str) -> bytes:
        """16 bytes that nobody can guess, for one purpose. If the answer goes on elsewhere, they
        are the same there."""
        passage = self.passage
        return secrets.token_bytes(16) if passage is None else passage.drawn(what)

    @property
    def created(self) -> int:
        """When the answer was begun, in seconds of time.time()."""
        return int(time.time()) if self.passage is None else int(self.passage.point.arrived)

    def charge(self, requests: Sequence[Request], at_once: int | None = None) -> None:
        """Counts the requests that the call is about to submit for its caller. Raises RateLimited
        or TooManyRequests if the caller may not have as many. at_once: how many of them run at
        once; None for all."""
        self.requests, self.request_id = requests, self.caller.own(requests[0].id)
        count = sum(request.sampling.n for request in requests) if at_once is None else at_once
        self.caller.take_requests(count)
        self._taken = count

    def opened(self) -> None:
        """Counts a request that was submitted to the engine."""
        self._open += 1

    def heard(self, output: Output) -> None:
        """Records an output of one of its requests, whether or not the client still reads."""
        self.output_tokens += len(output.token_ids)
        self.given_up += output.expected_missed
        if self.keeps_text:
            self.texts.setdefault((output.request_id, output.index), []).append(output.text)
        if output.finish_reason is not None:
            self.last.append(output)

    def closed(self) -> None:
        """Counts a request that the engine has finished."""
        self._open -= 1
        if not self._open and self._then is not None:
            self._then()

    def when_closed(self, then: Callable[[], None]) -> None:
        """Calls `then` once the engine has finished all requests of the call, at once if it has."""
        self._then = then
        if not self._open:
            then()

    def give_back(self) -> None:
        """Stops counting the call's requests for its caller."""
        self.caller.give_back_requests(self._taken)
        self._taken = 0


Sink = Callable[[CallRecord], None]


class CallTracker:
    """Counts calls, and passes each finished one to sinks.

    Args:
        methods: names of all API methods.
        sinks: called one after the other with each call and each batch line, once the engine has
            finished its requests.
        logged: whether one of the sinks is the log. Frontends then need not log refused calls.
        keeps_text: whether records keep generated text for the sinks.
        load: returns the engine's load, for records.
        clock: the engine's clock, in seconds.

    Attributes:
        counts: calls by (method, outcome). Any thread may read it.
        lines: lines of batches by outcome, likewise.
        moved: calls that another replica had begun to answer, by why they moved, likewise.
        logged: as given.
    """

    def __init__(
        self,
        methods: Iterable[str],
        sinks: Sequence[Sink] = (),
        *,
        logged: bool = False,
        keeps_text: bool = False,
        load: Callable[[], EngineLoad | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = {(method, outcome): 0 for method in methods for outcome in CallOutcome}
        self.lines = dict.fromkeys(CallOutcome, 0)
        self.moved = dict.fromkeys(filter(None, get_args(Why)), 0)
        self._sinks, self.logged, self._keeps_text = sinks, logged, keeps_text
        self._load, self._clock = load, clock

    def begin(
        self,
        source: CallSource,
        method: str,
        peer: str = "",
        carrier: Mapping[str, str] | None = None,
        began: float | None = None,
        passage: Passage | None = None,
    ) -> CallRecord:
        """The record of a new call or batch line.

        Args:
            source: where the call comes from.
            method: the API method's name.
            peer: the client's address.
            carrier: W3C Trace Context headers of the call.
            began: as `CallRecord.began`; None: now.
            passage: as `CallRecord.passage`.
        """
        record = CallRecord(
            method,
            peer,
            source=source,
            carrier=carrier or {},
            keeps_text=self._keeps_text,
            load=self._load,
            began=self._clock() if began is None else began,
            passage=passage,
        )
        if passage is not None:
            passage.call = record
            if passage.silent:
                self.moved[passage.point.why] += 1
        return record

    def ended(self, record: CallRecord) -> None:
        """Counts a call that has ended; to be called once for each."""
        if record.source is CallSource.BATCH:
            self.lines[record.outcome] += 1
        else:
            self.counts[record.method, record.outcome] += 1
        record.ended = self._clock()
        record.when_closed(lambda: self._tell(record))

    def _tell(self, record: CallRecord) -> None:
        record.give_back()
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:  # the call was already answered
                log.exception("the end of a call of %s is not told", record.method)


class RateLimitedLog:
    """Logs at most a few warnings of each kind per minute, with the number of those left out.
    quiet: whether to log none, since each call has a line anyway. clock: seconds."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._clock = quiet, clock
        self._times: dict[str, deque[float]] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, kind: str, text: str, *arguments: object) -> None:
        """Logs a warning as `logging` does, unless there were too many of its kind lately."""
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


def drafted_tokens(usages: Sequence[Usage | None]) -> tuple[int, int]:
    """Numbers of right and of wrong drafted tokens."""
    known = [usage for usage in usages if usage is not None]
    right = sum(usage.accepted_draft_tokens for usage in known)
    return right, sum(usage.rejected_draft_tokens for usage in known)
