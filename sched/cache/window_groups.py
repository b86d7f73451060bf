"""Groups of layers with a sliding window, which keep no more than the window, and what they take.

Layers without a window and layers with one have block lists of their own over the same pool. The S
layers without a window are one group. Those with a window are dealt into groups of S, so that a
block of any group has as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES, blocks_a_plane, slots_for, tokens_in
from jaxserve.sched.cache.cache_kinds import KV

_PAIR = int(PLANES[KV])


@dataclass(frozen=True)
class WindowGroups:
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
        """Blocks of all these groups for the same tokens: one of K and one of V each."""
        return _PAIR * self.count

    def behind(self, tokens: Any, block_size: int) -> Any:
        """Blocks a plane that no token after these sees; numbers or arrays."""
        return np.maximum(tokens - self.window + 1, 0) // block_size

    def most(self, block_size: int, ahead: int) -> int:
        """Most blocks a plane of a request that computes at most `ahead` tokens in a step."""
        return int(blocks_a_plane(self.window + ahead, block_size)) + 1

    def slots(self, tokens: Any, block_size: int) -> Any:
        """Slots of what a request with so many cached tokens keeps in these groups; numbers or
        arrays."""
        return self.planes * (tokens - self.behind(tokens, block_size) * block_size)

    def valid(self, pages: int, block_size: int, has: Callable[[int], bool]) -> int:
        """How many of these pages from the first on may be found together: those whose window is
        whole. has: whether a page has blocks of these groups."""
        at = pages - 1
        while pages and at >= self.behind(pages * block_size, block_size):
            if not has(at):
                pages = at
            at -= 1
        return pages


def peak_blocks(tokens: Any, block_size: int, groups: WindowGroups | None, ahead: int) -> Any:
    """Most blocks that a request of so many tokens holds at a time; numbers or arrays.

    Args:
        tokens: Its tokens.
        block_size: Tokens of a block.
        groups: The groups with a window; None for none.
        ahead: Most tokens that it computes in a step.
    """
    blocks = blocks_a_plane(tokens, block_size)
    if groups is None:
        return blocks * _PAIR
    return blocks * _PAIR + np.minimum(blocks, groups.most(block_size, ahead)) * groups.planes


def longest_in(blocks: int, block_size: int, groups: WindowGroups | None, ahead: int) -> int:
    """Tokens of the longest request that so many blocks have room for alone.

    Args:
        blocks: Blocks.
        block_size, groups, ahead: See `peak_blocks`.
    """
    if groups is None:
        return tokens_in(blocks, block_size)
    most = groups.most(block_size, ahead)
    short = blocks // (_PAIR + groups.planes)
    return block_size * (short if short <= most else (blocks - most * groups.planes) // _PAIR)


def kept_slots(tokens: Any, kind: Any, block_size: int, groups: WindowGroups) -> Any:
    """Slots of all that is kept of a cache; numbers or arrays.

    Args:
        tokens: Its tokens.
        kind: `CacheKind`.
        block_size: Tokens of a block.
        groups: The groups with a window.
    """
    return slots_for(tokens, kind) + groups.slots(tokens, block_size)
