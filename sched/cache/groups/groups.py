"""What groups of layers take of a pool, and which pages are found with them.

Layers that keep all K and V and others that keep less have block lists of their own over the same
pool. The S layers that keep all are one group. The others are dealt into groups of S, so that a
block of any group has as many bytes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import PLANES, blocks_a_plane, slots_for, tokens_in
from jaxserve.sched.cache.cache_kinds import KV

PAIR = int(PLANES[KV])  # planes of the group with all K and V


class Groups(abc.ABC):
    """The groups beside the one with all K and V."""

    @property
    @abc.abstractmethod
    def planes(self) -> int:
        """Blocks of all these groups for the tokens of one block, or for a state."""

    @abc.abstractmethod
    def most_beside(self, blocks: Any, block_size: int, ahead: int) -> Any:
        """Most blocks that a request holds in these groups at a time; numbers or arrays.

        Args:
            blocks: Its blocks a plane in the other group.
            block_size: Tokens of a block.
            ahead: Most tokens that it computes in a step.
        """

    @abc.abstractmethod
    def longest_in(self, blocks: int, block_size: int, ahead: int) -> int:
        """Tokens of the longest request that so many blocks have room for alone. block_size, ahead:
        see `most_beside`."""

    @abc.abstractmethod
    def slots(self, tokens: Any, block_size: int) -> Any:
        """Slots of what a request with so many cached tokens keeps in these groups; numbers or
        arrays."""

    @abc.abstractmethod
    def valid(self, pages: int, block_size: int, has: Callable[[int], bool]) -> int:
        """How many of these pages from the first on may be found together. has: whether a page has
        blocks of these groups."""

    @abc.abstractmethod
    def lacking(self, pages: int, valid: int, block_size: int) -> range:
        """The numbers of pages of which more would be found if they had blocks of these groups.

        Args:
            pages: Number of pages of the other group.
            valid: How many are found.
            block_size: Tokens of a block.
        """

    @property
    def apart(self) -> int:
        """Pages from one with blocks of these groups to the next, if each stands for all before it;
        0 if they do not."""
        return 0

    @abc.abstractmethod
    def reach(self, block_size: int) -> int:
        """Number of pages behind one that are not found as they are without its blocks there."""


def peak_blocks(tokens: Any, block_size: int, groups: Groups | None, ahead: int) -> Any:
    """Most blocks that a request of so many tokens holds at a time; numbers or arrays.

    Args:
        tokens: Its tokens.
        block_size: Tokens of a block.
        groups: The groups beside; None for none.
        ahead: Most tokens that it computes in a step.
    """
    blocks = blocks_a_plane(tokens, block_size)
    if groups is None:
        return blocks * PAIR
    return blocks * PAIR + groups.most_beside(blocks, block_size, ahead)


def longest_in(blocks: int, block_size: int, groups: Groups | None, ahead: int) -> int:
    """Tokens of the longest request that so many blocks have room for alone.

    Args:
        blocks: Blocks.
        block_size, groups, ahead: See `peak_blocks`.
    """
    if groups is None:
        return tokens_in(blocks, block_size)
    return groups.longest_in(blocks, block_size, ahead)


def kept_slots(tokens: Any, kind: Any, block_size: int, groups: Groups) -> Any:
    """Slots of all that is kept of a cache; numbers or arrays.

    Args:
        tokens: Its tokens.
        kind: `CacheKind`.
        block_size: Tokens of a block.
        groups: The groups beside.
    """
    return slots_for(tokens, kind) + np.where(tokens, groups.slots(tokens, block_size), 0)
