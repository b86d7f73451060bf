"""A block pool with groups of layers that keep less than all K and V."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import KV
from jaxserve.sched.cache.groups.grouped_prefix_cache import GroupedPrefixCache
from jaxserve.sched.cache.groups.groups import PAIR, Groups, longest_in, peak_blocks


class GroupedPool(BlockPool, abc.ABC):
    """A `BlockPool` with a group of layers that keep all K and V, to which everything there
    applies, and others. All groups take blocks from the same free ones. Caches are K and V, filled
    from the left, and blocks are neither lent nor copied.

    Args:
        num_blocks, block_size, max_owners, width, cache: See `BlockPool`.
        groups: The other groups.
        ahead: Most tokens that a request computes in a step.
    """

    groups: Groups

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_owners: int,
        width: int,
        cache: GroupedPrefixCache | None = None,
        *,
        groups: Groups,
        ahead: int,
    ) -> None:
        super().__init__(num_blocks, block_size, max_owners, width, cache)
        self.groups, self.ahead = groups, ahead

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool has room for, in requests of full length or a shorter one."""
        alone = longest_in(self.num_blocks, self.block_size, self.groups, self.ahead)
        return min(alone, self._whole(self.num_blocks)) if alone >= self._longest else alone

    @property
    def num_free_kv(self) -> int:
        """See `BlockPool`: as many as requests of full length would leave there."""
        return self._whole(self.num_free) // self.block_size * PAIR

    @property
    def _longest(self) -> int:
        return self.width * self.block_size

    def _whole(self, blocks: int) -> int:
        """Tokens of requests of full length that so many blocks have room for."""
        return blocks * self._longest // int(self.blocks_for(self._longest))

    def blocks_for(self, tokens: Any, kind: Any = KV) -> Any:
        """See `BlockPool`: the most that a request of so many tokens holds."""
        return peak_blocks(tokens, self.block_size, self.groups, self.ahead)

    def register(self, row: int, index: int, *, swap: bool = True) -> bool:
        """See `BlockPool`, with what other groups keep of the block."""
        known, cache = super().register(row, index, swap=swap), self.cache
        assert isinstance(cache, GroupedPrefixCache)
        page = cache.page(row, index)
        if not known or page is None or page.beside is not None:
            return known
        if page.ids[0] == self.tables[row, 0, index]:
            ids = self._beside(row, index)
            if ids is not None and (self.refs[ids] == 1).all():
                cache.register_beside(page, tuple(ids.tolist()), row)
        return known

    @abc.abstractmethod
    def _beside(self, row: int, index: int) -> np.ndarray | None:
        """The row's blocks in the other groups that belong to its block of that number; None if
        there are none."""
