"""What each request can still attain: when its next token is due, and the cost of a late one.

Of n gaps between tokens, floor((n - 1) / 100) may be late while the 99th percentile is in time. The
cost of a late gap is the probability that the output gets long enough for the late gaps so far,
less the probability that it gets long enough for one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.request import LEAST_MAX_TBT, MAX_TBT, Tier
from jaxserve.sched.state.output_lengths import ENOUGH, Survival
from jaxserve.sched.state.request_table import RUNNING

GAPS = 100  # gaps of which one may be late
PAUSE = 2.0  # seconds: a job that may wait longer loses nothing if it is paused
EVERY = 64  # plans between updates


class Lengths:
    """Output lengths, updated every EVERY plans."""

    def __init__(self) -> None:
        self._plans = 0
        self._survival: Survival | None = None

    def read(self, view: View) -> None:
        """Updates the lengths; called once per plan."""
        lengths = view.table.output_lengths
        if self._plans % EVERY == 0 and lengths.count >= ENOUGH:
            going = view.table.generated[view.table.in_state(RUNNING)]
            self._survival = Survival(*lengths.counted(), going)
        self._plans += 1

    def reach(self, generated: np.ndarray, tokens: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Probability that outputs get this long; 0 for further tokens before ENOUGH outputs have
        ended.

        Args:
            generated: int64 [n], tokens so far.
            tokens: int64 [n], the lengths in question.
            most: int64 [n], most tokens that each may write.

        Returns:
            float64 [n].
        """
        there = tokens <= np.maximum(generated, 1)
        if self._survival is None or there.all():
            return there.astype(np.float64)
        longer = self._survival.longer
        share = longer(tokens - 1.0) / np.maximum(longer(generated), 1e-9)
        return np.where(there, 1.0, np.where(tokens > most, 0.0, np.minimum(share, 1.0)))

    def ends(self, view: View, rows: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Probability that outputs end within so many further tokens, float64 [n]. rows: int64 [n].
        room: float64 [n]."""
        table = view.table
        longer = table.generated[rows] + room.astype(np.int64) + 1
        return 1.0 - self.reach(table.generated[rows], longer, table.max_tokens[rows])


Targets = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Standard:
    """Targets of real-time requests without their own, in seconds.

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
        """The requests' TTFT, TBT, JCT and longest gap, or the standard for requests without any,
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
    """The targets of n requests, and when their next tokens have to arrive; arrays [n].

    Attributes:
        ttft, tbt, jct, longest: float64, targets in seconds, the last one for the longest gap; inf
        for none.
        due: float64, seconds; inf if it does not matter.
        gap_due: float64, latest arrival even if it is late: the longest allowed gap; inf before the
        first token.
        first: bool, whether the next token is the first.
        waits: bool, whether it is a later one that is late already.
        late: int64, number of late gaps, including a late token that is still awaited.
        missed: bool, whether its targets cannot be attained, however long its output gets.
    """

    ttft: np.ndarray
    tbt: np.ndarray
    jct: np.ndarray
    longest: np.ndarray
    due: np.ndarray
    gap_due: np.ndarray
    first: np.ndarray
    waits: np.ndarray
    late: np.ndarray
    missed: np.ndarray

    @classmethod
    def of_rows(cls, view: View, rows: np.ndarray, standard: Standard, clock: float) -> Deadlines:
        """Reads the table.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            standard: Targets of requests without their own.
            clock: When the planned step begins, seconds. A token of the step in flight counts as
                received then.
        """
        table = view.table
        generated, arrival = table.generated[rows], table.arrival[rows]
        ttft, tbt, jct, longest = targets = standard.targets_of(view, rows)
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
        if late.any():  # an output of any length may have none
            missed |= (_shortest(late) > table.max_tokens[rows]) & (tbt < np.inf) & ~first
        return cls(*targets, due, gap_due, first, waits, late, missed)

    def leading(self, count: int) -> Deadlines:
        """The deadlines of the first so many of the requests."""
        return Deadlines(*(column[:count] for column in vars(self).values()))


def _shortest(late: np.ndarray) -> np.ndarray:
    """Least tokens of an output that may have this many late gaps, int64 [n]."""
    return np.where(late, GAPS * late + 2, 1)


def jobs_due(view: View, rows: np.ndarray, jct: np.ndarray, pace: float) -> np.ndarray:
    """When the next tokens of jobs have to arrive, so that the following ones can be in time.

    Args:
        view: What the policy sees.
        rows: int64 [n].
        jct: float64 [n], their targets, seconds; inf for none.
        pace: Recent seconds of a step.

    Returns:
        float64 [n], seconds; inf without a JCT.
    """
    rest = pace * np.maximum(view.table.tokens_ahead(rows) - 1.0, 0.0)
    return np.asarray(view.table.arrival[rows] + jct - rest)


@dataclass(frozen=True)
class Outlook:
    """The outlook of n requests; arrays float64 [n], or bool.

    Attributes:
        due: When the next token has to arrive, seconds; inf if it does not matter. For a job (JCT),
        so that the tokens after it can follow at the recent pace.
        gap_due: See `Deadlines`.
        longest: The longest allowed gap, seconds; inf for none.
        attains: Probability that the request attains its targets if no further token is late, 1
        without targets, 0 once that is impossible; times its worth.
        loss: Part of that which is lost if its next token is late; 0 if it is late already.
        missed: See `Deadlines`.
        bare: Whether it has no targets: a best-effort request that loses nothing.
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
            deadlines: Deadlines of these rows.
            worth: float64 [n], value of attaining each request's targets, more than 0.
            clock: When the planned step begins, seconds.
            lengths: Known output lengths.
            pace: Recent seconds of a step.
        """
        table, due, missed = view.table, deadlines.due, deadlines.missed
        ttft, tbt = deadlines.ttft, deadlines.tbt
        jct, longest = deadlines.jct, deadlines.longest
        bare = np.isinf(np.minimum(np.minimum(ttft, tbt), np.minimum(jct, longest)))
        going, paced = ~(missed | deadlines.first), tbt < np.inf
        attains = (~missed).astype(np.float64)
        loss = (~(missed | bare) & (deadlines.first | paced)).astype(np.float64)
        timed = (going & paced).nonzero()[0]
        if len(timed):
            late, generated = deadlines.late[timed], table.generated[rows[timed]]
            most = table.max_tokens[rows[timed]]
            now = lengths.reach(generated, _shortest(late), most)
            after = lengths.reach(generated, _shortest(late + 1), most)
            attains[timed] = now
            loss[timed] = np.where(deadlines.waits[timed], 0.0, np.maximum(now - after, 0.0))
        # If the longest gap is at most TBT, no further token may be late.
        strict = going & (longest < np.inf) & (longest <= tbt)
        np.copyto(loss, attains, where=strict)
        jobs = (jct < np.inf).nonzero()[0]
        if len(jobs):
            due[jobs] = np.minimum(due[jobs], jobs_due(view, rows[jobs], jct[jobs], pace))
            left = np.maximum(view.table.arrival[rows[jobs]] + jct[jobs] - clock, 0.0)
            if pace > 0:
                ends = lengths.ends(view, rows[jobs], left / pace)
                attains[jobs], loss[jobs] = attains[jobs] * ends, loss[jobs] * ends
            tight = due[jobs] - clock < PAUSE
            loss[jobs] = np.where(tight, np.maximum(loss[jobs], attains[jobs]), loss[jobs])
        return cls(due, deadlines.gap_due, longest, attains * worth, loss * worth, missed, bare)
