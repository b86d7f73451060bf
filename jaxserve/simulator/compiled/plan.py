"""InferMax Algorithm 1 in the compiled simulation: the plan of `sched/unified/unified_policy.py`,
one request at a time, in the same order and with the same outcome. `budget.py` has the checks."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.unified.unified_policy import Reserve
from jaxserve.simulator.compiled.blocks import whole_reserve
from jaxserve.simulator.compiled.budget import add, fits_memory, make_room, open_budget
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.order import before
from jaxserve.simulator.compiled.pages import several
from jaxserve.simulator.compiled.state import ANYBODY, NOBODY, Machine

ANY_PHASE, DECODES, PREFILLS = -1, 0, 1
CHUNK = list(Reserve).index(Reserve.CHUNK)


@kernel
def plan(m: Machine, settings: np.record, groups: np.ndarray) -> None:
    """Fills the batch, group by group. Running requests must be in order."""
    open_budget(m, settings)
    me = m.me[0]
    for g in range(len(groups)):
        group = groups[g]
        if not group.decode and not (me.prefills and me.prefill_left > 0):
            continue
        empty = me.chosen == 0
        phase = ANY_PHASE
        if not settings.mixed_batches:
            phase = _phase_of_first(m, group)
            if not empty:
                phase = DECODES if m.requests[m.chosen[0]].decoding else PREFILLS
        while True:
            _fill(m, settings, group, phase)
            if me.chosen or not empty or phase == ANY_PHASE:
                break
            phase, empty = PREFILLS if phase == DECODES else DECODES, False


@kernel
def _phase_of_first(m: Machine, group: np.record) -> int:
    """The phase of the group's most urgent request; any phase if it is empty."""
    me = m.me[0]
    waits = group.waiting and me.first < me.end
    for i in range(me.running):
        r = m.requests[m.running[i]]
        if not _is_member(r, group, ANY_PHASE):
            continue
        if waits and before(m.requests[m.waiting[me.first]], r):
            break
        return DECODES if r.decoding else PREFILLS
    if not waits:
        return ANY_PHASE
    return DECODES if m.requests[m.waiting[me.first]].decoding else PREFILLS


@kernel
def _is_member(r: np.record, group: np.record, phase: int) -> bool:
    """Whether a running request is in the group, and in the phase."""
    if r.decoding:
        return group.decode and phase != PREFILLS
    return group.prefill and phase != DECODES


@kernel
def _fill(m: Machine, settings: np.record, group: np.record, phase: int) -> None:
    """Adds members of the group in order, as far as they fit."""
    me = m.me[0]
    runs, waits = 0, me.first
    # A waiting request decodes at once if all but its last token is cached.
    queue = group.waiting and (phase != DECODES or settings.reuse)
    passes = settings.probing and settings.reserve != CHUNK and not settings.reuse
    while me.rows_left > 0 and me.batch_left > 0:
        while runs < me.running and not _is_member(m.requests[m.running[runs]], group, phase):
            runs += 1
        if settings.reuse and queue and phase != ANY_PHASE:
            while waits < me.end and m.requests[m.waiting[waits]].decoding != (phase == DECODES):
                waits += 1
        more = queue and waits < me.end and me.prefills
        if more and me.barrier != ANYBODY:
            more = me.barrier != NOBODY and before(
                m.requests[m.waiting[waits]], m.requests[me.barrier]
            )
        if runs < me.running:
            number = m.running[runs]
            if more and before(m.requests[m.waiting[waits]], m.requests[number]):
                number = m.waiting[waits]
                waits += 1
            else:
                runs += 1
        elif more:
            number = m.waiting[waits]
            waits += 1
            more_room = me.undecided if group.preempts else 0
            if passes and m.needs[number] > me.blocks_left + more_room:
                continue  # it would be considered and skipped
        else:
            break
        _consider(m, settings, number, group.preempts)
    if queue:
        me.scanned = max(me.scanned, waits)


@kernel
def _consider(m: Machine, settings: np.record, number: int, preempts: bool) -> None:
    """Adds a request to the batch, whole or cut, if it fits or can be made to."""
    me, r = m.me[0], m.requests[number]
    tokens = r.prompt_len + r.generated - r.computed
    reserve = whole_reserve(settings, r)
    if r.waiting and settings.reuse:
        r.read = several(m, number, r.found)
    while _may_join(m, r):
        if tokens <= me.batch_left and (r.decoding or tokens <= me.prefill_left):
            if fits_memory(m, settings, r, reserve):
                add(m, settings, number, tokens, reserve)
            elif preempts and make_room(m, settings, number, reserve):
                continue
            else:
                _pass_over(m, settings, r)
            return
        room = min(me.batch_left, me.prefill_left)
        if not settings.chunked or room <= 0:
            if not settings.probing or room <= 0:
                me.prefills = False
            return
        if settings.reserve == CHUNK:
            reserve = r.computed + room
        if _joins(m, settings, number, room, reserve, preempts):
            me.prefills = False
        else:
            _pass_over(m, settings, r)
        return


@kernel
def _may_join(m: Machine, r: np.record) -> bool:
    """Whether nothing that has happened in this plan rules it out."""
    me = m.me[0]
    if r.decided or not (me.prefills or r.decoding):
        return False
    if not r.waiting or me.barrier == ANYBODY:
        return True
    return me.barrier != NOBODY and before(r, m.requests[me.barrier])


@kernel
def _joins(
    m: Machine, settings: np.record, number: int, tokens: int, reserve: int, preempts: bool
) -> bool:
    """Adds a prefill, cut to what C and P leave, if there is memory for it."""
    r = m.requests[number]
    while not fits_memory(m, settings, r, reserve):
        if not (preempts and make_room(m, settings, number, reserve)) or r.decided:
            return False
    add(m, settings, number, tokens, reserve)
    return True


@kernel
def _pass_over(m: Machine, settings: np.record, r: np.record) -> None:
    """The request found no memory, or no slot."""
    if r.waiting and not settings.probing:
        m.me[0].barrier = NOBODY
