"""Blocks that a real-time request fills from the left and a best-effort one from the right: what
the first would overwrite, and how that is restored (BROS section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_a_plane, slots_for
from jaxserve.sched.cache.cache_kinds import LEFT, RIGHT
from jaxserve.sched.policy import View


def left_filled(view: View) -> np.ndarray:
    """Tokens that each block used so far holds from the left, int64 [blocks]; 0 if no row fills the
    other end. A plan raises it for the blocks that its rows continue to fill."""
    filled = np.zeros(len(view.pool.refs), np.int64)
    both = view.pool.both_ends()
    filled[both] = view.pool.filled(both, LEFT, view.table.computed)
    return filled


def overwritten_ranges(
    view: View, ids: np.ndarray, filled: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that rows which fill these blocks from the right would lose to the left side.

    Args:
        view: What the policy sees.
        ids: int [m], blocks.
        filled: int64 [m], tokens that each block will have from the left.

    Returns:
        rows, first, end, int64 [k] each, as in `Checkpoint`: one range for each block of a row, for
        all its planes.
    """
    pool, size = view.pool, view.pool.block_size
    have = pool.filled(ids, RIGHT, view.table.computed)
    over = np.flatnonzero(have + filled > size)
    rows = pool.owners[ids[over], RIGHT].astype(np.int64)
    at = pool.at[ids[over], RIGHT].astype(np.int64)
    first, end = at * size + size - filled[over], at * size + have[over]
    order = np.lexsort((first, at, rows))  # of several planes, the one that has the least left
    rows, at, first, end = rows[order], at[order], first[order], end[order]
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (at[1:] != at[:-1])
    return rows[new], first[new], end[new]


@dataclass(frozen=True)
class RestorePlan:
    """The operations that complete a row's cache again.

    Attributes:
        copy: int64 [k], indices of its blocks that are copied elsewhere first.
        first: int64 [m], first tokens of the checkpoints to restore, in order.
        computed: Tokens that it has cached afterwards.
        blocks: Free blocks that this takes, before the copied ones are given back.
        copied, loaded: Numbers of slots.
    """

    copy: np.ndarray
    first: np.ndarray
    computed: int
    blocks: int
    copied: int
    loaded: int


def plan_restore(view: View, row: int, left: np.ndarray) -> RestorePlan:
    """The plan for a row that fills blocks from the right, and has tokens on the host. If a block's
    slots are free again, missing tokens come back there; otherwise the row moves its remaining
    tokens of the block to another one. left: see `left_filled`, including planned tokens."""
    pool, size, computed = view.pool, view.pool.block_size, int(view.table.computed[row])
    waits, kind = not pool.held[row], int(pool.kind[row])
    until, touched = computed, set[int]()
    segments = view.host.segments(row)
    for segment in segments:
        if waits:
            kind = int(segment.kind)
        until = max(until, segment.end)  # without a gap, since `Preempt` has left no others
        end = min(blocks_a_plane(segment.end, size), int(pool.held[row]))
        touched.update(range(segment.first // size, end))
    copy = np.array([i for i in sorted(touched) if _taken(view, row, i, until, left)], np.int64)
    there = np.maximum(np.minimum(computed - copy * size, pool.cap[row, copy]), 0)
    one, tokens, kinds = np.array([row]), np.array([until]), np.array([kind])
    more = int(pool.needed(one, tokens, kinds)[0]) if until > computed else 0
    return RestorePlan(
        copy,
        np.array([segment.first for segment in segments], np.int64),
        until,
        int(pool.blocks_for(1, kind)) * len(copy) + more,
        int(slots_for(int(there.sum()), kind)),
        int(slots_for(int(view.host.tokens[row]), kind)),
    )


def _taken(view: View, row: int, index: int, until: int, left: np.ndarray) -> bool:
    """Whether the other owner's tokens are in the way in the row's block `index`, once the row has
    `until` tokens cached and none missing."""
    pool = view.pool
    full = min(until - index * pool.block_size, pool.block_size)
    return bool((left[pool.blocks_of(row)[:, index]] + full > pool.block_size).any())
