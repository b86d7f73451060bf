"""The rule against starvation: requests that have had no service for some seconds come first, in
order of arrival, on a share of memory and rows, and keep their place to their end. Others follow
once those before them have taken no more than a share of the time."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policy import View
from jaxserve.sched.row_columns import grow_columns

TIME = 0.01  # share of the time for those that come first


class Patience:
    """The requests that have waited for too long.

    Args:
        seconds: Seconds without service. They begin when a target for the first token or the end
        lapses: until then, waiting is what was asked for.
        share: Share of memory and rows for requests that have waited. One of them is always served.
    """

    def __init__(self, seconds: float, share: float) -> None:
        self._seconds, self._share = seconds, share
        self._credit, self._clock, self._spent = 0.0, math.inf, 0.0
        self._seq = np.zeros(0, np.int64)  # by row: the request that the other arrays belong to
        self._served = np.zeros(0)  # when it was last in a batch, or came
        self._wrote = np.zeros(0)  # when it was last in a batch that gave it a token
        self._kept = np.zeros(0, bool)

    def read(self, view: View, rows: np.ndarray, clock: float) -> np.ndarray:
        """Updates the requests that come first; called once per plan.

        Args:
            view: What the policy sees.
            rows: int64 [n], all requests.
            clock: When the planned step begins, seconds.

        Returns:
            By row, which requests come first and keep their caches, bool [capacity]. The pool can
            hold all of them at the same time.
        """
        table = view.table
        grow_columns(self, table.capacity, _seq=NOBODY, _served=0.0, _wrote=0.0, _kept=False)
        new = rows[self._seq[rows] != table.seq[rows]]
        self._seq[new], self._kept[new] = table.seq[new], False
        self._served[new] = self._wrote[new] = table.arrival[new]
        self._charge(view, rows, clock)
        kept = rows[self._kept[rows]]
        late = rows[~self._kept[rows] & (clock - self._served[rows] > self._seconds)]
        late = late[self._waited(view, late, clock) > self._seconds]
        self._kept[:] = False
        if not (len(kept) or len(late)):
            return self._kept
        if len(late) and self._credit >= 0:
            late = late[np.argsort(table.seq[late], kind="stable")]
            kept = np.concatenate([kept, late[: self._admitted(view, kept, late)]])
        kept = kept[np.argsort(table.seq[kept], kind="stable")]
        # Outputs grow: what was a share may exceed the pool.
        kept = kept[: prefix(np.cumsum(_blocks(view, kept)) <= view.pool.num_blocks)]
        self._kept[kept] = True
        return self._kept

    def starved(self, view: View, rows: np.ndarray, clock: float) -> np.ndarray:
        """Which of these rows come first, and have waited for twice as long, bool [n]."""
        found = self._kept[rows]
        found[found] = self._waited(view, rows[found], clock) > 2 * self._seconds
        return found

    def _waited(self, view: View, rows: np.ndarray, clock: float) -> np.ndarray:
        """Seconds without service since a target for what comes next has lapsed, float64 [n]."""
        table = view.table
        ttft = np.where(table.generated[rows] > 0, np.inf, table.ttft[rows])
        own = np.minimum(ttft, table.jct[rows])
        lapsed = table.arrival[rows] + np.where(own < np.inf, own, 0.0)
        return np.asarray(clock - np.maximum(self._served[rows], lapsed))

    def note_batch(self, rows: np.ndarray, writes: np.ndarray, clock: float) -> None:
        """These rows are in the batch that begins at `clock`. writes: bool [n], which get a
        token."""
        self._served[rows] = clock
        self._wrote[rows[writes]] = clock

    def spend(self, seconds: float) -> None:
        """Notes that requests that come first add so many seconds to the planned step."""
        self._spent += seconds

    def note_paused(self, rows: list[int]) -> None:
        """These rows are paused, so their service since the last token was for nothing."""
        if rows:
            self._served[rows] = self._wrote[rows]

    def _charge(self, view: View, rows: np.ndarray, clock: float) -> None:
        """Those that come first pay for their time, or for the part of the memory that they hold
        in the meantime if that is more."""
        passed = max(clock - self._clock, 0.0)
        kept = rows[self._kept[rows]]
        held = float(view.pool.private(kept).sum()) / view.pool.num_blocks if len(kept) else 0.0
        spent = max(self._spent, passed * held)
        most = self._seconds * TIME
        self._credit = min(self._credit + TIME * passed - spent, most)
        self._clock, self._spent = clock, 0.0

    def _admitted(self, view: View, kept: np.ndarray, late: np.ndarray) -> int:
        """How many of the late rows, in order, fit in the share."""
        rows = np.concatenate([kept, late])
        fits = np.cumsum(_blocks(view, rows)) <= self._share * view.pool.num_blocks
        fits &= np.arange(1, len(rows) + 1) <= max(self._share * view.limits.max_rows, 1)
        fits[0] = True
        return int(np.count_nonzero(np.logical_and.accumulate(fits)[len(kept) :]))


def _blocks(view: View, rows: np.ndarray) -> np.ndarray:
    """Blocks that each row takes for all its known tokens, int64 [n]."""
    known = view.table.prompt_len[rows] + view.table.generated[rows]
    return np.asarray(view.pool.blocks_for(known, view.pool.kind[rows].astype(np.int64)))
