"""Which block ids are free. Ids given back last are taken first, then ids never used."""

from __future__ import annotations

import numpy as np


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was allocated."""


class FreeBlocks:
    """The free ids among 0 to num_blocks - 1. Only ids that were ever used take memory, since a
    simulated pool may be practically unlimited.

    Attributes:
        num_blocks: Blocks of the pool.
        count: Free ids.
        fresh: Ids from this one on have never been used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.count = num_blocks
        self.fresh = 0
        self._stack = np.zeros(0, np.int32)  # ids given back: [:_top]
        self._top = 0

    def pop(self, total: int) -> np.ndarray:
        """Takes that many ids, int32. OutOfBlocks changes nothing."""
        if total > self.count:
            raise OutOfBlocks(f"{total} blocks wanted, {self.count} free")
        self.count -= total
        again = min(total, self._top)
        ids = self._stack[self._top - again : self._top][::-1].copy()
        self._top -= again
        if again == total:
            return ids
        first, self.fresh = self.fresh, self.fresh + total - again
        return np.concatenate([ids, np.arange(first, self.fresh, dtype=np.int32)])

    def push(self, ids: np.ndarray) -> None:
        """Gives the ids back."""
        end = self._top + len(ids)
        if end > len(self._stack):
            self._stack = np.resize(self._stack, max(end, 2 * len(self._stack)))
        self._stack[self._top : end] = ids
        self._top = end
        self.count += len(ids)
