"""The rule against starvation: requests that have had no service for some seconds come first, in
order of arrival, on a share of memory and rows, and keep their place to their end."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policy import View
from jaxserve.sched.row_columns import grow_columns


class Patience:
    """The requests that have waited for too long.

    Args:
        seconds: Seconds without service.
        share: Share of memory and rows for requests that have waited. One of them is always served.
    """

    def __init__(self, seconds: float, share: float) -> None:
        self._seconds, self._share = seconds, share
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
        kept = rows[self._kept[rows]]
        late = rows[~self._kept[rows] & (clock - self._served[rows] > self._seconds)]
        self._kept[:] = False
        if not (len(kept) or len(late)):
            return self._kept
        if len(late):
            late = late[np.argsort(table.seq[late], kind="stable")]
            kept = np.concatenate([kept, late[: self._admitted(view, kept, late)]])
        kept = kept[np.argsort(table.seq[kept], kind="stable")]
        # Outputs grow: what was a share may exceed the pool.
        kept = kept[: prefix(np.cumsum(_blocks(view, kept)) <= view.pool.num_blocks)]
        self._kept[kept] = True
        return self._kept

    def starved(self, rows: np.ndarray, clock: float) -> np.ndarray:
        """Which of these rows have had no service for twice as long, bool [n]."""
        return np.asarray(clock - self._served[rows] > 2 * self._seconds)

    def note_batch(self, rows: np.ndarray, writes: np.ndarray, clock: float) -> None:
        """These rows are in the batch that begins at `clock`. writes: bool [n], which get a
        token."""
        self._served[rows] = clock
        self._wrote[rows[writes]] = clock

    def note_paused(self, rows: list[int]) -> None:
        """These rows are paused, so their service since the last token was for nothing."""
        if rows:
            self._served[rows] = self._wrote[rows]

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
