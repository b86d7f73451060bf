"""A block pool in which groups of layers with a sliding window give blocks behind it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.sched.cache.cache_kinds import LEFT
from jaxserve.sched.cache.groups.grouped_pool import GroupedPool
from jaxserve.sched.cache.groups.grouped_prefix_cache import GroupedPrefixCache
from jaxserve.sched.cache.groups.groups import PAIR
from jaxserve.sched.cache.groups.windows import WindowGroups
from jaxserve.sched.cache.pages import Page
from jaxserve.sched.row_columns import grow_columns


class WindowedPool(GroupedPool):
    """A `GroupedPool` whose other groups have a window.

    Args:
        num_blocks, block_size, max_owners, width, cache, groups, ahead: See `GroupedPool`.

    Attributes:
        most: Most blocks a plane that a row holds in a group with a window.
        tables: int32 [max_owners, 2 + groups.planes, width]: K and V of each group. All are indexed
            from the first token on; ids behind a window are stale.
        first, ends: int64 [max_owners]. In the groups with a window, a row holds its blocks from
            first to ends, exclusive.
    """

    groups: WindowGroups

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_owners: int,
        width: int,
        cache: GroupedPrefixCache | None = None,
        *,
        groups: WindowGroups,
        ahead: int,
    ) -> None:
        sizes = num_blocks, block_size, max_owners, width
        super().__init__(*sizes, cache, groups=groups, ahead=ahead)
        self.tables = np.zeros((max_owners, PAIR + groups.planes, width), np.int32)
        self.first, self.ends = np.zeros((2, max_owners), np.int64)
        self.most = groups.most(block_size, ahead)
        self._in_windows = 0  # blocks in use there, shared ones once
        self._own_there = np.zeros(max_owners, np.int64)  # of them, those that only the row holds

    @property
    def num_free(self) -> int:
        """See `BlockPool`. What is set aside does not count as free."""
        aside = int(self.set_aside(self.first, self.held).sum())
        return super().num_free - aside + self._in_windows

    def private(self, rows: np.ndarray | int) -> np.ndarray:
        """See `BlockPool`: with what is set aside for the row."""
        return np.asarray(super().private(rows) + self.set_aside(self.first[rows], self.held[rows]))

    def blocks_held(self, rows: np.ndarray | int) -> np.ndarray:
        """See `BlockPool`: with what is set aside for the row."""
        aside = self.set_aside(self.first[rows], self.held[rows])
        return np.asarray(super().blocks_held(rows) + aside)

    def set_aside(self, first: Any, held: Any) -> Any:
        """Blocks of groups with a window that are set aside for a row, those that it holds there
        included; numbers or arrays.

        Args:
            first: Its `first`.
            held: Its blocks a plane in the group without a window.
        """
        return self.groups.planes * (np.minimum(held, first + self.most) - first)

    def planes_of(self, row: int) -> list[tuple[int, np.ndarray]]:
        """See `BlockPool`."""
        there = [(int(self.first[row]), ids) for ids in self.window_ids(row)]
        return super().planes_of(row) + there

    def window_ids(self, row: int) -> np.ndarray:
        """The ids of the blocks that the row holds in groups with a window, int32 [groups.planes,
        n]."""
        return self.tables[row, PAIR:, self.first[row] : self.ends[row]]

    def needed(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        kinds: np.ndarray,
        held: np.ndarray | None = None,
        kind: np.ndarray | None = None,
    ) -> np.ndarray:
        """See `BlockPool`. With `held` it is what the group without a window takes; the others
        take what `set_aside` says."""
        own = super().needed(rows, tokens, kinds, held, kind)
        if held is not None:
            return own
        first, have = self.first[rows], self.held[rows]
        if self.cache is not None:  # a waiting row begins where the window of its prefix does
            found = np.where(have > 0, 0, self.cache.found[rows])
            first = first + self.groups.behind(found * self.block_size, self.block_size)
            have = np.maximum(have, first)
        want = np.maximum(blocks_a_plane(tokens, self.block_size), have)
        return np.asarray(own + self.set_aside(first, want) - self.set_aside(first, have))

    def slots_of(self, row: int, first: int, end: int) -> np.ndarray:
        """See `BlockPool`. In groups with a window, those that the row needs to go on from
        `end`."""
        begin = max(first, int(self.groups.behind(end, self.block_size)) * self.block_size)
        index, offset = np.divmod(np.arange(begin, end), self.block_size)
        blocks = self.tables[row, PAIR:][:, index]
        slots = np.stack([blocks, np.broadcast_to(offset, blocks.shape)], axis=-1)
        return np.concatenate([super().slots_of(row, first, end), slots.reshape(-1, 2)]).astype(
            np.int32
        )

    def follow(self, rows: int) -> None:
        """See `BlockPool`."""
        super().follow(rows)
        grow_columns(self, rows, first=0, ends=0, _own_there=0)

    def reach(
        self,
        rows: np.ndarray,
        computed: np.ndarray,
        tokens: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> None:
        """See `BlockPool`."""
        begin = np.maximum(self.ends[rows], self.groups.behind(computed, self.block_size))
        empty = self.ends[rows] == self.first[rows]
        self.first[rows[empty]] = begin[empty]
        more = np.maximum(blocks_a_plane(tokens, self.block_size) - begin, 0)
        total = int(more.sum())
        if total:
            planes, of = self.groups.planes, np.repeat(np.arange(len(rows)), more)
            index = np.arange(total) - np.repeat(np.cumsum(more) - more, more) + begin[of]
            owner = np.repeat(rows[of], planes)
            ids = self._take(owner, np.zeros(len(owner), np.int64), np.repeat(index, planes))
            self.tables[rows[of], PAIR:, index] = ids.reshape(total, planes)
            self._own_there[rows] += more * planes
            self._in_windows += total * planes
        self.ends[rows] = begin + more

    def slide(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """See `BlockPool`."""
        keep = np.minimum(self.groups.behind(computed, self.block_size), self.ends[rows])
        for i in np.flatnonzero(keep > self.first[rows]).tolist():
            row, first, end = int(rows[i]), int(self.first[rows[i]]), int(keep[i])
            self.first[row] = end
            self._leave_windows(row, first, end)

    def _leave_windows(self, row: int, first: int, end: int) -> None:
        """Gives back these blocks of the row."""
        ids = self.tables[row, PAIR:, first:end].ravel()
        self._in_windows -= int(np.count_nonzero(self.refs[ids] == 1))
        self._let_go(ids, row, LEFT, self._own_there)

    def share(self, row: int, pages: Sequence[Page], side: int = LEFT) -> None:
        """See `BlockPool`."""
        super().share(row, pages, side)
        first = int(self.groups.behind(len(pages) * self.block_size, self.block_size))
        beside = [page.beside for page in pages[first:] if page.beside is not None]
        assert first + len(beside) == len(pages), "a page of the last window has no blocks there"
        if beside:
            ids = np.array([page.ids for page in beside])
            self._in_windows += int(np.count_nonzero(self.refs[ids] == 0))
            self._adopt(row, beside, first, side, PAIR, self._own_there)
        self.first[row], self.ends[row] = first, len(pages)

    def _beside(self, row: int, index: int) -> np.ndarray | None:
        there = self.first[row] <= index < self.ends[row]
        return self.tables[row, PAIR:, index] if there else None

    def check_keeps(self, row: int, tokens: int) -> None:
        """See `BlockPool`."""
        if tokens and self.first[row] > self.groups.behind(tokens, self.block_size):
            raise ValueError(
                f"row {row} cannot go back to {tokens} tokens: blocks behind the window are gone"
            )
        index, inside = divmod(tokens, self.block_size)
        if inside and self._is_shared(row, index):
            raise ValueError(
                f"row {row} cannot go back to {tokens} tokens: they end inside a block that other"
                " rows read, and such blocks are not copied here"
            )

    def _is_shared(self, row: int, index: int) -> bool:
        """Whether another row has the row's block of that number, in any group."""
        whole = self.tables[row, :PAIR, index : min(index + 1, int(self.held[row]))]
        there = self.first[row] <= index < self.ends[row]
        beside = self.tables[row, PAIR:, index : index + int(there)]
        return bool((self.refs[whole] > 1).any() or (self.refs[beside] > 1).any())

    def truncate(self, row: int, tokens: int) -> None:
        """See `BlockPool`. ValueError as in `check_keeps`."""
        self.check_keeps(row, tokens)
        super().truncate(row, tokens)
        first, end = int(self.first[row]), int(self.ends[row])
        stay = max(int(blocks_a_plane(tokens, self.block_size)), first)
        if stay < end:
            self._leave_windows(row, stay, end)
            self.ends[row] = stay
        if not self.held[row]:
            self.first[row] = self.ends[row] = 0

    def _index_of(self, row: int, block: int) -> int:
        there = (self.window_ids(row) == block).any(axis=0)
        found = int(self.first[row]) + int(np.argmax(there)) if there.any() else None
        return super()._index_of(row, block) if found is None else found

    def release(self, row: int) -> None:
        """See `BlockPool`."""
        super().release(row)
        if self.first[row] < self.ends[row]:
            self._leave_windows(row, int(self.first[row]), int(self.ends[row]))
        self.first[row] = self.ends[row] = 0
