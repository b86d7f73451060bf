"""A block pool in which groups of layers keep a state of each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.sched.cache.cache_kinds import LEFT, NOBODY
from jaxserve.sched.cache.groups.grouped_pool import GroupedPool
from jaxserve.sched.cache.groups.grouped_prefix_cache import GroupedPrefixCache
from jaxserve.sched.cache.groups.states import StateGroups
from jaxserve.sched.cache.pages import Page
from jaxserve.sched.row_columns import grow_columns

_FROM, _TO = 0, 1


class StatePool(GroupedPool):
    """A `GroupedPool` whose other groups have a state.

    A step reads each row's state from some blocks and writes the one behind its tokens to others,
    mostly the same. They differ where the state that was read has become a snapshot, beside the
    page of the last block before it, or was found as one, and where the step has drafts: after a
    wrong one the row goes on from the state that was read.

    Args:
        num_blocks, block_size, max_owners, width, cache, groups, ahead: See `GroupedPool`.

    Attributes:
        states: int32 [max_owners, 2, groups.planes]: the blocks of each row's state before the step
            that was booked last, and behind it.
        has: bool [max_owners], rows with a state.
        owns: bool [max_owners], rows that may write to those blocks: it is no snapshot.
        moves: bool [max_owners], rows whose blocks before the step differ from those behind it, and
            are held until it is launched, or its drafts are known to be right.
        reached: int64 [max_owners], tokens that each row's state stands for.
        drafts: int64 [max_owners], drafts of each row in a step whose tokens are not known yet.
    """

    groups: StateGroups
    states: np.ndarray

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_owners: int,
        width: int,
        cache: GroupedPrefixCache | None = None,
        *,
        groups: StateGroups,
        ahead: int,
    ) -> None:
        sizes = num_blocks, block_size, max_owners, width
        super().__init__(*sizes, cache, groups=groups, ahead=ahead)
        self.states = np.zeros((max_owners, 2, groups.planes), np.int32)
        self.has, self.owns, self.moves = np.zeros((3, max_owners), bool)
        self.reached, self.drafts = np.zeros((2, max_owners), np.int64)

    def blocks_held(self, rows: np.ndarray | int) -> np.ndarray:
        """See `BlockPool`: with those of states."""
        held = super().blocks_held(rows)
        return np.asarray(held + self.groups.planes * (1 * self.has[rows] + self.moves[rows]))

    def planes_of(self, row: int) -> list[tuple[int, np.ndarray]]:
        """See `BlockPool`: with all blocks of a state as one."""
        return super().planes_of(row) + [(0, ids) for ids in self.states_of(row)]

    def states_of(self, row: int) -> np.ndarray:
        """The blocks of the row's states, int32 [n, groups.planes]: none, one, or two that
        differ."""
        return self.states[row, _TO - int(self.moves[row]) : _TO + int(self.has[row])]

    def needed(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        kinds: np.ndarray,
        held: np.ndarray | None = None,
        kind: np.ndarray | None = None,
    ) -> np.ndarray:
        """See `BlockPool`. With `held` it is what the group with K and V takes."""
        own = super().needed(rows, tokens, kinds, held, kind)
        if held is not None:
            return own
        states = (~self.owns[rows]).astype(np.int64)
        if self.cache is not None:
            for i in np.flatnonzero((self.held[rows] == 0) & (self.cache.found[rows] > 0)).tolist():
                states[i] += self.takes_snapshot(self.cache.chain(int(rows[i])))
        return np.asarray(own + self.groups.planes * states)

    def takes_snapshot(self, chain: Sequence[Page]) -> bool:
        """Whether the snapshot of these pages takes free blocks for a row that starts with it."""
        beside = chain[-1].beside if chain else None
        return beside is not None and bool(self.refs[beside.ids[0]] < 2)

    def slots_of(self, row: int, first: int, end: int) -> np.ndarray:
        """See `BlockPool`, with the row's state."""
        ids, size = self.states[row, _TO], self.block_size
        state = np.stack([np.repeat(ids, size), np.tile(np.arange(size), len(ids))], axis=1)
        return np.concatenate([super().slots_of(row, first, end), state]).astype(np.int32)

    def follow(self, rows: int) -> None:
        """See `BlockPool`."""
        super().follow(rows)
        grow_columns(self, rows, states=0, has=False, owns=False, moves=False, reached=0, drafts=0)

    def needed_to_draft(self, rows: np.ndarray) -> np.ndarray:
        """See `BlockPool`: a state besides the one that is read."""
        return self.groups.planes * self.owns[rows].astype(np.int64)

    def reach(
        self,
        rows: np.ndarray,
        computed: np.ndarray,
        tokens: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> None:
        """See `BlockPool`."""
        self.reached[rows] = tokens
        if drafts is not None:
            self.drafts[rows] = drafts
        new, planes = rows[~self.owns[rows] | (self.drafts[rows] > 0)], self.groups.planes
        if not len(new):
            return
        owner = np.repeat(new, planes)
        at = np.tile(np.arange(planes), len(new))
        ids = self._take(owner, np.zeros(len(owner), np.int64), at).reshape(-1, planes)
        before = np.where(self.has[new, None], self.states[new, _TO], ids)
        self.states[new, _FROM], self.states[new, _TO] = before, ids
        self.moves[new], self.has[new], self.owns[new] = self.has[new], True, True
        self._private[new] += planes

    def slide(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """See `BlockPool`: gives back the states that were read."""
        for row in rows[self.moves[rows] & (self.drafts[rows] == 0)].tolist():
            self._leave(row, _FROM, _TO)

    def settle(self, rows: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `BlockPool`."""
        wrong = accepted < self.drafts[rows]
        for row, back in zip(rows.tolist(), wrong.tolist(), strict=True):
            drafts, self.drafts[row] = int(self.drafts[row]), 0
            if not drafts:
                continue
            self._leave(row, *((_TO, _FROM) if back else (_FROM, _TO)))
            if back:
                self.reached[row] -= 1 + drafts
                self.owns[row] = not self._is_snapshot(row)
        return rows[wrong], self.reached[rows[wrong]]

    def _leave(self, row: int, which: int, other: int) -> None:
        """Gives back one of the row's two states."""
        self.moves[row] = False
        self._let_go(self.states[row, which].copy(), row, LEFT)
        self.states[row, which] = self.states[row, other]

    def _is_snapshot(self, row: int) -> bool:
        """Whether the row's state is a snapshot, or others read it."""
        first = int(self.states[row, _TO, 0])
        known = self.cache is not None and self.cache.page_of(first) is not None
        return known or bool(self.refs[first] > 1)

    def share(self, row: int, pages: Sequence[Page], side: int = LEFT) -> None:
        """See `BlockPool`."""
        super().share(row, pages, side)
        beside = pages[-1].beside
        assert beside is not None and self.cache is not None, "a prefix ends without a snapshot"
        ids = np.array(beside.ids, np.int32)
        self.cache.read(beside, row)
        alone = bool(self.refs[ids[0]] == 0)
        self._share(ids, row)
        self.owners[ids] = NOBODY
        if alone:  # as if the row had filled them itself
            self.owners[ids, LEFT], self.at[ids, LEFT] = row, np.arange(len(ids))
        self.states[row], self.has[row] = ids, True
        self.reached[row] = len(pages) * self.block_size

    def register(self, row: int, index: int, *, swap: bool = True) -> bool:
        """See `BlockPool`. A state that becomes a snapshot is not written to any more."""
        known, cache = super().register(row, index, swap=swap), self.cache
        if self.owns[row] and cache is not None and cache.page_of(int(self.states[row, _TO, 0])):
            self.owns[row] = False
        return known

    def _beside(self, row: int, index: int) -> np.ndarray | None:
        whole = (index + 1) % self.groups.apart == 0
        there = whole and self.owns[row] and self.reached[row] == (index + 1) * self.block_size
        return self.states[row, _TO] if there else None

    def next_snapshot(self, tokens: int) -> int:
        """Where the next snapshot behind so many tokens may be, in tokens."""
        between = self.groups.apart * self.block_size
        return (tokens // between + 1) * between

    def check_keeps(self, row: int, tokens: int) -> None:
        """See `BlockPool`."""
        if tokens:
            raise ValueError(f"row {row} cannot go back to {tokens} tokens: their state is gone")

    def truncate(self, row: int, tokens: int) -> None:
        """See `BlockPool`. ValueError as in `check_keeps`."""
        self.check_keeps(row, tokens)
        self.release(row)

    def _index_of(self, row: int, block: int) -> int:
        there = (self.states_of(row) == block).any(axis=0)
        return int(np.argmax(there)) if there.any() else super()._index_of(row, block)

    def release(self, row: int) -> None:
        """See `BlockPool`."""
        states = self.states_of(row).ravel().copy()
        super().release(row)
        self.has[row] = self.owns[row] = self.moves[row] = False
        self.reached[row] = self.drafts[row] = 0
        if len(states):
            self._let_go(states, row, LEFT)
