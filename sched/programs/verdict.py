"""How a program ended, and whether it was in time."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ProgramEnd(enum.StrEnum):
    """What ended a program."""

    OVER = enum.auto()
    """A call said that it was the last, and all calls have ended."""
    SILENT = enum.auto()
    """No call came for longer than its tools take."""
    FORGOTTEN = enum.auto()
    """Other programs needed its place."""


OUTCOMES = ("met", "missed", "given_up", "ended")
"""What may come of a program, see `ProgramVerdict.outcome`."""


@dataclass(frozen=True)
class ProgramVerdict:
    """A program that has ended.

    Attributes:
        tenant: Its tenant.
        id: Its id; empty if no call named it.
        slo_class: SLO class of its first call.
        end: What ended it.
        calls: Number of its calls.
        took: From the arrival of its first call to the end of its last, in seconds.
        deadline: The time that it had for that; None for none.
        given_up: Whether its client gave it up: its last call was cancelled or failed, or it fell
            silent although it had said that calls were to come.
    """

    tenant: str
    id: str
    slo_class: str
    end: ProgramEnd
    calls: int
    took: float
    deadline: float | None
    given_up: bool

    @property
    def outcome(self) -> str:
        """`given_up`, `met`, `missed`, or `ended` without a deadline."""
        if self.given_up:
            return "given_up"
        return "ended" if self.met is None else "met" if self.met else "missed"

    @property
    def met(self) -> bool | None:
        """Whether it was finished within its deadline; None without one."""
        if self.deadline is None:
            return None
        return not self.given_up and self.took <= self.deadline
