"""The state of the block pool, block by block, for a picture (`plots.block_pool`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.policy import View

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

FREE = -1
K, V, HIDDEN = range(3)


@dataclass(frozen=True)
class PoolView:
    """The pool's blocks at one moment. If several requests share a block from the same end, it
    shows the one with the largest share.

    Attributes:
        requests: Ids of the requests that hold blocks.
        owner: int64 [2, blocks], index into `requests` of the request that fills the block from its
        left and from its right end, or FREE.
        fill: float64 [2, blocks], the share of the block's slots that each of them uses, 0 to 1.
        plane: int64 [blocks], K, V or HIDDEN, or FREE.
    """

    requests: tuple[str, ...]
    owner: np.ndarray
    fill: np.ndarray
    plane: np.ndarray

    @property
    def used(self) -> np.ndarray:
        """Which blocks are in use, bool [blocks]."""
        return np.asarray(self.plane != FREE)


def pool_view(engine: Engine) -> PoolView:
    """The state of the engine's pool now. Exact when called on the engine's thread (by an
    `Observer`, or in an `on_output`); elsewhere its parts may be one step apart."""
    scheduler = engine._scheduler  # only pictures need this, so the engine does not offer it
    names = {row: c.request.id for row, c in dict(engine._step_loop.live).items()}
    return view_of(scheduler.pool, scheduler.table.computed.copy(), names)


def policy_view(view: View) -> PoolView:
    """The state of the pool as a policy sees it, live or in a simulation whose plans are `checked`.
    Requests are named by their rows of the table."""
    names = {row: str(row) for row in np.flatnonzero(view.pool.held).tolist()}
    return view_of(view.pool, view.table.computed, names)


def view_of(pool: BlockPool, computed: np.ndarray, names: Mapping[int, str]) -> PoolView:
    """The blocks of some rows.

    Args:
        pool: The blocks.
        computed: int64 [rows], tokens in the cache of each of the pool's rows.
        names: Request ids of the rows to show.
    """
    owner = np.full((2, pool.num_blocks), FREE)
    plane = np.full(pool.num_blocks, FREE)
    fill = np.zeros((2, pool.num_blocks))
    holding = [row for row in sorted(names) if pool.held[row]]
    for index, row in enumerate(holding):
        count, end = int(pool.held[row]), int(pool.direction[row])
        before = np.arange(count) * pool.block_size
        # The last tokens of a block may be on the host.
        tokens = np.clip(computed[row] - before, 0, pool.cap[row, :count])
        share = tokens / pool.block_size
        hidden = pool.kind[row] == CacheKind.HIDDEN
        for which, (begin, ids) in enumerate(pool.planes_of(row)):
            there = share[begin : begin + len(ids)]
            mine = (owner[end, ids] == FREE) | (there > fill[end, ids])
            owner[end, ids[mine]], fill[end, ids[mine]] = index, there[mine]
            plane[ids] = HIDDEN if hidden else which % 2
    return PoolView(tuple(names[row] for row in holding), owner, fill, plane)
