"""Whether a policy gets anywhere: one that throws away what it has computed may do so for ever.

A policy that lets those who wait preempt those who run, say, starts the second of two requests that
do not fit together at the cost of the first, and then the first at the cost of the second. Where
prompts take several steps neither ever comes to its first token.

A step gets somewhere if it computes any token that was not computed before. A schedule makes no
more of these than its requests have tokens; one that never ends makes none from some step on.
Without preemptions nothing is computed again twice, so a step that gets somewhere soon follows; and
where the order of priority is fixed the first in it loses nothing to the others, and soon gets
somewhere. What is left are policies that change their minds: one goes on for ever, as far as
anybody will wait, if a request loses its cache FUTILE times while nobody computes anything new; or
if IDLE plans, one after the other, have operations on the pool and no token at all.

The compiled simulation has the first of these once more (`compiled/bookkeeping.py`); its policies
plan no operations but preemptions, of which there are finitely many without a batch between.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.row_columns import grow_columns

FUTILE = 100
IDLE = 10_000


class Progress:
    """Over `capacity` rows. steps: those with a batch, so far."""

    def __init__(self, capacity: int) -> None:
        self.steps = 0
        self._losses = np.zeros(capacity, np.int64)  # preemptions since `_since`
        self._since = np.zeros(capacity, np.int64)  # the last of the steps that got somewhere, then
        self._last = 0  # of those
        self._most = 0  # losses of any one since then
        self._idle = 0

    def check(self) -> None:
        """InvalidPlan if the policy gets nowhere."""
        if self._most >= FUTILE:
            raise futile(self.steps)
        if self._idle >= IDLE:
            raise InvalidPlan(f"after step {self.steps}, {IDLE} plans had operations but no batch")

    def follow(self, rows: int) -> None:
        """Makes room for rows up to `rows`."""
        grow_columns(self, rows, _losses=0, _since=0)

    def forget(self, row: int) -> None:
        """Another request has the row from now on."""
        self._losses[row] = 0

    def note(self, tokens: int, recomputed: int, preempted: np.ndarray) -> None:
        """Notes a step.

        Args:
            tokens: Of its batch.
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
        """So many more steps, and the last one got somewhere."""
        self.steps += steps
        self._last += 1
        self._most = self._idle = 0


def futile(step: int) -> InvalidPlan:
    """For a policy that has got nowhere until this step."""
    return InvalidPlan(
        f"by step {step} it has preempted a request {FUTILE} times, while nothing was computed but "
        "what had been before: it gets nowhere"
    )
