"""What each block holds, and for which tier, as a small number: for pictures of the pool."""

from __future__ import annotations

import enum

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import KV
from jaxserve.sched.request import Tier


class BlockUse(enum.IntEnum):
    """What a block holds. SHARED: two requests fill it, or several read it."""

    FREE = 0
    K_REALTIME = 1
    V_REALTIME = 2
    HIDDEN_REALTIME = 3
    K_BEST_EFFORT = 4
    V_BEST_EFFORT = 5
    HIDDEN_BEST_EFFORT = 6
    SHARED = 7


def pool_map(pool: BlockPool, tier: np.ndarray) -> np.ndarray:
    """Uint8 [num_blocks] of BlockUse. tier: by row of the table."""
    uses = np.zeros(pool.num_blocks, np.uint8)
    for row in np.flatnonzero(pool.held).tolist():
        first = BlockUse.K_BEST_EFFORT if tier[row] == Tier.BEST_EFFORT else BlockUse.K_REALTIME
        hidden = pool.kind[row] != KV
        for plane, (_, ids) in enumerate(pool.planes_of(row)):
            uses[ids] = first + (2 if hidden else plane % 2)
    several = np.flatnonzero(pool.refs > 1)
    uses[several] = BlockUse.SHARED
    return uses
