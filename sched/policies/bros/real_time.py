"""Real-time requests in order of the time they have left (BROS Algorithm 1, lines 3 to 15)."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.block_sizes import slots_for
from jaxserve.sched.imagined import prefix
from jaxserve.sched.policies.bros.blocks import Room
from jaxserve.sched.policies.bros.packing import Batch, Work, alone
from jaxserve.sched.policies.bros.urgency import Queue


def pack(
    batch: Batch, room: Room, queue: Queue, others: np.ndarray, *, late_last: bool, spare: float
) -> tuple[bool, float]:
    """Adds real-time requests in order until the batch would end after the most urgent deadline.
    None waits for one that cannot be met even with nobody else added to the batch, and one request
    at least is served. Whether it would, and the seconds until the most urgent deadline that a
    batch of one's own could meet: best-effort requests wait for that.

    others: best-effort rows in the order in which they are served; in a full batch they get the
    places of real-time ones that have more on the host, and more than `spare` seconds after the
    batch.
    late_last: whether prompts whose deadline cannot be met are considered last."""
    view = batch.view
    here = ~room.is_out(queue.rows)
    rows, residual = queue.rows[here], queue.residual[here]
    if not len(rows):
        return False, np.inf
    work = Work.of(view, rows)
    savable = residual >= alone(view, work)
    limit = first = float(residual[savable].min(initial=np.inf))
    if len(batch):
        savable = residual >= batch.with_each(work)
        first = float(np.min(residual[savable], initial=np.inf))
    if late_last:
        order = np.argsort(~savable & ~work.decodes, kind="stable")
        work, residual = work[order], residual[order]
    chosen = np.flatnonzero(room.affordable(work))
    chosen = chosen[: batch.fits(work[chosen])]
    times = batch.times(work[chosen])
    count = prefix(times <= first)
    early = count < len(chosen)
    if early:
        chosen = chosen[: max(count, 1)]
    elif len(chosen) and len(chosen) == batch.rows_left:
        chosen = chosen[_stay(batch, work[chosen], residual[chosen] - times[-1] - spare, others)]
    ready = work[chosen]
    batch.add(room.provide(ready, np.delete(work.rows, chosen)))
    return early, limit


def _stay(batch: Batch, work: Work, slack: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of these stay in a full batch, a mask [n], and do not give their places to best-effort
    requests that have less to bring back (Algorithm 1, lines 26 to 33). slack: seconds that each
    has besides; the least urgent are last."""
    mask = np.ones(len(work), bool)
    able = np.flatnonzero((work.loaded > 0) & (slack > 0))[::-1]
    others = others[~batch.chosen[others]][: len(able)]
    able = able[: len(others)]
    theirs = slots_for(batch.view.host.tokens[others])
    mask[able[: prefix(work.loaded[able] > theirs)]] = False
    return mask
