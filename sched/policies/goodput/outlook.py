"""What each request can still attain: when its next token is due, and what a late one would cost.

Of n gaps between tokens, floor((n - 1) / 100) may be late while the 99th percentile is in time. A
late gap costs the probability that the output gets long enough for the late gaps so far, less the
probability that it gets long enough for one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.request import LEAST_MAX_TBT, MAX_TBT, Tier
from jaxserve.sched.state.output_lengths import ENOUGH, Survival
from jaxserve.sched.state.request_table import RUNNING

GAPS = 100  # of which one may be late
PAUSE = 2.0  # seconds: a job that may wait for longer loses nothing if it is paused
EVERY = 64  # plans from one look at them to the next


class Lengths:
    """How long outputs get, looked up every EVERY plans."""

    def __init__(self) -> None:
        self._plans = 0
        self._survival: Survival | None = None

    def read(self, view: View) -> None:
        """Called once a plan."""
        lengths = view.table.output_lengths
        if self._plans % EVERY == 0 and lengths.count >= ENOUGH:
            going = view.table.generated[view.table.in_state(RUNNING)]
            self._survival = Survival(*lengths.counted(), going)
        self._plans += 1

    def reach(self, generated: np.ndarray, tokens: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Probability that outputs get so long. Before ENOUGH have ended, nobody counts on it.

        Args:
            generated: int64 [n], tokens so far.
            tokens: int64 [n], the length asked for.
            most: int64 [n], the most that each may write.

        Returns:
            float64 [n].
        """
        there = tokens <= np.maximum(generated, 1)
        if self._survival is None or there.all():
            return there.astype(np.float64)
        longer = self._survival.longer
        share = longer(tokens - 1.0) / np.maximum(longer(generated), 1e-9)
        return np.where(there, 1.0, np.where(tokens > most, 0.0, np.minimum(share, 1.0)))


Targets = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Standard:
    """Targets of real-time requests that name none, in seconds.

    Attributes:
        ttft: To the first token.
        tbt: Between two tokens.
    """

    ttft: float
    tbt: float

    @property
    def max_tbt(self) -> float:
        """The longest gap."""
        return max(MAX_TBT * self.tbt, LEAST_MAX_TBT)

    def targets_of(self, view: View, rows: np.ndarray) -> Targets:
        """The requests' TTFT, TBT, JCT and longest gap, or these for those who name none of them,
        float64 [n] each."""
        table = view.table
        ttft, tbt, jct, longest = (
            column[rows] for column in (table.ttft, table.tbt, table.jct, table.max_tbt)
        )
        bare = ~(np.minimum(np.minimum(ttft, tbt), np.minimum(jct, longest)) < np.inf)
        if bare.any():
            bare &= table.tier[rows] == Tier.REALTIME
            ttft[bare], tbt[bare], longest[bare] = self.ttft, self.tbt, self.max_tbt
        return ttft, tbt, jct, longest


@dataclass(frozen=True)
class Deadlines:
    """Until when the next tokens of n requests have to be there; arrays [n].

    Attributes:
        due: float64, seconds; inf where that does not matter.
        gap_due: float64, when it has to be there even if it is late: the longest gap that is
            allowed; inf before the first token.
        first: bool, whether the next token is the first.
        waits: bool, whether it is a later one, and late already.
        late: int64, gaps that are late, a token that waits included.
        missed: bool, whether its targets cannot be attained, however long its output gets.
    """

    due: np.ndarray
    gap_due: np.ndarray
    first: np.ndarray
    waits: np.ndarray
    late: np.ndarray
    missed: np.ndarray

    @classmethod
    def of_rows(cls, view: View, rows: np.ndarray, targets: Targets, clock: float) -> Deadlines:
        """Reads the table.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            targets: From `Standard.targets_of`.
            clock: When the planned step begins, seconds. A token of the step in flight counts as
                there then.
        """
        table = view.table
        generated, arrival = table.generated[rows], table.arrival[rows]
        ttft, tbt, jct, longest = targets
        first, flying = generated == 0, generated > table.received[rows]
        last = np.where(flying, clock, table.last_token[rows])
        first_due = arrival + ttft
        due = np.where(first, first_due, last + np.minimum(tbt, longest))
        gap_due = np.where(first, np.inf, last + longest)
        waits = ~first & (clock > due)
        came = np.where(first, clock, np.minimum(table.first_token[rows], clock))
        missed = (came > first_due) | (clock > np.minimum(arrival + jct, gap_due))
        missed |= table.longest_gap[rows] > longest
        late = table.late_gaps[rows] + waits
        missed |= (_shortest(late) > table.max_tokens[rows]) & (tbt < np.inf) & ~first
        return cls(due, gap_due, first, waits, late, missed)


