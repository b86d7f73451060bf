"""Accounting of the one block pool: which request owns which block, in ids, not arrays.

A block holds K, or V, or hidden vectors of up to `block_size` tokens for all layers (Apt-Serve
section 4.3). It may have two owners, one filling it from the left and one from the right (BROS
section 5), or many readers when it is a full, shared prefix block.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.kinds import PLANES, CacheKind, Direction

NOBODY = -1
_PLANES = np.asarray(PLANES)


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was allocated."""


class BlockPool:
    """Blocks of `max_owners` rows. tables: int32 [max_owners, 2, width]; [row, 0] are the row's K
    (or hidden) blocks in order, [row, 1] its V blocks; entries past `held[row]` are stale."""

    def __init__(self, num_blocks: int, block_size: int, max_owners: int, width: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.width = width
        self.tables = np.zeros((max_owners, 2, width), np.int32)
        self.held = np.zeros(max_owners, np.int64)  # blocks per plane
        self.kind = np.zeros(max_owners, np.int8)
        self.direction = np.zeros(max_owners, np.int8)
        self.owners = np.full((num_blocks, 2), NOBODY, np.int32)  # [:, Direction]
        self.refs = np.zeros(num_blocks, np.int32)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # free: [:_top]
        self._top = num_blocks

    @property
    def num_free(self) -> int:
        return self._top

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds with K and V."""
        return self.num_blocks // CacheKind.KV.planes * self.block_size

    def needed(self, rows: np.ndarray, tokens: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Free blocks each row needs to hold `tokens` tokens in `kinds`, given what it holds now;
        a hidden cache that is to be KV takes a V block for each of its blocks besides."""
        held = self.held[rows]
        new = np.maximum(-(-tokens // self.block_size) - held, 0) * _PLANES[kinds]
        hidden = self.kind[rows] == CacheKind.HIDDEN
        if np.count_nonzero(hidden):
            new += held * (hidden & (kinds == CacheKind.KV))
        return new

    def returned_by(self, row: int) -> int:
        """Blocks that `release(row)` would free: those that nobody else holds."""
        ids = self.tables[row, : PLANES[self.kind[row]], : self.held[row]]
        return int((self.refs[ids] == 1).sum())

    def open(self, row: int, kind: CacheKind, direction: Direction = Direction.LEFT) -> None:
        """Starts an empty cache for the row. ValueError if it has one."""
        if self.held[row]:
            raise ValueError(f"row {row} still holds blocks")
        self.kind[row] = kind
        self.direction[row] = direction

    def grow(self, row: int, tokens: int) -> None:
        """Makes room for `tokens` tokens in all. OutOfBlocks leaves the pool as it was."""
        self.grow_all(np.array([row]), np.array([tokens]))

    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Makes room for tokens[i] tokens in all in each of the rows, which are different.
        OutOfBlocks or ValueError leave the pool as it was."""
        want = -(-tokens // self.block_size)
        short = want > self.held[rows]
        if not short.any():
            return
        rows, want = rows[short], want[short]
        if (want > self.width).any():
            worst = int(np.argmax(want))
            raise ValueError(
                f"row {rows[worst]}: {tokens[short][worst]} tokens need {want[worst]} blocks, "
                f"limit {self.width}"
            )
        have, planes = self.held[rows], _PLANES[self.kind[rows]]
        counts = (want - have) * planes
        total = int(counts.sum())
        if total > self._top:
            raise OutOfBlocks(f"{total} blocks wanted, {self._top} free")
        ids = self._pop(total)
        owner = np.repeat(rows, counts)
        each = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        of = np.repeat(planes, counts)
        self.tables[owner, each % of, np.repeat(have, counts) + each // of] = ids
        self.owners[ids, self.direction[owner]] = owner
        self.refs[ids] += 1
        self.held[rows] = want

    def widen(self, rows: np.ndarray) -> None:
        """Makes KV caches of the hidden ones of these rows, which are different: their blocks
        become K blocks, and each row gets as many V blocks. OutOfBlocks or ValueError leave the
        pool as it was."""
        counts = self._widened(rows)
        ids = self._pop(int(counts.sum()))
        owner = np.repeat(rows, counts)
        index = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.tables[owner, 1, index] = ids
        self.owners[ids, self.direction[owner]] = owner
        self.refs[ids] += 1
        self.kind[rows] = CacheKind.KV

    def _widened(self, rows: np.ndarray) -> np.ndarray:
        """V blocks that each row takes when it is widened, once all of them may be."""
        for row in rows[self.kind[rows] != CacheKind.HIDDEN].tolist():
            raise ValueError(f"row {row} has no hidden cache")
        for row in rows.tolist():
            ids = self.tables[row, 0, : self.held[row]]
            if (self.refs[ids] != 1).any() or (self.owners[ids, self.direction[row]] != row).any():
                raise ValueError(f"row {row} shares blocks; they cannot be written to")
        counts = self.held[rows]
        if counts.sum() > self._top:
            raise OutOfBlocks(f"{counts.sum()} blocks wanted, {self._top} free")
        return counts

    def _pop(self, total: int) -> np.ndarray:
        """That many free blocks, the caller's now."""
        ids = self._stack[self._top - total : self._top][::-1].copy()
        self._top -= total
        return ids

    def join(self, row: int, blocks: tuple[int, ...]) -> None:
        """Extends the row by one block a plane in which the other end belongs to somebody else
        (BROS section 5). ValueError if this row's end is taken or the block is free or shared."""
        planes, side = PLANES[self.kind[row]], self.direction[row]
        if len(blocks) != planes or len(set(blocks)) != planes:
            raise ValueError(f"row {row} takes {planes} different blocks, got {blocks}")
        for block in blocks:
            if self.owners[block, side] != NOBODY or self.owners[block, 1 - side] == NOBODY:
                raise ValueError(f"block {block} has no free end for row {row}")
        for plane, block in enumerate(blocks):
            self._take(block, row, plane, int(self.held[row]))
        self.held[row] += 1

    def share(self, source: int, row: int, blocks: int) -> None:
        """Lets `row`, which must be empty, read the first `blocks` full blocks of `source`.
        Shared blocks have no owner: nobody writes to them."""
        if self.held[row]:
            raise ValueError(f"row {row} still holds blocks")
        if blocks > self.held[source]:
            raise ValueError(f"row {source} holds {self.held[source]} blocks, not {blocks}")
        planes = PLANES[self.kind[source]]
        ids = self.tables[source, :planes, :blocks]
        other_end = self.owners[ids, 1 - self.direction[source]]
        if (other_end != NOBODY).any():
            raise ValueError(f"row {source} shares a block's other end; it cannot be a prefix")
        self.kind[row], self.direction[row] = self.kind[source], self.direction[source]
        self.tables[row, :planes, :blocks] = ids
        self.refs[ids] += 1
        self.owners[ids] = NOBODY
        self.held[row] = blocks

    def release(self, row: int) -> None:
        """Gives back all that the row holds; blocks that others still read or fill stay."""
        planes, side = PLANES[self.kind[row]], self.direction[row]
        ids = self.tables[row, :planes, : self.held[row]].ravel()
        self.refs[ids] -= 1
        own = ids[self.owners[ids, side] == row]
        self.owners[own, side] = NOBODY
        free = ids[self.refs[ids] == 0]
        self._stack[self._top : self._top + len(free)] = free
        self._top += len(free)
        self.held[row] = 0

    def _take(self, block: int, row: int, plane: int, index: int) -> None:
        self.tables[row, plane, index] = block
        self.owners[block, self.direction[row]] = row
        self.refs[block] += 1

    def check(self) -> None:
        """AssertionError if a slot is owned twice, a block leaked, or a count is wrong."""
        refs = np.zeros(self.num_blocks, np.int64)
        for row in np.flatnonzero(self.held):
            ids = self.tables[row, : PLANES[self.kind[row]], : self.held[row]].ravel()
            assert len(set(ids.tolist())) == ids.size, f"row {row} holds a block twice"
            side = self.direction[row]
            others = self.owners[ids, side]
            assert ((others == row) | (others == NOBODY)).all(), f"row {row} is in another's slots"
            refs[ids] += 1
        assert (refs == self.refs).all(), "reference counts differ from the tables"
        free = np.zeros(self.num_blocks, bool)
        free[self._stack[: self._top]] = True
        assert self._top == free.sum(), "a block is in the free stack twice"
        assert (free == (refs == 0)).all(), "a block leaked or is free while in use"
        for side in Direction:
            owned = np.flatnonzero(self.owners[:, side] != NOBODY)
            for block in owned:
                row = self.owners[block, side]
                held = self.tables[row, : PLANES[self.kind[row]], : self.held[row]]
                assert block in held, f"block {block} has an owner that does not hold it"
