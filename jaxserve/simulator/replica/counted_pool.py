"""A block pool that only counts blocks, for simulations in which no policy asks for block ids."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.block_sizes import PLANES, blocks_a_plane
from jaxserve.sched.cache.cache_kinds import HIDDEN, KV, LEFT, NOBODY
from jaxserve.sched.cache.free_blocks import OutOfBlocks


class CountedPool(BlockPool):
    """A `BlockPool` whose blocks have no ids, for policies with `counts_blocks`. Its tables have no
    columns, and nothing is shared.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens of a block.
        max_owners: Rows that may hold blocks.
        width: Most blocks of a row in a plane.
    """

    def __init__(self, num_blocks: int, block_size: int, max_owners: int, width: int) -> None:
        super().__init__(num_blocks, block_size, max_owners, 0)
        self.width = width
        self._left = num_blocks
        self._nowhere = np.zeros((0, 2), np.int32)

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return self._left

    def private(self, rows: np.ndarray | int) -> np.ndarray:
        """See `BlockPool`: nothing is shared."""
        return self.blocks_held(rows)

    def blocks_of(self, row: int | np.integer) -> np.ndarray:
        """Not supported: raises ValueError."""
        raise ValueError("blocks are only counted here; a policy with counts_blocks asked for ids")

    def slots_of(self, row: int, first: int, end: int) -> np.ndarray:
        """The right number of slots, all NOBODY, int32 [planes * (end - first), 2]."""
        return self._some(int(PLANES[self.kind[row]]) * (end - first))

    def slots_of_all(self, *ranges: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """See `BlockPool`; all slots are NOBODY."""
        rows, first, end = ranges
        counts = PLANES[self.kind[rows]] * (end - first)
        return tuple(counts.tolist()), self._some(int(np.add.reduce(counts)))

    def _some(self, count: int) -> np.ndarray:
        if count > len(self._nowhere):
            self._nowhere = np.full((2 * count, 2), NOBODY, np.int32)
        return self._nowhere[:count]

    def project_to_kv(self, rows: np.ndarray) -> None:
        """See `BlockPool`."""
        for row in rows[self.kind[rows] != HIDDEN].tolist():
            raise ValueError(f"row {row} has no hidden cache")
        self._use(int(np.add.reduce(self.held[rows])))
        self.kind[rows] = KV

    def lose(self, row: int, first: int, end: int) -> None:
        """Does nothing: no other row writes to the slots."""

    def regain(self, row: int, first: int, end: int, computed: int) -> None:
        """Does nothing. See `lose`."""

    def truncate(self, row: int, tokens: int) -> None:
        """See `BlockPool`."""
        stay = min(int(self.held[row]), blocks_a_plane(tokens, self.block_size))
        self._left += int((self.held[row] - stay) * PLANES[self.kind[row]])
        self.held[row] = stay

    def release(self, row: int) -> None:
        """See `BlockPool`."""
        self._left += int(self.held[row] * PLANES[self.kind[row]])
        self.held[row] = 0
        self.kind[row], self.direction[row] = KV, LEFT

    def release_all(self, rows: np.ndarray) -> None:
        """See `BlockPool`. The rows must be distinct."""
        self._left += int(np.add.reduce(self.blocks_held(rows)))
        self.held[rows] = 0
        self.kind[rows], self.direction[rows] = KV, LEFT

    def _extend(self, rows: np.ndarray, have: np.ndarray, want: np.ndarray) -> None:
        self._use(int((want - have) @ PLANES[self.kind[rows]]))

    def _use(self, blocks: int) -> None:
        if blocks > self._left:
            raise OutOfBlocks(f"{blocks} blocks wanted, {self._left} free")
        self._left -= blocks