def _shortest(late: np.ndarray) -> np.ndarray:
    """Tokens from which on so many gaps may be late, int64 [n]."""
    return np.where(late, GAPS * late + 2, 1)


def jobs_due(view: View, rows: np.ndarray, jct: np.ndarray, pace: float) -> np.ndarray:
    """When the next tokens of jobs have to be there, so that those after them can follow in time.

    Args:
        view: What the policy sees.
        rows: int64 [n].
        jct: float64 [n], their targets, seconds; inf without one.
        pace: Seconds of a step, as of late.

    Returns:
        float64 [n], seconds; inf without a JCT.
    """
    rest = pace * np.maximum(view.table.tokens_ahead(rows) - 1.0, 0.0)
    return np.asarray(view.table.arrival[rows] + jct - rest)


@dataclass(frozen=True)
class Outlook:
    """The outlook of n requests; arrays float64 [n], or bool.

    Attributes:
        due: When the next token has to be there, seconds; inf where that does not matter. For a job
            (JCT), so that the tokens after it can follow at the pace of late.
        gap_due: See `Deadlines`.
        longest: The longest gap that is allowed, seconds; inf without one.
        attains: Probability that the request attains its targets if no further token is late, 1
            without targets, 0 once that is impossible; times its worth.
        loss: How much of that is lost if its next token is late; 0 if it is late already.
        missed: See `Deadlines`.
        bare: Whether it has no targets at all: a best-effort request that loses nothing.
    """

    due: np.ndarray
    gap_due: np.ndarray
    longest: np.ndarray
    attains: np.ndarray
    loss: np.ndarray
    missed: np.ndarray
    bare: np.ndarray

    @classmethod
    def of_rows(
        cls,
        view: View,
        rows: np.ndarray,
        targets: Targets,
        deadlines: Deadlines,
        worth: np.ndarray,
        clock: float,
        lengths: Lengths,
        pace: float,
    ) -> Outlook:
        """Reads the table.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            targets: From `Standard.targets_of`.
            deadlines: Of these rows.
            worth: float64 [n], what it is worth that each attains its targets, more than 0.
            clock: When the planned step begins, seconds.
            lengths: What is known of output lengths.
            pace: Seconds of a step, as of late.
        """
        table, due, missed = view.table, deadlines.due, deadlines.missed
        ttft, tbt, jct, longest = targets
        bare = np.isinf(np.minimum.reduce((ttft, tbt, jct, longest)))
        going = ~(missed | deadlines.first)
        attains = np.where(missed, 0.0, 1.0)
        loss = np.where(missed | bare | (~deadlines.first & np.isinf(tbt)), 0.0, 1.0)
        timed = np.flatnonzero(going & (tbt < np.inf))
        if len(timed):
            late, generated = deadlines.late[timed], table.generated[rows[timed]]
            most = table.max_tokens[rows[timed]]
            now = lengths.reach(generated, _shortest(late), most)
            after = lengths.reach(generated, _shortest(late + 1), most)
            attains[timed] = now
            loss[timed] = np.where(deadlines.waits[timed], 0.0, np.maximum(now - after, 0.0))
        # Where the longest gap is no longer than TBT, no later one may be late.
        strict = going & (longest < np.inf) & (longest <= tbt)
        loss[strict] = attains[strict]
        jobs = np.flatnonzero(jct < np.inf)
        if len(jobs):
            due[jobs] = np.minimum(due[jobs], jobs_due(view, rows[jobs], jct[jobs], pace))
            tight = due[jobs] - clock < PAUSE
            loss[jobs] = np.where(tight, np.maximum(loss[jobs], attains[jobs]), loss[jobs])
        return cls(due, deadlines.gap_due, longest, attains * worth, loss * worth, missed, bare)
