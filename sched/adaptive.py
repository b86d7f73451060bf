"""The steps of an Apt-Serve plan: what requests are worth, who starts, who goes on, who becomes KV.

`sched/policies/aptserve.py` puts them together. Rows are rows of the table, in order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost_model import BatchFeatures
from jaxserve.sched.hybrid import NOT_SERVED, Choice, Offers, choose, fit
from jaxserve.sched.kinds import PLANES, CacheKind
from jaxserve.sched.policy import View
from jaxserve.sched.table import RUNNING, WAITING

LEAST = 1e-3  # seconds: who has just had a token is still worth more than who is late for good
NEAR_ZERO = 1e-6  # the share of its value that a late request keeps (Apt-Serve section 4.2)
_KV, _HIDDEN = CacheKind.KV, CacheKind.HIDDEN
_PLANES = np.asarray(PLANES)


@dataclass(frozen=True)
class Worth:
    """Of rows: pending, seconds without a token; value and penalty as in `Offers`; late: which
    have missed their target. Arrays [n]; tokens: what each has cached after its next step."""

    pending: np.ndarray
    value: np.ndarray
    penalty: np.ndarray | None
    late: np.ndarray
    tokens: np.ndarray

    def of(self, chosen: np.ndarray) -> Worth:
        """Those that a mask or indices choose."""
        penalty = None if self.penalty is None else self.penalty[chosen]
        return Worth(
            self.pending[chosen],
            self.value[chosen],
            penalty,
            self.late[chosen],
            self.tokens[chosen],
        )


def weigh(view: View, rows: np.ndarray, clock: float, rho: float | None, decay: float) -> Worth:
    """Eq. 5 and 6, with the fallback for those that are late. clock: seconds, when the planned step
    starts. rho: None for K and V alone. decay: share of its value that a late request keeps; 0
    stands for next to nothing.

    Late is who waits for its next token for longer than its target now. That an earlier token was
    late is not in the table, so a request that has caught up counts as in time again.
    """
    table = view.table
    # Before the first token, last_token is the arrival. A token that is on its way counts as there.
    flying = table.generated[rows] > table.received[rows]
    pending = np.where(flying, 0.0, np.maximum(clock - table.last_token[rows], 0.0))
    late = pending > np.where(table.received[rows] == 0, table.ttft[rows], table.tbt[rows])
    tokens = table.prompt_len[rows] + table.generated[rows]
    value, penalty = np.maximum(pending, LEAST), None
    if rho is not None:
        number = len(table.in_state(RUNNING)) + len(table.in_state(WAITING))
        penalty = number * rho * tokens
    if np.count_nonzero(late):
        value[late] *= decay or NEAR_ZERO
        if penalty is not None:
            # Next to nothing, it is not worth that it delays others; decayed, all of it is.
            shrinks = late if decay else late & (penalty < 0)
            penalty = np.where(shrinks, penalty * (decay or NEAR_ZERO), penalty)
    return Worth(pending, value, penalty, late, tokens)


def in_flight(view: View, running: np.ndarray) -> float:
    """Seconds that the step on the device takes if it is one of prefills, and others wait for it;
    0 where nobody can say. Times at which tokens arrived do not show it yet."""
    table = view.table
    flying = running[table.generated[running] > table.received[running]]
    if view.cost_model is None or len(flying) == len(running):
        return 0.0
    if not np.count_nonzero(table.generated[flying] == 1):
        return 0.0
    counts = table.computed[flying]
    nothing = np.zeros_like(counts)
    features = BatchFeatures.of(counts, nothing, nothing > 0)
    return float(view.cost_model.batch_time(features))


def start(
    view: View, rows: np.ndarray, worth: Worth, *, free: int, room: int, slots: int, chunked: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Who of the waiting starts: rows, tokens, kinds, most worthy first. free: blocks; room: tokens
    that the batch takes, the last prompt cut to it if chunked; slots: requests."""
    if min(free, room, slots) <= 0:
        return rows[:0], rows[:0], rows[:0]
    if not chunked:
        short = worth.tokens <= room
        rows, worth = rows[short], worth.of(short)
    choice = _choose(view, worth, free)
    order = _in_order(choice)
    tokens = worth.tokens[order]
    before = np.cumsum(tokens) - tokens
    if len(order) > slots or (len(order) and before[-1] + tokens[-1] > room):
        # Not all of them: what the others leave of memory goes to these.
        keep = (
            np.flatnonzero(before < room) if chunked else fit(np.arange(len(order)), tokens, room)
        )
        keep = np.sort(order[keep[:slots]])
        rows, worth = rows[keep], worth.of(keep)
        choice = _choose(view, worth, free)
        order = _in_order(choice)
        tokens = worth.tokens[order]
        before = np.cumsum(tokens) - tokens
    tokens = np.minimum(tokens, room - before)
    order, tokens = order[tokens > 0], tokens[tokens > 0]
    return rows[order], tokens, choice.kinds[order]


