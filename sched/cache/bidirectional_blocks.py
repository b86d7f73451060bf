"""Which blocks are free, and who fills the others, from which end.

A block has two ends, and each may have an owner (BROS section 5.1); a full, shared prefix block has
readers and no owner.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.free_blocks import FreeBlocks
from jaxserve.sched.row_columns import grow_columns

NOBODY = -1
_FIRST_BLOCKS = 1024


class BlockEnds:
    """Of blocks that have been out: owners, at: int32 [blocks, 2], [:, Direction]: the row that
    fills the block from there, or NOBODY, and which of that row's blocks it is; stale without an
    owner. refs: int32 [blocks], rows that hold it. num_shared: blocks that several hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners = np.zeros((0, 2), np.int32)
        self.at = np.zeros((0, 2), np.int32)
        self.refs = np.zeros(0, np.int32)
        self.num_shared = 0
        self._free = FreeBlocks(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that an allocation may take. Blocks that are cached for nobody in particular, and
        evicted when they are wanted, would count here, too."""
        return self._free.count

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds; one with two holders counts once."""
        return self.num_blocks - self.num_free

    @property
    def shares(self) -> bool:
        """Whether any block has two holders."""
        return self.num_shared > 0

    def both_ends(self) -> np.ndarray:
        """Blocks that two rows fill: ids [n]."""
        if not self.num_shared:
            return np.zeros(0, np.int64)
        return np.flatnonzero((self.owners != NOBODY).all(axis=1))

    def _hold(self, ids: np.ndarray, row: int, side: int, at: np.ndarray) -> None:
        """The row fills these blocks, which somebody else holds, from that side, too."""
        self.owners[ids, side] = row
        self.at[ids, side] = at
        self._share(ids)

    def _share(self, ids: np.ndarray) -> None:
        """One row more holds these blocks, which somebody holds already."""
        self.num_shared += int(np.count_nonzero(self.refs[ids] == 1))
        self.refs[ids] += 1

    def _let_go(self, ids: np.ndarray, row: int, side: int) -> None:
        """The row, which fills from that side, no longer holds these blocks."""
        if not self.num_shared:
            self.refs[ids], self.owners[ids, side] = 0, NOBODY
            self._free.push(ids)
            return
        refs = self.refs[ids] - 1
        self.refs[ids] = refs
        self.num_shared -= int(np.count_nonzero(refs == 1))
        self.owners[ids[self.owners[ids, side] == row], side] = NOBODY
        self._free.push(ids[refs == 0])

    def _take(self, rows: np.ndarray, sides: np.ndarray, at: np.ndarray) -> np.ndarray:
        """A free block for each of these rows, as often as it is named, now its own: number at[i]
        of its blocks, which it fills from sides[i]. OutOfBlocks."""
        ids = self._free.pop(len(rows))
        more = self._free.fresh - len(self.refs)
        if more > 0:
            more = max(more, len(self.refs), _FIRST_BLOCKS)
            grow_columns(self, len(self.refs) + more, owners=NOBODY, at=0, refs=0)
        self.owners[ids, sides] = rows
        self.at[ids, sides] = at
        self.refs[ids] = 1
        return ids
