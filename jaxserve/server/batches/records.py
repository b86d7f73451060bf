"""What the journal says of batches, and why it refuses some."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxserve.server.requests.call_errors import CallError, CallRefused
from jaxserve.server.requests.call_outcome import CallOutcome


class BatchState(enum.StrEnum):
    """Where a batch is."""

    OPEN = "open"  # more lines may come; none is served yet
    COMMITTED = "committed"  # its lines are served
    ENDED = "ended"  # every line has its result
    CANCELLED = "cancelled"  # lines without a result get none


@dataclass(frozen=True)
class Status:
    """A batch. key: its number in the journal, never used again. model: what its lines are for.
    done, failed: lines with a result, and with an error instead. changed: when it last changed
    state or got lines, in seconds since the epoch. owner: name of the API key that it came with; ""
    where none was needed. note: its door's own, "" where there is none."""

    key: int
    batch_id: str
    model: str
    state: BatchState
    num_lines: int
    done: int
    failed: int
    changed: float
    owner: str = ""
    note: str = ""

    @property
    def over(self) -> bool:
        """No more results will come."""
        return self.state in (BatchState.ENDED, BatchState.CANCELLED)


@dataclass(frozen=True)
class Quota:
    """What one owner may keep. max_bytes: in all. count: how many."""

    max_bytes: int
    count: int


@dataclass(frozen=True)
class NewLine:
    """A line to keep. request: text, whatever the frontends and the runner agree on. error: the
    result of a line that is not worth trying."""

    request: str
    error: str | None = None


@dataclass(frozen=True, order=True)
class Position:
    """A line's place in the order of service: batches by when they were committed, then lines."""

    place: int
    line: int


@dataclass(frozen=True)
class Work:
    """A line to serve. batch: the batch's key; batch_id, owner: as its Status has them."""

    position: Position
    batch: int
    request: str
    batch_id: str
    owner: str = ""

    @property
    def line(self) -> int:
        """Its number in the batch, from 0."""
        return self.position.line


@dataclass(frozen=True)
class Outcome:
    """A line's result, to keep. batch: the batch's key. failed: it says of an error. instead: an
    error that is kept where there is no room for it; "" keeps it all the same."""

    batch: int
    line: int
    result: str
    failed: bool
    instead: str = ""


class BatchRefused(CallRefused):
    """The journal does not do that; the message says why."""


class UnknownBatch(BatchRefused):
    """There is no batch of that id."""

    call_error = CallError("not_found", 404, "NOT_FOUND", CallOutcome.REFUSED, "batch_id")

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"batch_id: there is no batch {batch_id!r}")


class MissingLines(BatchRefused):
    """Lines came that do not go on where the batch ends."""

    call_error = CallError("conflict", 409, "OUT_OF_RANGE", CallOutcome.REFUSED)


class OtherLines(BatchRefused):
    """The batch has other lines at these places."""

    call_error = CallError("conflict", 409, "ALREADY_EXISTS", CallOutcome.REFUSED)


class BatchConflict(BatchRefused):
    """The batch is in a state that does not go with what was asked."""


class JournalFull(BatchRefused):
    """The batch, or all of them, would take more than they may."""

    call_error = CallError(
        "batches_full", 413, "RESOURCE_EXHAUSTED", CallOutcome.REFUSED, "input_file_id"
    )
