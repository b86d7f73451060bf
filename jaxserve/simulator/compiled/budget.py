"""What still fits into the batch being planned (`sched/unified/batch_budget.py`), in the compiled
simulation: one request at a time, with preemptions to make room."""

from __future__ import annotations

import numpy as np

from jaxserve.simulator.compiled.blocks import PLANES, new_blocks
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.order import before
from jaxserve.simulator.compiled.output_lengths import expected_peak
from jaxserve.simulator.compiled.pages import private
from jaxserve.simulator.compiled.state import ANYBODY, NOBODY, Machine


@kernel
def open_budget(m: Machine, settings: np.record) -> None:
    """Starts a batch: nothing is chosen or preempted."""
    me = m.me[0]
    me.batch_left, me.prefill_left = settings.max_batch_tokens, settings.max_prefill_tokens
    me.rows_left = settings.max_rows
    me.slots_left, me.blocks_left = max(settings.max_rows - me.running, 0), me.free
    me.holders, me.tail = me.running, me.running - 1
    me.chosen = me.victims = me.promised = 0
    me.barrier, me.prefills = ANYBODY, True
    me.scanned = me.first
    me.undecided = 0
    for i in range(me.running):
        me.undecided += m.requests[m.running[i]].held * PLANES
    if settings.promises and me.outputs >= settings.enough:
        for i in range(me.running):
            r = m.requests[m.running[i]]
            r.growth = new_blocks(settings, r, expected_peak(m, r))
            me.promised += r.growth


@kernel
def fits_memory(m: Machine, settings: np.record, r: np.record, reserve: int) -> bool:
    """Whether there are free blocks for a request. A start also needs a slot, and leaves free the
    watermark and the blocks promised to others, unless no other request holds a cache.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        r: The request.
        reserve: Cache tokens that it needs room for.
    """
    me, new = m.me[0], new_blocks(settings, r, reserve)
    if not r.waiting:
        return new <= me.blocks_left
    if me.slots_left < 1 or new > me.blocks_left:
        return False
    peak = new
    if settings.expects and me.outputs >= settings.enough:
        peak = max(new_blocks(settings, r, expected_peak(m, r)), new)
        if settings.promises:
            r.growth = peak
    return me.holders == 0 or peak + me.promised <= me.blocks_left - settings.watermark


@kernel
def add(m: Machine, settings: np.record, number: int, tokens: int, reserve: int) -> None:
    """Adds a request to the batch; it must fit.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        number: The request.
        tokens: Tokens to compute.
        reserve: Cache tokens that it gets room for.
    """
    me, r = m.me[0], m.requests[number]
    new = new_blocks(settings, r, reserve)
    me.batch_left -= tokens
    me.prefill_left -= tokens
    me.rows_left -= 1
    me.blocks_left -= new
    if r.waiting:
        me.slots_left -= 1
        me.holders += 1
    else:
        me.undecided -= r.held * PLANES
    if settings.promises and me.outputs >= settings.enough:
        me.promised += max(r.growth - new, 0) - (0 if r.waiting else r.growth)
    r.decided, r.tokens, r.reserve = True, tokens, reserve
    m.chosen[me.chosen] = number
    me.chosen += 1


@kernel
def make_room(m: Machine, settings: np.record, number: int, reserve: int) -> bool:
    """Preempts running requests until the request fits: less urgent ones that are not in the batch,
    the least urgent first, possibly itself last.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        number: The request.
        reserve: Cache tokens that it needs room for.

    Returns:
        Whether any was preempted.
    """
    me, r = m.me[0], m.requests[number]
    if r.waiting and not _would_fit(m, settings, r, reserve):
        return False
    some = False
    while me.tail >= 0:
        victim = m.running[me.tail]
        v = m.requests[victim]
        if v.decided:
            me.tail -= 1
            continue
        if before(v, r):
            break
        me.tail -= 1
        _preempt(m, settings, victim)
        some = True
        if victim == number or fits_memory(m, settings, r, reserve):
            return True
    return some


@kernel
def _would_fit(m: Machine, settings: np.record, r: np.record, reserve: int) -> bool:
    """Whether a waiting request could start if every possible preemption for it were made."""
    me = m.me[0]
    free, slots, i = me.blocks_left, me.slots_left, me.tail
    while i >= 0:
        v = m.requests[m.running[i]]
        if not v.decided:
            if before(v, r):
                break
            free += private(m, m.running[i])
            slots += 1
        i -= 1
    return slots > 0 and new_blocks(settings, r, reserve) + settings.watermark <= free


@kernel
def _preempt(m: Machine, settings: np.record, victim: int) -> None:
    """Takes its cache away. Requests behind it start later, except for policies that probe."""
    me, v = m.me[0], m.requests[victim]
    me.blocks_left += private(m, victim)
    me.undecided -= v.held * PLANES
    me.slots_left += 1
    me.holders -= 1
    me.promised -= v.growth
    v.decided = True
    m.victims[me.victims] = victim
    me.victims += 1
    if settings.probing or me.barrier == NOBODY:
        return
    if me.barrier == ANYBODY or before(v, m.requests[me.barrier]):
        me.barrier = victim
