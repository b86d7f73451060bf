"""Groups of layers with a sliding window, which keep no more than the window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.sched.cache.groups.groups import PAIR, Groups


@dataclass(frozen=True)
class WindowGroups(Groups):
    """The groups with a window, beside the one without.

    Attributes:
        window: Tokens that a token sees there, itself included.
        count: Number of groups.

    Raises:
        ValueError: A number is below 1.
    """

    window: int
    count: int

    def __post_init__(self) -> None:
        if min(self.window, self.count) < 1:
            raise ValueError(f"window and count must be at least 1, got {self}")

    @property
    def planes(self) -> int:
        """See `Groups`: one block of K and one of V for each group."""
        return PAIR * self.count

    def behind(self, tokens: Any, block_size: int) -> Any:
        """Blocks a plane that no token after these sees; numbers or arrays."""
        return np.maximum(tokens - self.window + 1, 0) // block_size

    def most(self, block_size: int, ahead: int) -> int:
        """Most blocks a plane of a request that computes at most `ahead` tokens in a step."""
        return int(blocks_a_plane(self.window + ahead, block_size)) + 1

    def most_beside(self, blocks: Any, block_size: int, ahead: int) -> Any:
        """See `Groups`."""
        return np.minimum(blocks, self.most(block_size, ahead)) * self.planes

    def longest_in(self, blocks: int, block_size: int, ahead: int) -> int:
        """See `Groups`."""
        most = self.most(block_size, ahead)
        short = blocks // (PAIR + self.planes)
        return block_size * (short if short <= most else (blocks - most * self.planes) // PAIR)

    def slots(self, tokens: Any, block_size: int) -> Any:
        """See `Groups`."""
        return self.planes * (tokens - self.behind(tokens, block_size) * block_size)

    def valid(self, pages: int, block_size: int, has: Callable[[int], bool]) -> int:
        """See `Groups`: those whose last window is whole."""
        at = pages - 1
        while pages and at >= self.behind(pages * block_size, block_size):
            if not has(at):
                pages = at
            at -= 1
        return pages

    def lacking(self, pages: int, valid: int, block_size: int) -> range:
        """See `Groups`: those of the last window of all pages."""
        return range(int(self.behind(pages * block_size, block_size)), pages)

    def reach(self, block_size: int) -> int:
        """See `Groups`."""
        return (self.window - 1) // block_size + 1
