"""Best-effort requests in the room that real-time ones leave (BROS Algorithm 1, line 17 on)."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policies.bros.blocks import BrosBudget
from jaxserve.sched.policies.bros.packing import BrosBatch, BrosWork


def fill(
    batch: BrosBatch, room: BrosBudget, work: BrosWork, limit: float, *, chunked: bool
) -> None:
    """Adds best-effort requests in order while rows, tokens, blocks and time last.

    If `chunked`, the first prompt that is too long is cut to what the decodes leave; otherwise it
    is skipped, as is a cache that takes too long to restore. Starts leave the watermark free, and
    none overtakes one that found no room for its whole prompt. A running request takes the blocks
    that it lacks from the latest arrivals.

    Args:
        batch: The batch in the making.
        room: Its memory.
        work: What the requests would do, in order.
        limit: Seconds that the whole batch may take.
        chunked: Whether prompts may be cut.
    """
    while len(work):
        work = room.price(work)
        count = batch.fits(work)
        timely = prefix(batch.times(work[:count]) <= limit)
        found = _memory(batch, room, work[:timely])
        taken = work[:found]
        room.allocate(taken)
        batch.add(taken)
        if found == len(work):
            return
        head, work = work[found : found + 1], work[found:]
        if found == timely:  # no rows, tokens or time are left for the head
            if not batch.rows_left or head.cheap[0]:
                return
            if chunked and work.cheap.any():
                fill(batch, room, work[work.cheap], limit, chunked=False)
                work = work[~work.cheap & ~room.is_out(work.rows)]
                continue
            piece = batch.piece(head, limit) if chunked else None
            if piece is None:
                shorter = work.decodes | (work.tokens < head.tokens[0])
                work = work[work.loaded < head.loaded[0] if head.loaded[0] else shorter]
                continue
            head = head if head.starts[0] else piece
            if _memory(batch, room, head):
                room.allocate(piece)
                batch.add(piece)
                return
        if head.starts[0]:
            work = work[~work.starts]
        elif _make_room(room, head):
            work = work[~room.is_out(work.rows)]
        else:
            seq = room.view.table.seq
            work = work[(work.new == 0) | (seq[work.rows] < seq[head.rows[0]])]


def fill_first(
    batch: BrosBatch, room: BrosBudget, rows: np.ndarray, urgent: np.ndarray, *, chunked: bool
) -> None:
    """Adds best-effort requests before real-time ones, in order and however long they take. They
    take blocks and places from other best-effort requests, then from real-time ones, then from the
    last of their own.

    Args:
        batch: The batch in the making.
        room: Its memory.
        rows: Best-effort rows.
        urgent: Real-time rows, the most urgent first.
        chunked: Whether the last prompt may be cut to the tokens of a batch.
    """
    theirs = room.running[~np.isin(room.running, rows)]
    others = theirs[~np.isin(theirs, urgent)]
    victims = [*others[::-1].tolist(), *urgent[np.isin(urgent, theirs)][::-1].tolist()]
    victims += rows[np.isin(rows, room.running)][::-1].tolist()
    while True:
        work = room.price(room.offers_first(rows))
        count = batch.fits(work)
        work, head = work[:count], work[count : count + 1]
        piece = batch.piece(head, np.inf, work) if chunked and len(head) else None
        work = work if piece is None else BrosWork.joined([work, piece])
        fits = (np.cumsum(work.new) <= room.free) & (np.cumsum(work.starts) <= room.slots)
        found = prefix(fits)
        room.allocate(work[:found])
        batch.add(work[:found])
        rows = work.rows[found:]
        if not len(rows):
            return
        victims = [row for row in victims if not batch.chosen[row] and row != rows[0]]
        if not victims:
            return
        room.preempt(victims[0])
        rows = rows[rows != victims.pop(0)]


def _memory(batch: BrosBatch, room: BrosBudget, work: BrosWork) -> int:
    """How many requests, in order, find their blocks and a place."""
    ok = np.cumsum(work.new) <= room.free
    ok &= ~work.starts | (np.cumsum(work.starts) <= room.slots)
    starts = np.flatnonzero(work.starts)
    grown = np.cumsum(np.where(work.starts, 0, work.new))[starts]
    alone = not len(room.running) and not batch.parts
    ok[starts] &= room.starting(work.new[starts], room.free - grown, alone=alone)
    return prefix(ok)


def _make_room(room: BrosBudget, head: BrosWork) -> bool:
    """Drops the latest best-effort requests behind the head until the head has its blocks. Returns
    whether it has."""
    seq = room.view.table.seq
    rows = room.best_effort()
    rows = rows[seq[rows] > seq[head.rows[0]]]
    have = np.cumsum(room.returned_by(rows)) + room.free
    if not len(rows) or have[-1] < head.new[0]:
        return False
    for row in rows[: int(np.searchsorted(have, head.new[0])) + 1].tolist():
        room.preempt(row)
    return True
