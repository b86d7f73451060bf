"""What a best-effort request whose blocks are shared has to copy and restore before it continues
(BROS section 5.2)."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES, slots_for
from jaxserve.sched.cache.cache_kinds import KV
from jaxserve.sched.policies.bros.packing import BrosWork
from jaxserve.sched.policy import View
from jaxserve.sched.restore_plan import plan_restore
from jaxserve.sched.state.request_table import RUNNING

LOOK = 16  # most requests with missing tokens that a plan considers, since each takes a while


class CacheRestore:
    """The blocks that rows copy and the segments that they restore before they continue."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._copy: dict[int, set[int]] = {}
        self._first: dict[int, np.ndarray] = {}

    def offers(self, rows: np.ndarray, left: np.ndarray, *, every_block: bool = False) -> BrosWork:
        """The work of best-effort rows, in order. Of the running ones with tokens on the host, only
        the first few and the earliest to arrive are included.

        Args:
            rows: int64 [n].
            left: int64 [blocks], tokens that each block has from the left. A row moves out of a
                block that cannot hold both sides.
            every_block: Whether to check this for all blocks of a row, not only for the one it is
                filling.
        """
        view, table = self.view, self.view.table
        missing = (table.state[rows] == RUNNING) & (view.host.tokens[rows] > 0)
        if np.count_nonzero(missing) > LOOK:
            those = np.flatnonzero(missing)
            earliest = np.argmin(table.seq[rows[those]])
            out = np.setdiff1d(those[LOOK:], those[earliest])
            rows, missing = np.delete(rows, out), np.delete(missing, out)
        runs = table.state[rows] == RUNNING
        for row in self._copy.keys() & set(rows.tolist()):
            del self._copy[row]
        start = table.computed[rows] + np.where(runs, 0, view.host.tokens[rows])
        loaded = slots_for(view.host.tokens[rows])
        for i, row in zip(np.flatnonzero(missing).tolist(), rows[missing].tolist(), strict=True):
            back = plan_restore(view, row, left)
            start[i], loaded[i] = back.computed, back.loaded
            self._first[row] = back.first
            self._leave(row, back.copy)
        work = BrosWork.of_rows(view, rows, start)
        work.loaded = loaded
        self._leave_blocks(work, left, every_block)
        for i in np.flatnonzero(np.isin(rows, list(self._copy))).tolist():
            slots = self._slots(int(rows[i]))
            work.new[i] += PLANES[KV] * len(slots)
            work.copied[i] = slots.sum()
        return work

    def movers(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows that move out of blocks, each as an int64 [1]."""
        return [rows[i : i + 1] for i in np.flatnonzero(np.isin(rows, list(self._copy))).tolist()]

    def all_copies(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The blocks that these rows copy: rows and block numbers, int64 [k]."""
        if not self._copy:
            return _listed([])
        return _listed([(row, self._copies(row)) for row in rows.tolist() if row in self._copy])

    def all_restores(self, work: BrosWork) -> tuple[np.ndarray, np.ndarray]:
        """The segments that these rows restore: rows and first tokens, int64 [k]."""
        back = work.rows[work.loaded > 0]
        return _listed([(row, self._restores(row)) for row in back.tolist()])

    def _restores(self, row: int) -> np.ndarray:
        if row in self._first:
            return self._first[row]
        return np.array([segment.first for segment in self.view.host.segments(row)], np.int64)

    def _leave_blocks(self, work: BrosWork, left: np.ndarray, every: bool) -> None:
        """Moves rows out of blocks that can no longer hold both owners' tokens. every: check all
        blocks of a row, not only the one it is filling."""
        pool, size = self.view.pool, self.view.pool.block_size
        index = self.view.table.computed[work.rows] // size
        first = np.where(every, 0, index)
        last = np.where(work.starts, 0, np.minimum(index + 1, pool.held[work.rows]))
        count = np.maximum(last - first, 0)
        rows = np.repeat(work.rows, count)
        each = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        at = np.repeat(first, count) + each
        end = np.repeat(work.start + work.tokens, count)
        taken = left[pool.tables[rows, :, at]] + np.minimum(end - at * size, size)[:, None]
        for i in np.flatnonzero((taken > size).any(axis=1)).tolist():
            self._leave(int(rows[i]), at[i : i + 1])

    def _leave(self, row: int, index: np.ndarray) -> None:
        """Notes that the row cannot stay in its blocks of these indices."""
        if len(index):
            self._copy.setdefault(row, set()).update(index.tolist())

    def _copies(self, row: int) -> np.ndarray:
        """Indices of the row's blocks that it moves out of, int64 [k]."""
        return np.array(sorted(self._copy.get(row, ())), np.int64)

    def _slots(self, row: int) -> np.ndarray:
        """Slots that the row still has in each of the blocks that it leaves, int64 [k]."""
        pool, index = self.view.pool, self._copies(row)
        cached = self.view.table.computed[row] - index * pool.block_size
        return np.asarray(slots_for(np.clip(cached, 0, pool.cap[row, index])))


def _listed(parts: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    nothing = np.zeros(0, np.int64)
    numbers = np.concatenate([nothing, *(found for _, found in parts)])
    rows = np.array([row for row, _ in parts], np.int64)
    return np.repeat(rows, [len(found) for _, found in parts]), numbers
