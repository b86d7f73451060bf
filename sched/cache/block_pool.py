"""Accounting of the block pool: which request owns which block, by id; it holds no arrays.

A block holds K, or V, or hidden vectors of up to `block_size` tokens for all layers (Apt-Serve
section 4.3). It may have two owners, one filling it from the left and one from the right (BROS
section 5), or many readers when it is a full, shared prefix block.

How many blocks a token takes is decided only here and in `block_sizes.py`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES, blocks_a_plane, blocks_for, tokens_in
from jaxserve.sched.cache.cache_kinds import HIDDEN, KV, LEFT, NOBODY, RIGHT, CacheKind, Direction
from jaxserve.sched.cache.free_blocks import FreeBlocks
from jaxserve.sched.cache.pages import BesidePage, Page
from jaxserve.sched.cache.prefix_cache import PrefixCache
from jaxserve.sched.row_columns import grow_columns

_FIRST_BLOCKS = 1024


class BlockPool:
    """The block allocator: which of `max_owners` rows holds which of `num_blocks` blocks.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        max_owners: Rows of the request table.
        width: Most blocks of a row in one plane.
        cache: Prefix cache that knows full blocks, so that they are reused; None for no reuse.

    Attributes:
        tables: int32 [max_owners, 2, width]; [row, 0] are the row's K (or hidden) blocks in order,
            [row, 1] its V blocks. Entries past `held[row]` are stale.
        held: int64 [max_owners], blocks per plane.
        kind, direction: int8 [max_owners] of `CacheKind` and `Direction`. Rows without a cache have
            KV and LEFT; a waiting row has the kind of the prefix that it would find.
        cap: int16 [max_owners, width], most tokens that each of a row's blocks has on the device:
            block_size, or fewer if its last tokens are on the host (BROS section 5.2).
        owners: int32 [blocks, 2], for all blocks used so far: [:, Direction] is the row that fills
            the block from that side, or NOBODY.
        at: int32 [blocks, 2], index of the block among the owner's blocks; stale without an owner.
        mirrored: int64 [max_owners], for a copier of the tables: leading blocks per plane of a
            row's table that are up to date in the copy. Only the copier raises it.
        refs: int32 [blocks], number of rows that hold the block.
        num_shared: Blocks that several rows hold.
        states: int32 [max_owners, 2, blocks], the blocks of each row's state before and behind a
            step, see `StatePool`; None for none.
        groups: The groups of layers that keep less than all K and V, see `GroupedPool`; None for
            none.
    """

    groups: Any = None
    states: np.ndarray | None = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_owners: int,
        width: int,
        cache: PrefixCache | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self.width = num_blocks, block_size, width
        self.cache = cache
        self.tables = np.zeros((max_owners, 2, width), np.int32)
        self.cap = np.full((max_owners, width), block_size, np.int16)
        self.held = np.zeros(max_owners, np.int64)
        self._private = np.zeros(max_owners, np.int64)
        self.mirrored = np.zeros(max_owners, np.int64)
        self.kind = np.zeros(max_owners, np.int8)
        self.direction = np.zeros(max_owners, np.int8)
        self.owners = np.zeros((0, 2), np.int32)
        self.at = np.zeros((0, 2), np.int32)
        self.refs = np.zeros(0, np.int32)
        self._rows = np.zeros(0, np.int64)  # by block: sum of its holders, so the last is known
        self.num_shared = 0
        self._free = FreeBlocks(num_blocks)
        self._hidden = False  # whether any row has ever had a hidden cache
        self._reading = np.zeros(max_owners, np.int64)  # by row, see `_read`
        self._kept = np.zeros(max_owners, np.int64)  # those of `_reading` that are kept
        self._stale = False  # whether a block has become shared, or stopped being shared

    @property
    def num_free(self) -> int:
        """Blocks that an allocation may take, including cached blocks that nobody reads."""
        if self.cache is None:
            return self._free.count
        return self._free.count + self.cache.num_unread - self.cache.retention.kept

    @property
    def num_free_kv(self) -> int:
        """Free blocks as so many of the group without a window, for predictions."""
        return self.num_free

    @property
    def num_used(self) -> int:
        """Blocks in use; a shared one counts once."""
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

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool has room for as K and V."""
        return tokens_in(self.num_blocks, self.block_size)

    def as_tokens(self, blocks: Any) -> Any:
        """Tokens whose K and V would fit into this many blocks; numbers or arrays. A measure of
        memory that does not depend on the kind of cache."""
        return blocks * self.block_size // int(PLANES[KV])

    def blocks_for(self, tokens: Any, kind: Any = CacheKind.KV) -> Any:
        """Blocks that a cache of this many tokens takes; numbers or arrays."""
        return blocks_for(tokens, self.block_size, kind)

    def blocks_held(self, rows: np.ndarray | int) -> np.ndarray:
        """Blocks that each row holds in all planes, shared ones included; one row or several."""
        return np.asarray(self.held[rows] * PLANES[self.kind[rows]])

    def private(self, rows: np.ndarray | int) -> np.ndarray:
        """Blocks that only the row holds: they would become free if it alone were released. One row
        or several."""
        return np.asarray(self._private[rows])

    def sharing(self, rows: np.ndarray) -> np.ndarray:
        """Which rows hold a block that another row holds, too, or would if it started, bool [n]."""
        return np.asarray(self.private(rows) < self.blocks_held(rows)) | self.is_found(rows)

    def is_found(self, rows: np.ndarray) -> np.ndarray:
        """Which rows hold a block that a waiting row would find, bool [n]."""
        if self.cache is None or not len(self.cache):
            return np.zeros(len(rows), bool)
        return np.isin(self.tables[rows, 0, 0], self.cache.first_found())

    def room(self, rows: np.ndarray) -> np.ndarray:
        """Cache tokens for which each row has blocks, int64 [n]."""
        return np.asarray((self.held[rows] + self._read(rows)) * self.block_size)

    def blocks_of(self, row: int | np.integer) -> np.ndarray:
        """The row's block ids, int32 [planes, held]: of K and V, or of hidden vectors."""
        return self.tables[row, : PLANES[self.kind[row]], : self.held[row]]

    def planes_of(self, row: int) -> list[tuple[int, np.ndarray]]:
        """All blocks that the row holds, of each group of layers and plane: the number of the first
        one, and the ids."""
        return [(0, ids) for ids in self.blocks_of(row)]

    def needed(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        kinds: np.ndarray,
        held: np.ndarray | None = None,
        kind: np.ndarray | None = None,
    ) -> np.ndarray:
        """Free blocks that each row needs to hold `tokens` tokens, beyond those that it has. A
        hidden cache that is to be KV also takes a V block for each of its blocks.

        Args:
            rows: int64 [n].
            tokens: int64 [n], cache tokens to have room for in all.
            kinds: int64 [n], `CacheKind` that each cache is to have.
            held: By row, in place of the pool's own, to ask about the state after some operations.
            kind: By row, in place of the pool's own.

        Returns:
            int64 [n].
        """
        have = self.held[rows] + self._read(rows) if held is None else held[rows]
        new = np.maximum(blocks_a_plane(tokens, self.block_size) - have, 0) * PLANES[kinds]
        if self._hidden:
            hidden = (self.kind if kind is None else kind)[rows] == HIDDEN
            new += have * (hidden & (kinds == KV))
        return np.asarray(new)

    def finds_kept(self, rows: np.ndarray) -> np.ndarray:
        """Which waiting rows find pages that are kept for their programs (`Retention.keeps`), bool
        [n]."""
        self._read(rows)
        return np.asarray(self._kept[rows] > 0)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        """Blocks per plane that each row would find if it started, and that take no free blocks,
        int64 [n]: those with several readers, and kept ones, which do not count as free. A block
        that a single row reads counts as free, since that row may be preempted."""
        cache = self.cache
        if cache is None:
            return np.zeros(len(rows), np.int64)
        cache.settle()
        if self._stale or cache.moved:
            moved = [*cache.moved]
            self._reading[moved] = self._kept[moved] = 0
            retention = cache.retention
            ends = cache.ends if self._stale else {c[-1] for c in map(cache.chain, moved) if c}
            for end in ends:
                rows_of = [*end.finders]
                # A row that reads a page reads all pages before it.
                chain = cache.chain(rows_of[0])
                several = bisect.bisect_left(chain, True, key=self._is_of_one)
                kept = sum(map(retention.keeps, chain[several:])) if retention.kept else 0
                self._reading[rows_of], self._kept[rows_of] = several + kept, kept
            self._stale = False
            cache.moved.clear()
        return np.asarray(self._reading[rows])

    def _is_of_one(self, page: Page) -> bool:
        return not page.ids or bool(self.refs[page.ids[0]] < 2)

    def slots_of(self, row: int, first: int, end: int) -> np.ndarray:
        """Where the row's cached tokens [first, end) are stored, plane by plane, int32 [planes *
        (end - first), 2]: (block, slot)."""
        index, offset = np.divmod(np.arange(first, end), self.block_size)
        if self.direction[row] == RIGHT:
            offset = self.block_size - 1 - offset
        blocks = self.blocks_of(row)[:, index]
        slots = np.broadcast_to(offset, blocks.shape)
        return np.stack([blocks, slots], axis=-1).reshape(-1, 2).astype(np.int32)

    def slots_of_all(self, *ranges: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """`slots_of` for rows, first and end, int64 [n] each: the number of each row, and all
        slots."""
        each = [self.slots_of(*one) for one in zip(*(c.tolist() for c in ranges), strict=True)]
        return tuple(map(len, each)), np.concatenate(each)

    def holders(self) -> tuple[np.ndarray, np.ndarray]:
        """Every used block once, and a row that holds it: ids and rows [num_used], by id."""
        holding = np.flatnonzero(self.held)
        planes = map(self.planes_of, holding.tolist())
        ids = [np.concatenate([ids for _, ids in each]) for each in planes]
        if not ids:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        rows = np.repeat(holding, [len(mine) for mine in ids])
        unique, first = np.unique(np.concatenate(ids), return_index=True)
        return unique, rows[first]

    def follow(self, rows: int) -> None:
        """Makes room for owners up to `rows`."""
        tables = np.zeros((rows, *self.tables.shape[1:]), np.int32)
        holding = np.flatnonzero(self.held)
        tables[holding] = self.tables[holding]  # pages of other owners are never touched
        self.tables = tables
        none = dict.fromkeys(("held", "_private", "_reading", "_kept", "mirrored"), 0)
        grow_columns(self, rows, cap=self.block_size, kind=KV, direction=LEFT, **none)

    def open_cache(self, row: int, kind: CacheKind, direction: Direction = Direction.LEFT) -> None:
        """Starts an empty cache for the row. ValueError if it already has one."""
        self.open_caches(np.array([row]), kind, direction)

    def open_caches(self, rows: np.ndarray, kinds: Any, directions: Any = LEFT) -> None:
        """Starts an empty cache for each of the rows; one kind and direction for all, or arrays
        [n]. ValueError if a row already has one."""
        if np.count_nonzero(self.held[rows]):
            raise ValueError(f"row {rows[self.held[rows] > 0][0]} still holds blocks")
        self.kind[rows], self.direction[rows] = kinds, directions
        self._hidden = self._hidden or bool(np.count_nonzero(kinds))

    def grow(self, row: int, tokens: int) -> None:
        """Makes room for `tokens` tokens in total. Raises the errors of `grow_all`."""
        self.grow_all(np.array([row]), np.array([tokens]))

    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Makes room for tokens[i] tokens in total in each of the rows, which are distinct.
        OutOfBlocks, or ValueError if a row would exceed the width of a table."""
        have, want = self.held[rows], blocks_a_plane(tokens, self.block_size)
        short = want > have
        if not (count := np.count_nonzero(short)):
            return
        if count < len(rows):
            rows, tokens, have, want = rows[short], tokens[short], have[short], want[short]
        if int(want.max()) > self.width:
            need = f"{tokens.max()} tokens need {want.max()} blocks, limit {self.width}"
            raise ValueError(f"row {rows[np.argmax(want)]}: {need}")
        self._extend(rows, have, want)
        self.held[rows] = want
        self._private[rows] += (want - have) * PLANES[self.kind[rows]]

    def reach(
        self,
        rows: np.ndarray,
        computed: np.ndarray,
        tokens: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> None:
        """Makes room in other groups of layers, once `grow_all` has made it in that with K and V.

        Args:
            rows: int64 [n], distinct.
            computed: int64 [n], cached tokens.
            tokens: int64 [n], tokens to have room for.
            drafts: int64 [n], how many of those are drafts; None for none.

        Raises:
            OutOfBlocks: There are too few free blocks.
        """

    def needed_to_draft(self, rows: np.ndarray) -> np.ndarray:
        """Free blocks that each row takes to draft, besides those for its tokens, int64 [n]."""
        return np.zeros(len(rows), np.int64)

    def settle(self, rows: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Notes how many drafts of each row were right. Returns the rows whose step is lost, since
        layers that keep a state have computed wrong drafts, too, and the cached tokens of each
        before it, from which it goes on; both int64 [m]."""
        return rows[:0], accepted[:0]

    def slide(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """Gives back blocks that nothing behind these cached tokens reads. Only once the step that
        computes them is launched: until then they are read."""

    def _extend(self, rows: np.ndarray, have: np.ndarray, want: np.ndarray) -> None:
        """Allocates blocks for rows that have `have` blocks per plane, up to `want`.
        OutOfBlocks."""
        kinds = self.kind[rows]
        if np.add.reduce(want - have) == len(rows) and not np.count_nonzero(kinds):
            two = np.repeat(rows, 2)  # one block of K and one of V each
            ids = self._take(two, self.direction[two], np.repeat(have, 2))
            self.tables[rows, 0, have], self.tables[rows, 1, have] = ids[::2], ids[1::2]
            return
        counts = (want - have) * (planes := PLANES[kinds])
        owner = np.repeat(rows, counts)
        each = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        of = np.repeat(planes, counts)
        at = np.repeat(have, counts) + each // of
        self.tables[owner, each % of, at] = self._take(owner, self.direction[owner], at)

    def project_to_kv(self, rows: np.ndarray) -> None:
        """Turns the hidden caches of these rows, which are distinct, into KV caches: their blocks
        become K blocks, and each row gets as many V blocks. OutOfBlocks, or ValueError if a row has
        no hidden cache or shares its blocks."""
        for row in rows.tolist():
            self.check_projects(row)
        counts = self.held[rows]
        owner = np.repeat(rows, counts)
        index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.forget(self.tables[owner, 0, index])
        self.tables[owner, 1, index] = self._take(owner, self.direction[owner], index)
        self._private[rows] += counts
        self.kind[rows] = KV
        self.mirrored[rows] = 0

    def check_projects(self, row: int, refs: np.ndarray | None = None) -> None:
        """ValueError if the row has no hidden cache of its own that could become K and V. refs:
        holders by block, in place of the pool's own, to ask about the state after some
        operations."""
        if self.kind[row] != HIDDEN:
            raise ValueError(f"row {row} has no hidden cache")
        if ((self.refs if refs is None else refs)[self.blocks_of(row)] != 1).any():
            raise ValueError(f"row {row} shares blocks; they cannot be written to")

    def join(self, row: int, blocks: np.ndarray) -> None:
        """Extends the row by blocks int [k, planes] whose other end another row fills (BROS section
        5). ValueError as in `check_join`."""
        kind, side = CacheKind(self.kind[row]), Direction(self.direction[row])
        blocks = self.check_join(row, blocks, kind, side, first := int(self.held[row]))
        self.forget(blocks.ravel())
        self.tables[row, : blocks.shape[1], first : first + len(blocks)] = blocks.T
        self.owners[blocks, side] = row
        self.at[blocks, side] = np.arange(first, first + len(blocks))[:, None]
        self._share(blocks, row)
        self.held[row] += len(blocks)

    def check_join(
        self,
        row: int,
        blocks: np.ndarray,
        kind: CacheKind,
        side: Direction,
        held: int,
        owners: np.ndarray | None = None,
    ) -> np.ndarray:
        """Checks that a row can join these blocks from its side.

        Args:
            row: For error messages.
            blocks: int [k, planes].
            kind: Kind of the row's cache.
            side: The end that the row fills.
            held: Blocks per plane that the row already has.
            owners: [blocks, 2], in place of the pool's own.

        Returns:
            The blocks as an array [k, planes].

        Raises:
            ValueError: The end of a block is taken, a block is free or a shared prefix, or the
                blocks are too many, not distinct or of another shape.
        """
        owners = self.owners if owners is None else owners
        planes, blocks = int(PLANES[kind]), np.asarray(blocks)
        if blocks.ndim != 2 or blocks.shape[1] != planes:
            raise ValueError(f"row {row} takes {planes} blocks at a time, got {blocks.tolist()}")
        if len(np.unique(blocks)) != blocks.size:
            raise ValueError(f"row {row} takes different blocks, got {blocks.tolist()}")
        if held + len(blocks) > self.width:
            raise ValueError(f"row {row}: {held + len(blocks)} blocks, limit {self.width}")
        for block in blocks.ravel().tolist():
            ends = owners[block] if 0 <= block < len(owners) else (NOBODY, NOBODY)
            if ends[side] != NOBODY or ends[1 - side] == NOBODY:
                raise ValueError(f"block {block} has no free end for row {row}")
        return blocks

    def share(self, row: int, pages: Sequence[Page], side: int = LEFT) -> None:
        """Lets `row`, which must be empty, read these pages in order; they were filled from that
        side. Blocks with several readers have no owner, so nobody writes to them. ValueError if the
        row holds blocks, or there are too many pages."""
        if self.held[row]:
            raise ValueError(f"row {row} still holds blocks")
        if len(pages) > self.width:
            raise ValueError(f"row {row}: {len(pages)} blocks, limit {self.width}")
        self.kind[row], self.direction[row] = pages[0].kind, side
        self._hidden = self._hidden or pages[0].kind == HIDDEN
        self._adopt(row, pages, 0, side, 0, self._private)
        self.held[row] = len(pages)

    def _adopt(
        self,
        row: int,
        pages: Sequence[Page],
        first: int,
        side: int,
        plane: int,
        own: np.ndarray,
    ) -> None:
        """Lets the row read pages.

        Args:
            row: The row.
            pages: Its blocks from number `first` on.
            first: See `pages`.
            side: The side from which they were filled.
            plane: The first plane that they are for.
            own: See `_share`.
        """
        assert self.cache is not None
        ids = np.array([page.ids for page in pages], np.int32).T
        for page in pages:
            self.cache.read(page, row)
        index = np.arange(first, first + len(pages))
        self.tables[row, plane : plane + len(ids), first : first + len(pages)] = ids
        alone = self.refs[ids] == 0
        self._share(ids.ravel(), row, own)
        self.owners[ids] = NOBODY
        self.owners[ids[alone], side] = row  # as if the row had filled them itself
        self.at[ids[alone], side] = np.broadcast_to(index, ids.shape)[alone]

    def register(self, row: int, index: int, *, swap: bool = True) -> bool:
        """Adds the row's full block of that index to the prefix cache, if its key is known.

        Args:
            row: The row.
            index: Index of the block.
            swap: Whether the row may give its block back if another block holds the same tokens,
            and read that one. Not allowed while a step is going to write to it.

        Returns:
            False if the same block, or the one before it, is known under another id.
        """
        cache = self.cache
        assert cache is not None
        kind = int(self.kind[row])
        if self.direction[row] != cache.side(row) or index >= min(
            cache.num_keys(row), int(self.held[row])
        ):
            return True
        if index:
            before = cache.page(row, index - 1, kind)
            if before is None or not before.ids:
                return True
            if before.ids[0] != self.tables[row, 0, index - 1]:
                return False
        page = cache.page(row, index, kind)
        mine = self.blocks_of(row)[:, index].copy()
        alone = bool((self.refs[mine] == 1).all())
        if page is None or not page.ids:
            if alone and self.cap[row, index] == self.block_size:
                cache.register(row, index, tuple(mine.tolist()), kind)
            return True
        if page.ids[0] == mine[0] or not alone:
            return True
        if swap:
            ids = np.array(page.ids, np.int32)
            unread = self.refs[ids] == 0
            cache.read(page, row)
            self._share(ids, row)
            self.owners[ids] = NOBODY
            self.owners[ids[unread], self.direction[row]] = row  # as if the row had filled them
            self.at[ids[unread], self.direction[row]] = index
            self.tables[row, : len(ids), index] = ids
            self.mirrored[row] = min(self.mirrored[row], index)
            self._let_go(mine, row, int(self.direction[row]))
        return swap

    def forget_all(self) -> None:
        """Forgets all known blocks; none will be found again."""
        assert self.cache is not None
        self._free.push(np.array(self.cache.clear(), np.int32))

    def forget(self, ids: np.ndarray) -> None:
        """Forgets these blocks, whose content is about to change or must not be found any more."""
        if self.cache is None:
            return
        for block in ids.tolist():
            page = self.cache.page_of(block)
            if page is not None:
                self._free.push(np.array(self.cache.forget(page), np.int32))

    def copy_all(self, rows: np.ndarray, index: np.ndarray, computed: np.ndarray) -> np.ndarray:
        """Gives each row a free block in place of one that it holds; other rows may keep the old
        block.

        Args:
            rows: int64 [n].
            index: int64 [n], index of the row's block to replace.
            computed: int64 by row, cached tokens.

        Returns:
            Copies to make, int32 [m, 4]: (source block, slot, target block, slot). No target block
            is also a source.

        Raises:
            OutOfBlocks: There are too few free blocks.
            ValueError: A row has no such block.
        """
        which = list(zip(rows.tolist(), index.tolist(), strict=True))
        for row, i in which:
            if not 0 <= i < self.held[row]:
                raise ValueError(f"row {row} holds {self.held[row]} blocks, none numbered {i}")
        old = [self.blocks_of(row)[:, i].copy() for row, i in which]
        counts = [len(ids) for ids in old]
        owner = np.repeat(rows, counts)
        taken = self._take(owner, self.direction[owner], np.repeat(index, counts))
        np.add.at(self._private, owner, 1)
        moved = [np.zeros((0, 4), np.int32)]
        new = np.split(taken, np.cumsum(counts)[:-1])
        for (row, i), before, after in zip(which, old, new, strict=True):
            first = i * self.block_size
            there = min(int(computed[row]) - first, int(self.cap[row, i]))
            source = self.slots_of(row, first, first + max(there, 0))
            self.tables[row, : len(before), i] = after
            self.mirrored[row] = min(self.mirrored[row], i)
            moved.append(np.hstack([source, self.slots_of(row, first, first + max(there, 0))]))
            self._let_go(before, row, int(self.direction[row]))
        return np.concatenate(moved)

    def filled(self, ids: np.ndarray, side: int, computed: np.ndarray) -> np.ndarray:
        """Tokens in each block that were filled by its owner on that side, int64 [n]; 0 without an
        owner. computed: int64 by row, cached tokens."""
        rows, at = self.owners[ids, side], self.at[ids, side]
        tokens = computed[rows] - at.astype(np.int64) * self.block_size
        there = np.minimum(tokens, self.cap[rows, at])
        return np.where(rows == NOBODY, 0, np.maximum(there, 0))

    def lose(self, row: int, first: int, end: int) -> None:
        """Marks the row's tokens [first, end) as missing; they are the last ones in their
        blocks."""
        index = np.arange(first // self.block_size, blocks_a_plane(end, self.block_size))
        self.forget(self.tables[row, 0, index])
        self.cap[row, index] = np.maximum(first - index * self.block_size, 0)

    def regain(self, row: int, first: int, end: int, computed: int) -> None:
        """Marks the row's tokens [first, end), which were marked by `lose`, as present again.

        Args:
            row: The row.
            first: First token.
            end: Token after the last.
            computed: The row's cached tokens, missing ones included.
        """
        index = np.arange(first // self.block_size, blocks_a_plane(end, self.block_size))
        self.cap[row, index] = self.block_size
        left = end - int(index[-1]) * self.block_size
        if end < computed and left < self.block_size:
            self.cap[row, index[-1]] = left

    def check_keeps(self, row: int, tokens: int) -> None:
        """ValueError if the row cannot lose the tokens behind these and go on from there."""

    def truncate(self, row: int, tokens: int) -> None:
        """Gives back the blocks that the row does not need for its first `tokens` tokens."""
        stay, held = blocks_a_plane(tokens, self.block_size), int(self.held[row])
        if stay > held:
            return
        if stay < held:
            self._let_go(self.blocks_of(row)[:, stay:].ravel(), row, int(self.direction[row]))
            self.held[row] = stay
            self.mirrored[row] = min(self.mirrored[row], stay)
            self.cap[row, stay:held] = self.block_size
        if tokens % self.block_size:  # the rest of that block will be written again
            self.forget(self.tables[row, :1, stay - 1])
        if stay and tokens - (stay - 1) * self.block_size <= self.cap[row, stay - 1]:
            self.cap[row, stay - 1] = self.block_size  # nothing is missing there any more

    def release(self, row: int) -> None:
        """Gives back all blocks of the row; blocks that other rows read or fill stay in use."""
        if held := self.held[row]:
            self._let_go(self.blocks_of(row).ravel(), row, int(self.direction[row]))
            self.cap[row, :held] = self.block_size
            self.held[row] = self.mirrored[row] = 0
        self.kind[row], self.direction[row] = KV, LEFT

    def release_all(self, rows: np.ndarray) -> None:
        """Releases each of the rows, one after the other."""
        for row in rows.tolist():
            self.release(row)

    def _share(self, ids: np.ndarray, row: int, own: np.ndarray | None = None) -> None:
        """Adds the row to the holders of these blocks. own: int64 by row, the count of blocks that
        only it holds, to be kept up to date; None for the usual one."""
        own = self._private if own is None else own
        refs = self.refs[ids]
        alone = self._rows[ids[refs == 1]]
        self.num_shared += len(alone)
        self._stale |= len(alone) > 0
        np.subtract.at(own, alone, 1)
        own[row] += int(np.count_nonzero(refs == 0))
        self.refs[ids] += 1
        self._rows[ids] += row

    def _let_go(self, ids: np.ndarray, row: int, side: int, own: np.ndarray | None = None) -> None:
        """Removes the row, which fills from that side, from the holders of these blocks. own: see
        `_share`."""
        own = self._private if own is None else own
        if not self.num_shared:
            self.refs[ids], self._rows[ids], self.owners[ids, side] = 0, 0, NOBODY
            own[row] -= len(ids)
            self._give_back(ids)
            return
        refs = self.refs[ids] - 1
        self.refs[ids] = refs
        self._rows[ids] -= row
        last, free = self._rows[ids[refs == 1]], ids[refs == 0]
        self.num_shared -= len(last)
        self._stale |= len(last) > 0
        np.add.at(own, last, 1)
        own[row] -= len(free)
        self.owners[ids[self.owners[ids, side] == row], side] = NOBODY
        self._own_again(ids[refs == 1])
        self._give_back(free)

    def _own_again(self, ids: np.ndarray) -> None:
        """Makes the last holder of these blocks their owner, as if it had filled them. This
        includes blocks that the prefix cache no longer knows."""
        for block in ids[(self.owners[ids] == NOBODY).all(axis=1)].tolist():
            row = int(self._rows[block])
            self.owners[block, self.direction[row]] = row
            page = None if self.cache is None else self.cache.page_of(block)
            known = page is not None and not isinstance(page, BesidePage)
            at = page.depth if known and page is not None else self._index_of(row, block)
            self.at[block, self.direction[row]] = at

    def _index_of(self, row: int, block: int) -> int:
        """The number of a block among those of the row."""
        return int(np.argmax((self.blocks_of(row) == block).any(axis=0)))

    def _give_back(self, ids: np.ndarray) -> None:
        """Frees blocks without holders. Known blocks stay until their room is needed."""
        if self.cache is not None and len(self.cache):
            ids = np.array(self.cache.release_readers(ids.tolist()), np.int32)
        self._free.push(ids)

    def _take(self, rows: np.ndarray, sides: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Takes a free block for each entry of `rows`, as the row's block number at[i], filled from
        sides[i]. OutOfBlocks."""
        lacking = len(rows) - self._free.count
        if lacking > 0 and self.cache is not None and lacking <= self.cache.num_unread:
            self._free.push(np.array(self.cache.evict(lacking), np.int32))
        ids = self._free.pop(len(rows))
        more = self._free.fresh - len(self.refs)
        if more > 0:
            more = max(more, len(self.refs), _FIRST_BLOCKS)
            grow_columns(self, len(self.refs) + more, owners=NOBODY, at=0, refs=0, _rows=0)
        self.owners[ids, sides] = rows
        self.at[ids, sides] = at
        self.refs[ids], self._rows[ids] = 1, rows
        return ids
