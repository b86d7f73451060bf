"""Best-effort requests without targets have no promises to keep, so they lose their caches to
requests with targets that find no memory, or no row, and can be in time."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING


def givers(
    need: np.ndarray, starts: np.ndarray, held: np.ndarray, free: int, slots: int
) -> np.ndarray:
    """How many requests must give up their caches so that the first request finds blocks and a
    place, the first two do, and so on: int64 [m], for as many requests as can find room.

    Args:
        need: int64 [n], blocks that each request takes, in order.
        starts: bool [n], which requests need a place.
        held: int64 [k], blocks that each giver frees, in order.
        free: Free blocks.
        slots: Free places.
    """
    have, blocks, places = np.append(0, held.cumsum()) + free, need.cumsum(), starts.cumsum()
    fit = prefix((blocks <= have[-1]) & (places <= slots + len(held)))
    return np.maximum(np.searchsorted(have, blocks[:fit]), places[:fit] - slots)


def made_for(view: View, asking: np.ndarray, need: np.ndarray, free: int, slots: int) -> np.ndarray:
    """The rows that make room for as many of these requests as possible: running and bare ones
    (`RequestTable.bare`), the newest first.

    Args:
        view: What the policy sees.
        asking: Waiting rows, in order.
        need: int64 [n], blocks that each takes.
        free: Free blocks.
        slots: Requests that may start.

    Returns:
        int64 [k].
    """
    table, pool = view.table, view.pool
    running = table.in_state(RUNNING)
    some = running[table.bare(running)][::-1]
    if not (len(asking) and len(some)):
        return some[:0]
    count = givers(need, np.ones(len(need), bool), pool.private(some), free, slots)
    return some[: int(count[-1])] if len(count) else some[:0]
