"""Records of the batch journal, and the reasons why it refuses an operation."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxserve.server.requests.call_errors import CallError, CallRefused
from jaxserve.server.requests.call_outcome import CallOutcome


class BatchState(enum.StrEnum):
    """State of a batch."""

    OPEN = "open"  # more lines may come; none is served yet
    COMMITTED = "committed"  # its lines are served
    ENDED = "ended"  # every line has a result
    CANCELLED = "cancelled"  # lines without a result never get one


@dataclass(frozen=True)
class Status:
    """Status of a batch.

    Attributes:
        key: its number in the journal, never reused.
        batch_id: its id, unique for its owner.
        model: the model that its lines are for.
        state: its state.
        num_lines: number of its lines.
        done: lines with completions.
        failed: lines with an error.
        changed: when its state last changed or lines were added, in seconds since the epoch.
        owner: name of the API key that submitted it; "" where none was needed.
        note: text of the frontend that created it; "" without one.
    """

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
        """Whether no more results will come."""
        return self.state in (BatchState.ENDED, BatchState.CANCELLED)


@dataclass(frozen=True)
class Quota:
    """Limits of what one owner may keep. max_bytes: total size. count: number."""

    max_bytes: int
    count: int


@dataclass(frozen=True)
class NewLine:
    """A line to store.

    Attributes:
        request: text in a form that the frontends and the runner share.
        error: result of a line that is not to be served.
        name: the client's id of the line, which `request` and `error` contain, too.
    """

    request: str
    error: str | None = None
    name: str = ""


@dataclass(frozen=True, order=True)
class Position:
    """A line's place in the order of service: batches in the order of their commits, then lines."""

    place: int
    line: int


@dataclass(frozen=True)
class Work:
    """A line to serve.

    Attributes:
        position: its place in the order of service.
        batch: the batch's key.
        request: the line's text.
        batch_id: the batch's id.
        owner: the batch's owner.
    """

    position: Position
    batch: int
    request: str
    batch_id: str
    owner: str = ""

    @property
    def line(self) -> int:
        """The line's number in the batch, from 0."""
        return self.position.line


@dataclass(frozen=True)
class Outcome:
    """A line's result to store.

    Attributes:
        batch: the batch's key.
        line: the line's number.
        result: the result's text.
        failed: whether the result is an error.
        instead: error to store if the result does not fit; "" stores the result anyway.
    """

    batch: int
    line: int
    result: str
    failed: bool
    instead: str = ""


class BatchRefused(CallRefused):
    """The journal refuses the operation; the message says why."""


class UnknownBatch(BatchRefused):
    """There is no batch with that id."""

    call_error = CallError("not_found", 404, "NOT_FOUND", CallOutcome.REFUSED, "batch_id")

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"batch_id: there is no batch {batch_id!r}")


class MissingLines(BatchRefused):
    """The lines do not begin where the batch ends."""

    call_error = CallError("conflict", 409, "OUT_OF_RANGE", CallOutcome.REFUSED)


class OtherLines(BatchRefused):
    """The batch has other lines at these places."""

    call_error = CallError("conflict", 409, "ALREADY_EXISTS", CallOutcome.REFUSED)


class BatchConflict(BatchRefused):
    """The batch's state does not allow the operation."""


class JournalFull(BatchRefused):
    """The batch, or all of them together, would exceed a size limit."""

    call_error = CallError(
        "batches_full", 413, "RESOURCE_EXHAUSTED", CallOutcome.REFUSED, "input_file_id"
    )
