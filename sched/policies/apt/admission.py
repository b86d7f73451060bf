"""Who of the waiting starts in a step of Apt-Serve, and in which kind of cache.

Rows are rows of the table, in order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.kinds import CacheKind
from jaxserve.sched.policies.apt.knapsack import Choice, Offers, choose, fit
from jaxserve.sched.policies.apt.value import Value
from jaxserve.sched.policy import View

_KV, _HIDDEN = int(CacheKind.KV), int(CacheKind.HIDDEN)


@dataclass(frozen=True)
class StartBudget:
    """What there is for those who start: free blocks, tokens of the batch, and slots, requests.
    spare: blocks that those who are late leave free. chunked: the last prompt may be cut."""

    blocks: int
    tokens: int
    slots: int
    spare: int = 0
    chunked: bool = False


@dataclass(frozen=True)
class Starts:
    """Arrays [n], most worthy first: rows, tokens that each computes now, and `CacheKind`s."""

    rows: np.ndarray
    tokens: np.ndarray
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __add__(self, others: Starts) -> Starts:
        return Starts(
            np.concatenate([self.rows, others.rows]),
            np.concatenate([self.tokens, others.tokens]),
            np.concatenate([self.kinds, others.kinds]),
        )


def start(view: View, rows: np.ndarray, worth: Value, room: StartBudget) -> Starts:
    """By value; who has missed its target already comes after all others and leaves some memory
    to those who will arrive next, or the fallback would come too late for them."""
    if not room.spare or not np.count_nonzero(worth.late):
        return _start(view, rows, worth, room)
    fresh = np.flatnonzero(~worth.late)
    first = _start(view, rows[fresh], worth.of(fresh), room)
    known = view.table.prompt_len[first.rows] + view.table.generated[first.rows]
    used = view.pool.blocks_for(known, first.kinds)
    left = StartBudget(
        room.blocks - int(used.sum()) - room.spare,
        room.tokens - int(first.tokens.sum()),
        room.slots - len(first),
        chunked=room.chunked,
    )
    late = np.flatnonzero(worth.late)
    return first + _start(view, rows[late], worth.of(late), left)


def _start(view: View, rows: np.ndarray, worth: Value, room: StartBudget) -> Starts:
    if min(room.blocks, room.tokens, room.slots) <= 0 or not len(rows):
        return Starts(rows[:0], rows[:0], rows[:0])
    if not room.chunked:
        short = np.flatnonzero(worth.tokens <= room.tokens)
        rows, worth = rows[short], worth.of(short)
    choice = _choose(view, worth, room.blocks)
    order = choice.served
    tokens = worth.tokens[order]
    before = np.cumsum(tokens) - tokens
    if len(order) > room.slots or int(tokens.sum()) > room.tokens:
        # Not all of them: what the others leave of memory goes to these.
        if room.chunked:
            keep = np.flatnonzero(before < room.tokens)
        else:
            keep = fit(np.arange(len(order)), tokens, room.tokens)
        kept = np.sort(order[keep[: room.slots]])
        rows, worth = rows[kept], worth.of(kept)
        choice = _choose(view, worth, room.blocks)
        order = choice.served
        tokens = worth.tokens[order]
        before = np.cumsum(tokens) - tokens
    # Kept ones may be in another order now, and the last to be cut another; who gets none waits.
    tokens = np.minimum(tokens, room.tokens - before)
    order, tokens = order[tokens > 0], tokens[tokens > 0]
    return Starts(rows[order], tokens, choice.kinds[order])


def _choose(view: View, worth: Value, free: int) -> Choice:
    kv = view.pool.blocks_for(worth.tokens)
    if worth.penalty is None:
        return choose(Offers(worth.value, kv), free)
    hidden = view.pool.blocks_for(worth.tokens, CacheKind.HIDDEN)
    return choose(Offers(worth.value, kv, hidden, worth.penalty), free)


def start_in_turn(view: View, rows: np.ndarray, worth: Value, room: StartBudget) -> Starts:
    """First come, first served: nobody overtakes who does not fit. Hidden caches let more start;
    what memory they leave makes K and V of the first."""
    tokens = worth.tokens
    most, least = view.pool.blocks_for(tokens), view.pool.blocks_for(tokens, _HIDDEN)
    if worth.penalty is None:
        least = most
    before = np.cumsum(tokens) - tokens
    fits = (np.cumsum(least) <= room.blocks) & (np.arange(len(rows)) < room.slots)
    fits &= (before < room.tokens) if room.chunked else (before + tokens <= room.tokens)
    count = len(rows) if fits.all() else int(np.argmin(fits))
    kinds = np.full(count, _KV)
    if worth.penalty is not None:
        left = room.blocks - int(least[:count].sum())
        more = most[:count] - least[:count]
        kv = (np.cumsum(more) <= left) & (worth.penalty[:count] > 0)
        kinds = np.where(kv, _KV, _HIDDEN)
    return Starts(rows[:count], np.minimum(tokens, room.tokens - before)[:count], kinds)
