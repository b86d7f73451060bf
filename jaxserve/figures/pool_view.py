"""The block pool at one moment, block by block, for a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.sched.cache.block_pool import BlockPool

FREE = -1


@dataclass(frozen=True)
class PoolView:
    """The pool's blocks at one moment. A block with two owners shows the one with the larger share.

    Attributes:
        requests: Ids of the requests that hold blocks.
        owner: int64 [blocks], index into `requests`, or FREE.
        plane: int64 [blocks], 0 for K (or hidden), 1 for V, or FREE.
        fill: float64 [blocks], share of the block's slots in use, 0 to 1.
    """

    requests: tuple[str, ...]
    owner: np.ndarray
    plane: np.ndarray
    fill: np.ndarray


def pool_view(engine: Engine) -> PoolView:
    """What the engine's pool holds now. Exact when called on the engine's thread (in an
    `on_output`); elsewhere its parts may be one step apart."""
    scheduler = engine._scheduler  # no request's path needs this, so the engine does not offer it
    names = {row: c.request.id for row, c in dict(engine._step_loop.live).items()}
    return view_of(scheduler.pool, scheduler.table.computed.copy(), names)


def view_of(pool: BlockPool, computed: np.ndarray, names: Mapping[int, str]) -> PoolView:
    """What the pool holds for some rows.

    Args:
        pool: The blocks.
        computed: int64 [rows], tokens in the cache of each of the pool's rows.
        names: Request ids of the rows to show.
    """
    owner = np.full(pool.num_blocks, FREE)
    plane = np.full(pool.num_blocks, FREE)
    fill = np.zeros(pool.num_blocks)
    holding = [row for row in sorted(names) if pool.held[row]]
    for index, row in enumerate(holding):
        blocks = pool.blocks_of(row)
        before = np.arange(blocks.shape[1]) * pool.block_size
        share = np.clip((computed[row] - before) / pool.block_size, 0.0, 1.0)
        for which, ids in enumerate(blocks):
            mine = (owner[ids] == FREE) | (share > fill[ids])
            owner[ids[mine]], plane[ids[mine]], fill[ids[mine]] = index, which, share[mine]
    return PoolView(tuple(names[row] for row in holding), owner, plane, fill)
