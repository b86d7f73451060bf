"""The policy's order in the compiled simulation: which of two requests comes first, and the sorted
lists of running and of waiting requests.

As in `unified.ranking`: by key, then by arrival. If preempted requests wait at the head (requeue),
running requests come before waiting ones. Running requests are then ordered by arrival, and by
their place in their last batch; of the waiting ones the preempted come first, starting with the
latest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.simulator.compiled.blocks import new_blocks, whole_reserve
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.pages import find
from jaxserve.simulator.compiled.state import Machine

# Parts of a `CompiledSpec`: its key, and the lead and the later key of its lapse.
DUE, LEAD, LATER = range(3)
Keys = Callable[[Any, int], float]


@kernel
def before(a: np.record, b: np.record) -> bool:
    """Whether request a is more urgent than b."""
    if a.key != b.key:
        return a.key < b.key
    if a.behind != b.behind:
        return a.behind < b.behind
    if a.first != b.first:
        return a.first < b.first
    return a.second < b.second


@kernel
def refresh(m: Machine, settings: np.record, key: Keys) -> None:
    """Updates the order: sorts the running requests, which are nearly sorted already, notes which
    of them decode, and moves waiting requests whose cached prefix has changed or whose keys have
    lapsed."""
    requests, running = m.requests, m.running
    if settings.reuse and m.me[0].moved:
        _note_found(m, settings, key)
    if settings.lapses and m.me[0].clock > m.me[0].next_lapse:
        _lapse(m, key)
    for place in range(m.me[0].running):
        number = running[place]
        r = requests[number]
        r.decoding = r.generated > 0 and r.prompt_len + r.generated - r.computed == 1
        if settings.requeue:
            r.behind, r.first, r.second = 0, r.arrival, r.last_batch_order
        if settings.keyed:
            r.key = key(r, DUE)
        if settings.lapses and m.me[0].clock > r.key - key(r, LEAD):
            r.key = max(r.key, key(r, LATER))
        to = place
        while to > 0 and before(r, requests[running[to - 1]]):
            running[to] = running[to - 1]
            to -= 1
        running[to] = number


@kernel
def wait(m: Machine, settings: np.record, key: Keys, number: int) -> None:
    """Inserts a request into the waiting list.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        key: The policy's key.
        number: The request.
    """
    r, me = m.requests[number], m.me[0]
    r.waiting, r.read, me.moved = True, 0, True
    r.decoding = r.generated > 0 and r.prompt_len + r.generated - r.computed == 1
    m.needs[number] = new_blocks(settings, r, whole_reserve(settings, r))
    r.behind, r.first, r.second = 0, 0.0, r.seq
    if settings.requeue:
        r.behind, r.first = 1, -float(r.preempted_order)
    if settings.keyed:
        r.key = key(r, DUE)
    if settings.lapses:
        m.lapses[number] = r.key - key(r, LEAD)
        me.next_lapse = min(me.next_lapse, m.lapses[number])
    _take_place(m, number)


@kernel
def _note_found(m: Machine, settings: np.record, key: Keys) -> None:
    """Counts cached prefixes of waiting requests as computed."""
    me, count = m.me[0], 0
    for i in range(me.first, me.end):
        number = m.waiting[i]
        find(m, settings, number)
        r = m.requests[number]
        if r.computed != r.found * settings.block_size:
            r.computed = r.found * settings.block_size
            r.waiting = False
            m.scratch[count] = number
            count += 1
    if count:
        leave_waiting(m, me.end)
    for i in range(count):
        wait(m, settings, key, m.scratch[i])
    me.moved = False


@kernel
def _lapse(m: Machine, key: Keys) -> None:
    """Moves waiting requests whose keys have lapsed to their new places."""
    me, count = m.me[0], 0
    me.next_lapse = math.inf
    for i in range(me.first, me.end):
        number = m.waiting[i]
        if me.clock > m.lapses[number]:
            m.lapses[number] = math.inf
            m.requests[number].waiting = False
            m.scratch[count] = number
            count += 1
        else:
            me.next_lapse = min(me.next_lapse, m.lapses[number])
    if count:
        leave_waiting(m, me.end)
    for i in range(count):
        r = m.requests[m.scratch[i]]
        r.waiting = True
        r.key = max(r.key, key(r, LATER))
        _take_place(m, m.scratch[i])


@kernel
def _take_place(m: Machine, number: int) -> None:
    r, me = m.requests[number], m.me[0]
    low, high = me.first, me.end
    while low < high:
        middle = (low + high) // 2
        if before(m.requests[m.waiting[middle]], r):
            low = middle + 1
        else:
            high = middle
    _insert(m, low, number)


@kernel
def _insert(m: Machine, place: int, number: int) -> None:
    """Moves the requests before or behind the place, whichever are fewer."""
    me, waiting = m.me[0], m.waiting
    if me.first == 0 or me.end == len(waiting):
        place += _centre(m)
    if place - me.first < me.end - place:
        for i in range(me.first, place):
            waiting[i - 1] = waiting[i]
        me.first -= 1
        waiting[place - 1] = number
    else:
        for i in range(me.end, place, -1):
            waiting[i] = waiting[i - 1]
        me.end += 1
        waiting[place] = number


@kernel
def _centre(m: Machine) -> int:
    """Centres the list in its array. Returns the shift."""
    me, count = m.me[0], m.me[0].end - m.me[0].first
    first = (len(m.waiting) - count) // 2
    moved = first - me.first
    for i in range(count) if moved < 0 else range(count - 1, -1, -1):
        m.waiting[first + i] = m.waiting[me.first + i]
    me.first, me.end = first, first + count
    return moved


@kernel
def leave_waiting(m: Machine, until: int) -> None:
    """Removes requests that no longer wait from the list; all of them are before `until`."""
    me, waiting = m.me[0], m.waiting
    to = until
    for i in range(until - 1, me.first - 1, -1):
        if m.requests[waiting[i]].waiting:
            to -= 1
            waiting[to] = waiting[i]
    me.first = to


@kernel
def leave_running(m: Machine, running_state: int) -> None:
    """Removes requests that are no longer in that state from the list."""
    me, running, to = m.me[0], m.running, 0
    for i in range(me.running):
        if m.requests[running[i]].state == running_state:
            running[to] = running[i]
            to += 1
    me.running = to
