"""Statistics of the policy's own plans: step times, chunk lengths, frequency and duration of
preemptions (AccelGen section 4.3), and which requests have missed a target for good."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.sched.policy import View
from jaxserve.sched.row_columns import grow_columns

BATCHES = 32  # last batches; the longest of them is T_max
CHUNKS = 256  # last chunks, for L_c
ABSENCES = 64  # last absences; the longest of them is P_max
FORGET = 1 << 16  # tokens after which both counts of P are halved


class History:
    """Statistics of the policy's own plans. Times are in seconds; those of batches are predictions,
    since policies do not learn how long steps took.

    Attributes:
        passed: Requests that started since a late prompt did.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=BATCHES)
        self._chunks: deque[int] = deque(maxlen=CHUNKS)
        self._absences: deque[float] = deque(maxlen=ABSENCES)
        self._out: dict[int, tuple[int, float]] = {}  # by row: its request, since when
        self._last = np.zeros(0, np.int64)
        self._tokens = self._losses = 0
        self.passed = 0  # requests that have started since a late prompt did

    def longest(self, otherwise: float) -> float:
        """T_max, the longest of the last batches. otherwise: returned before the first."""
        return max(self._seconds, default=otherwise)

    def chunk(self, otherwise: int) -> float:
        """L_c, the mean length of the chunk that a prompt token is in, over recently cut prompts
        without their last pieces, so that the few tokens that fill up a batch hardly count.
        otherwise: returned before the first."""
        if not self._chunks:
            return float(otherwise)
        return sum(tokens**2 for tokens in self._chunks) / sum(self._chunks)

    @property
    def loss(self) -> float:
        """P_max P: the longest recent absence of a preempted request, times preemptions per
        token."""
        if not self._tokens:
            return 0.0
        return self.absence * self._losses / self._tokens

    @property
    def absence(self) -> float:
        """P_max: the longest recent absence of a preempted request, seconds."""
        return max(self._absences, default=0.0)

    def in_flight(self, view: View) -> float:
        """Total seconds of the step on the device; 0 if it brings no token."""
        rows, table = self._last, view.table
        flying = np.count_nonzero(table.generated[rows] > table.received[rows])
        return self._seconds[-1] if flying else 0.0

    def note_batch(
        self, view: View, rows: np.ndarray, end: np.ndarray, tokens: np.ndarray, seconds: float
    ) -> None:
        """Notes a planned batch.

        Args:
            view: What the policy sees.
            rows: int64 [n].
            end: int64 [n], tokens cached after it.
            tokens: int64 [n], tokens computed in it.
            seconds: How long it is predicted to take.
        """
        table = view.table
        cut = end < table.prompt_len[rows] + table.generated[rows]
        self._chunks.extend(tokens[cut].tolist())
        self._tokens += int(np.count_nonzero(~cut))
        self._last = rows
        if len(rows):
            self._seconds.append(seconds)
        if self._tokens > FORGET:
            self._tokens, self._losses = self._tokens // 2, self._losses // 2

    def note_late(self, late: np.ndarray, started: np.ndarray) -> None:
        """late: rows of late prompts that wait to start. started: rows that start now."""
        waits = len(late) and not np.isin(late, started).any()
        self.passed = self.passed + len(started) if waits else 0

    def note_absences(
        self, view: View, lost: Iterable[int], back: np.ndarray, clock: float
    ) -> None:
        """Notes which requests lose their caches, and which have come back.

        Args:
            view: What the policy sees.
            lost: Rows preempted now.
            back: Rows of the batch.
            clock: Seconds.
        """
        seq = view.table.seq
        for row in self._out.keys() & set(back.tolist()) if self._out else ():
            whose, since = self._out.pop(row)
            if whose == seq[row]:
                self._absences.append(clock - since)
        for row in lost:
            self._out[row] = (int(seq[row]), clock)
            self._losses += 1


class Missed:
    """By row, the request (its order of arrival) that missed a target."""

    def __init__(self) -> None:
        self._seq = np.zeros(0, np.int64)

    def read(self, view: View, rows: np.ndarray, clock: float) -> np.ndarray:
        """Which requests have missed a target, bool [n]: the first token or the job is too late, or
        the cache was lost between two tokens with a TBT target. Called in every plan, since the
        table does not keep when first tokens came. clock: the earliest time of the next token.
        """
        table = view.table
        grow_columns(self, table.capacity, _seq=NOBODY)
        age = clock - table.arrival[rows]
        missed = (table.received[rows] == 0) & (age > table.ttft[rows])
        missed |= age > table.jct[rows]
        between = (table.preemptions[rows] > 0) & (table.generated[rows] > 0)
        missed |= between & (table.tbt[rows] < np.inf)
        gone = rows[missed]
        self._seq[gone] = table.seq[gone]
        return np.asarray(self._seq[rows] == table.seq[rows])