def _choose(view: View, worth: Worth, free: int) -> Choice:
    hidden = -(-worth.tokens // view.pool.block_size)
    if worth.penalty is None:
        return choose(Offers(worth.value, 2 * hidden), free)
    return choose(Offers(worth.value, 2 * hidden, hidden, worth.penalty), free)


def _in_order(choice: Choice) -> np.ndarray:
    served = np.flatnonzero(choice.kinds != NOT_SERVED)
    return served[np.argsort(-choice.gain[served], kind="stable")]


def start_in_turn(
    view: View, rows: np.ndarray, worth: Worth, *, free: int, room: int, slots: int, chunked: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `start`, first come, first served: nobody overtakes who does not fit. Hidden caches let
    more start; what memory is left makes KV of the first."""
    tokens = worth.tokens
    blocks = -(-tokens // view.pool.block_size)
    most = blocks if worth.penalty is not None else 2 * blocks
    before = np.cumsum(tokens) - tokens
    fits = (np.cumsum(most) <= free) & (np.arange(len(rows)) < slots)
    fits &= (before < room) if chunked else (before + tokens <= room)
    count = len(rows) if fits.all() else int(np.argmin(fits))
    kinds = np.full(count, _KV)
    if worth.penalty is not None:
        left = free - int(blocks[:count].sum())
        kv = (np.cumsum(blocks[:count]) <= left) & (worth.penalty[:count] > 0)
        kinds = np.where(kv, _KV, _HIDDEN)
    return rows[:count], np.minimum(tokens, room - before)[:count], kinds.astype(np.int64)


def go_on(
    view: View, rows: np.ndarray, worth: Worth, in_turn: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Who of the running keeps its cache and grows it: a mask [n], the rows to evict, and the
    blocks left. Everybody, as long as the blocks last; else the greedy over the whole pool decides,
    and of the others as few as possible are evicted and the rest pauses. in_turn: the last to
    arrive is the first to go."""
    table, pool = view.table, view.pool
    kinds = table.kind[rows]
    need = pool.needed(rows, worth.tokens, kinds)
    free, total = pool.num_free, int(need.sum())
    everybody = np.ones(len(rows), bool)
    if total <= free:
        return everybody, rows[:0], free - total
    held = pool.held[rows] * _PLANES[kinds]
    value = worth.value
    if in_turn:
        gain = -np.arange(len(rows), dtype=np.float64)
        kept = fit(np.arange(len(rows)), held + need, free + int(held.sum()))
    else:
        if worth.penalty is not None:
            hidden = kinds == _HIDDEN
            value = np.where(hidden, np.maximum(value - worth.penalty, value * NEAR_ZERO), value)
        choice = choose(Offers(value, held + need), free + int(held.sum()))
        gain, kept = choice.gain, np.flatnonzero(choice.kinds != NOT_SERVED)
    goes = np.zeros(len(rows), bool)
    goes[kept] = True
    left = free - int(need[kept].sum())
    others = np.flatnonzero(~goes)
    others = others[np.argsort(gain[others], kind="stable")]  # the least worthy first
    evicted = others[:0]
    if left < 0:
        returned = np.cumsum(held[others])
        count = int(np.searchsorted(returned, -left)) + 1
        evicted = others[:count]
        left += int(returned[count - 1])
    more = fit(others[len(evicted) :][::-1], need, left)
    goes[more] = True
    return goes, rows[evicted], left - int(need[more].sum())


def to_kv(
    view: View, rows: np.ndarray, tokens: np.ndarray, waiting: np.ndarray, left: int, headroom: int
) -> np.ndarray:
    """Which of these running rows turn their hidden caches into K and V, a mask [n]: the first to
    arrive first, as far as memory lasts for them, for one more block a plane of all that run, for
    the K and V of all that wait, and for the headroom. left: blocks, once they have grown."""
    table, pool = view.table, view.pool
    hidden = table.kind[rows] == _HIDDEN
    chosen = np.zeros(len(rows), bool)
    if not np.count_nonzero(hidden):
        return chosen
    known = table.prompt_len[waiting] + table.generated[waiting]
    left -= headroom + 2 * len(rows) + 2 * int((-(-known // pool.block_size)).sum())
    if left > 0:
        more = -(-tokens // pool.block_size)
        more = np.maximum(more, pool.held[rows])
        chosen[fit(np.flatnonzero(hidden), more, left)] = True
    return chosen
