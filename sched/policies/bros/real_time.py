"""Real-time requests in order of remaining time (BROS Algorithm 1, lines 3 to 15)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policies.bros.blocks import BrosBudget
from jaxserve.sched.policies.bros.packing import BrosBatch, BrosWork, alone
from jaxserve.sched.policies.bros.urgency import Queue


class Late(enum.Enum):
    """The position of prompts whose deadline cannot be met."""

    IN_PLACE = "by the time they have left, so first of all (the paper)"
    LAST = "behind all others"
    TURN = "one of them behind the decodes, before all other prompts; the others behind all"


_BEHIND = 3  # all others


def _ranks(place: Late, late: np.ndarray, decodes: np.ndarray) -> np.ndarray:
    """Rank of each request, int64 [n]; lower ranks come first, whatever the remaining time. late,
    decodes: bool [n], in order of remaining time."""
    if place is Late.IN_PLACE:
        return np.zeros(len(late), np.int64)
    ranks = np.where(late, _BEHIND, 0)
    if place is Late.TURN:
        ranks[~late & ~decodes] = 2
        ranks[np.flatnonzero(late)[:1]] = 1
    return ranks


@dataclass(frozen=True)
class Rules:
    """How real-time requests are packed.

    Attributes:
        late: Position of prompts that cannot meet their deadline.
        chunked: Whether prompts may be cut.
        spare: Seconds beyond the batch that a request must have left to give up its place.
        headroom: Longest time to which late prompts and best-effort requests may extend the batch,
        seconds.
    """

    late: Late
    chunked: bool
    spare: float
    headroom: float


@dataclass(frozen=True)
class Packed:
    """The outcome of `pack`.

    Attributes:
        early: Whether a request that is not late was left out or cut.
        limit: Longest time to which best-effort requests may extend the batch, seconds: until the
        most urgent deadline that a batch of one request could meet, or until the headroom ends.
        waits: Whether there are late prompts and none of them got any tokens.
        started: Number of requests that start.
    """

    early: bool = False
    limit: float = np.inf
    waits: bool = False
    started: int = 0


def pack(
    batch: BrosBatch, room: BrosBudget, queue: Queue, others: np.ndarray, rules: Rules
) -> Packed:
    """Adds real-time requests in order until the batch would miss the most urgent deadline, and
    cuts the prompt that would cause that. Deadlines that cannot be met even by the present batch
    are ignored. At least one request is served.

    Args:
        batch: The batch being built.
        room: Its memory.
        queue: Real-time requests, the most urgent first.
        others: Best-effort rows in their order. In a full batch they get the places of real-time
        requests that have more to restore from the host, and time left.
        rules: How to pack.
    """
    view = batch.view
    here = ~room.is_out(queue.rows)
    rows, residual = queue.rows[here], queue.residual[here]
    if not len(rows):
        return Packed()
    work = room.price(BrosWork.of_rows(view, rows))
    savable = residual >= alone(view, work)
    limit = first = float(residual[savable].min(initial=np.inf))
    if len(batch):
        savable = residual >= batch.with_each(work)
        first = float(np.min(residual[savable], initial=np.inf))
    late = ~savable & ~work.decodes
    ranks = _ranks(rules.late, late, work.decodes)
    order = np.argsort(ranks, kind="stable")
    chosen = order[room.affordable(work[order], ranks[order] == _BEHIND)]
    ready = work[chosen]
    fits = batch.fits(ready)
    times = batch.times(ready[:fits])
    count = prefix(times <= first)
    early = bool(savable[chosen[count:fits]].any())
    done, head = ready[:count], ready[count : count + 1]
    taken = float(times[count - 1]) if count else batch.seconds
    headroom = rules.headroom if taken <= rules.headroom else np.inf  # the headroom is lost already
    piece = None
    if len(head) and not head.decodes[0] and rules.chunked:
        most = [min(first, headroom) if late[chosen[count]] else first]
        most += [first, np.inf] if count == 0 else []  # at least one is served
        found = (batch.piece(head, seconds, done) for seconds in most)
        piece = next((one for one in found if one is not None), None)
    elif count == 0:
        piece = head[:fits]
    if piece is not None and len(piece):
        done, chosen = BrosWork.joined([done, piece]), chosen[: count + len(piece)]
    else:
        chosen = chosen[:count]
        if count == batch.rows_left:
            slack = residual[chosen] - taken - rules.spare
            stays = _stay(batch, done, slack, others)
            done, chosen = done[stays], chosen[stays]
    behind = np.delete(work.rows[order], np.flatnonzero(np.isin(order, chosen)))
    batch.add(room.provide(done, behind))
    waits = bool(late.any() and not late[chosen].any())
    return Packed(early, min(limit, headroom), waits, int(done.starts.sum()))


def _stay(batch: BrosBatch, work: BrosWork, slack: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of these stay in a full batch, a mask [n], and do not give their places to best-effort
    requests that have less to restore (Algorithm 1, lines 26 to 33). slack: spare seconds of each;
    the least urgent are last."""
    mask = np.ones(len(work), bool)
    able = np.flatnonzero((work.loaded > 0) & (slack > 0))[::-1]
    others = others[~batch.chosen[others]][: len(able)]
    able = able[: len(others)]
    theirs = slots_for(batch.view.host.tokens[others])
    mask[able[: prefix(work.loaded[able] > theirs)]] = False
    return mask
