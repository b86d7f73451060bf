"""Detects policies that make no progress: one that keeps discarding its work may do so for ever.

For example, a policy that lets waiting requests preempt running ones starts the second of two
requests that do not fit together at the cost of the first, and then the first at the cost of the
second. If prompts take several steps, neither ever gets its first token.

A step makes progress if it computes any token for the first time. A schedule has no more such steps
than its requests have tokens; one that never ends has none from some step on. Without preemptions
nothing is computed twice, so progress follows soon; and if the order of priority is fixed, the
first request loses nothing to the others, and soon makes progress. This leaves policies that change
their order: one makes no progress, as far as we wait, if a request loses its cache FUTILE times
while nothing new is computed; or if IDLE plans in a row have operations on the pool and no tokens.

The compiled simulation repeats the first check (`compiled/bookkeeping.py`); its policies plan no
operations but preemptions, of which there are finitely many without a batch between.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.row_columns import grow_columns

FUTILE = 100
IDLE = 10_000


class Progress:
    """Progress over `capacity` rows. steps: number of steps with a batch so far."""

    def __init__(self, capacity: int) -> None:
        self.steps = 0
        self._losses = np.zeros(capacity, np.int64)  # preemptions since `_since`
        self._since = np.zeros(capacity, np.int64)  # the last step with progress at that time
        self._last = 0  # the last step with progress
        self._most = 0  # most losses of a request since then
        self._idle = 0

    def check(self) -> None:
        """InvalidPlan if the policy makes no progress."""
        if self._most >= FUTILE:
            raise futile(self.steps)
        if self._idle >= IDLE:
            raise InvalidPlan(f"after step {self.steps}, {IDLE} plans had operations but no batch")

    def follow(self, rows: int) -> None:
        """Makes room for rows up to `rows`."""
        grow_columns(self, rows, _losses=0, _since=0)

    def forget(self, row: int) -> None:
        """Notes that another request has the row from now on."""
        self._losses[row] = 0

    def note(self, tokens: int, recomputed: int, preempted: np.ndarray) -> None:
        """Notes a step.

        Args:
            tokens: Tokens of its batch.
            recomputed: How many of them had been computed before.
            preempted: Rows that lost cached tokens before the step.
        """
        self.steps += tokens > 0
        self._idle = 0 if tokens else self._idle + 1
        if tokens > recomputed:
            self.advance(0)
        elif len(preempted):
            known = self._since[preempted] == self._last
            losses = np.where(known, self._losses[preempted], 0) + 1
            self._losses[preempted], self._since[preempted] = losses, self._last
            self._most = max(self._most, int(losses.max()))

    def advance(self, steps: int) -> None:
        """Notes further steps, the last of which made progress."""
        self.steps += steps
        self._last += 1
        self._most = self._idle = 0


def futile(step: int) -> InvalidPlan:
    """The error for a policy without progress up to this step."""
    return InvalidPlan(
        f"by step {step} it has preempted a request {FUTILE} times, while nothing was computed but "
        "what had been before: it gets nowhere"
    )
