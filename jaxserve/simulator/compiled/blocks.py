"""Blocks that requests take, in the compiled simulation."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_a_plane, blocks_for
from jaxserve.sched.unified.unified_policy import Reserve
from jaxserve.simulator.compiled.jit import kernel

WHOLE = list(Reserve).index(Reserve.WHOLE)
PLANES = int(blocks_for(1, 1))  # a cache is K and V
a_plane = kernel(blocks_a_plane)


@kernel
def new_blocks(settings: np.record, r: np.record, tokens: int) -> int:
    """Free blocks that the request needs to hold this many tokens."""
    return max(a_plane(tokens, settings.block_size) - r.held - r.read, 0) * PLANES


@kernel
def whole_reserve(settings: np.record, r: np.record) -> int:
    """Tokens for which an uncut request gets room."""
    reserve = r.prompt_len + r.generated
    if settings.reserve == WHOLE:
        reserve = max(reserve, r.prompt_len + r.most_output - 1)
    return reserve
