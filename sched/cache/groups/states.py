"""Groups of layers that keep a state of fixed size in place of K and V.

The state behind a token stands for all tokens up to it, so a prefix is found only where a state was
kept: a snapshot, beside the page of the last block before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import tokens_in
from jaxserve.sched.cache.groups.groups import PAIR, Groups


@dataclass(frozen=True)
class StateGroups(Groups):
    """The groups with a state, beside the one with K and V.

    Attributes:
        count: Number of groups.
        blocks: Blocks of a request's state in each.

    Raises:
        ValueError: A number is below 1.
    """

    count: int
    blocks: int

    def __post_init__(self) -> None:
        if min(self.count, self.blocks) < 1:
            raise ValueError(f"count and blocks must be at least 1, got {self}")

    @property
    def planes(self) -> int:
        """See `Groups`."""
        return self.count * self.blocks

    @property
    def apart(self) -> int:
        """See `Groups`: as many as have, in a group, the bytes of its state. Fewer would make most
        of the cache snapshots, more would find too little of a prefix."""
        return -(-self.blocks // PAIR)

    def most_beside(self, blocks: Any, block_size: int, ahead: int) -> Any:
        """See `Groups`. For the step that follows a snapshot it is twice that."""
        return self.planes * np.minimum(blocks, 1)

    def longest_in(self, blocks: int, block_size: int, ahead: int) -> int:
        """See `Groups`: beside its state and the snapshot that it comes from."""
        return tokens_in(max(blocks - 2 * self.planes, 0), block_size)

    def slots(self, tokens: Any, block_size: int) -> Any:
        """See `Groups`."""
        return np.minimum(tokens, 1) * self.planes * block_size

    def valid(self, pages: int, block_size: int, has: Callable[[int], bool]) -> int:
        """See `Groups`: those up to the last snapshot."""
        ends = range(pages - pages % self.apart, 0, -self.apart)
        return next((end for end in ends if has(end - 1)), 0)

    def lacking(self, pages: int, valid: int, block_size: int) -> range:
        """See `Groups`: those where a snapshot would be behind what is found."""
        return range(valid // self.apart * self.apart + self.apart - 1, pages, self.apart)

    def reach(self, block_size: int) -> int:
        """See `Groups`."""
        return 0
