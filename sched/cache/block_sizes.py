"""Arithmetic on the blocks and slots that tokens take, without a pool.

A block holds K, or V, or hidden vectors of up to `block_size` tokens for all layers (Apt-Serve
section 4.3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.cache.cache_kinds import CacheKind

# Planes of a cache by its kind: sets of blocks with one entry per token. K and V, or hidden.
PLANES = np.array([2, 1])


def blocks_a_plane(tokens: Any, block_size: int) -> Any:
    """Blocks that this many tokens take in each plane of their cache; numbers or arrays."""
    return (tokens + (block_size - 1)) // block_size


def blocks_for(tokens: Any, block_size: int, kind: Any = CacheKind.KV) -> Any:
    """Blocks that a cache of this many tokens takes in all planes; numbers or arrays."""
    return blocks_a_plane(tokens, block_size) * PLANES[kind]


def slots_for(tokens: Any, kind: Any = CacheKind.KV) -> Any:
    """Slots, each in one plane, that this many cached tokens take; numbers or arrays."""
    return tokens * PLANES[kind]


def tokens_in(num_blocks: int, block_size: int, kind: CacheKind = CacheKind.KV) -> int:
    """Tokens that this many blocks hold in a cache of that kind."""
    return num_blocks // int(PLANES[kind]) * block_size
