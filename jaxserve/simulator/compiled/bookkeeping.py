"""Books planned batches and their tokens in the compiled simulation (`Scheduler.schedule`,
`release_finished` and `finish`)."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.state.request_table import DRAINING, FREE, RUNNING, WAITING
from jaxserve.simulator.compiled.blocks import PLANES, a_plane
from jaxserve.simulator.compiled.front import lately
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.order import Keys, leave_running, leave_waiting, wait
from jaxserve.simulator.compiled.output_lengths import learn
from jaxserve.simulator.compiled.pages import evict, pin, register, release
from jaxserve.simulator.compiled.state import Machine


@kernel
def book(m: Machine, settings: np.record, key: Keys) -> int:
    """Books the planned preemptions and batch. Returns the number of requests that start, or start
    again."""
    me = m.me[0]
    if settings.reuse:
        for i in range(me.chosen):
            if m.requests[m.chosen[i]].waiting:
                pin(m, settings, m.chosen[i])
    for i in range(me.victims):
        _lose_cache(m, m.victims[i])
    if me.victims:
        leave_running(m, RUNNING)
    _note_progress(m)
    _grow(m, settings)
    started = me.again = 0
    for i in range(me.chosen):
        r = m.requests[m.chosen[i]]
        r.decided = False
        me.again += max(min(r.computed + r.tokens, r.lost_from) - r.computed, 0)
        r.computed += r.tokens
        if settings.reuse:
            register(m, settings, m.chosen[i], False)
        if r.waiting:
            r.waiting, r.state = False, RUNNING
            m.running[me.running] = m.chosen[i]
            me.running += 1
            started += 1
    if started:
        leave_waiting(m, me.scanned)
    for i in range(me.victims):
        wait(m, settings, key, m.victims[i])
    _note_order(m)
    return started


@kernel
def _grow(m: Machine, settings: np.record) -> None:
    """Allocates the batch's blocks."""
    me, blocks = m.me[0], 0
    for i in range(me.chosen):
        r = m.requests[m.chosen[i]]
        more = max(a_plane(r.reserve, settings.block_size) - r.held, 0)
        r.held += more
        blocks += more * PLANES
    evict(m, blocks - (me.free - me.unread))
    me.free -= blocks


@kernel
def _note_progress(m: Machine) -> None:
    """`Progress.note`; before the batch is booked."""
    me = m.me[0]
    for i in range(me.chosen):
        r = m.requests[m.chosen[i]]
        if r.computed + r.tokens > r.lost_from:
            me.got_on += 1
            me.most_losses = 0
            return
    for i in range(me.victims):
        r = m.requests[m.victims[i]]
        r.losses = r.losses + 1 if r.losses_since == me.got_on else 1
        r.losses_since = me.got_on
        me.most_losses = max(me.most_losses, r.losses)


@kernel
def _lose_cache(m: Machine, number: int) -> None:
    me, r = m.me[0], m.requests[number]
    me.preempted += 1
    me.gone += 1
    r.preempted_order = me.preempted
    r.preemptions += 1
    r.lost_from = max(r.lost_from, r.computed)
    release(m, number)
    r.computed = r.growth = 0
    r.state, r.decided = WAITING, False


@kernel
def _note_order(m: Machine) -> None:
    """Records the order of requests in the batch, single tokens first."""
    me = m.me[0]
    for single in (True, False):
        for i in range(me.chosen):
            r = m.requests[m.chosen[i]]
            if (r.tokens == 1) == single:
                r.last_batch_order = me.batch_order
                me.batch_order += 1


@kernel
def sample(m: Machine, settings: np.record) -> None:
    """Requests with all known tokens in the cache sample another token, which is in flight. Those
    whose last token is launched release their blocks."""
    me = m.me[0]
    if settings.reuse:
        for i in range(me.chosen):
            register(m, settings, m.chosen[i], True)
    flying = m.flying[me.side]
    me.flying = drained = 0
    for i in range(me.chosen):
        r = m.requests[m.chosen[i]]
        if r.computed < r.prompt_len + r.generated:
            continue
        r.generated += 1
        flying[me.flying] = m.chosen[i]
        me.flying += 1
        if r.generated >= r.max_tokens:
            release(m, m.chosen[i])
            r.state = DRAINING
            drained += 1
    if drained:
        leave_running(m, RUNNING)


@kernel
def receive(
    m: Machine, settings: np.record, key: Keys, side: int, count: int, token_times: np.ndarray
) -> None:
    """The tokens of a step reach the host. Tokens of requests that have ended are dropped.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        key: The policy's key.
        side: The row of `m.flying` with the step's requests.
        count: Number of these requests.
        token_times: Token times of all requests; filled in.
    """
    me = m.me[0]
    stopped = requeued = firsts = in_time = ends = tokens = 0
    for i in range(count):
        number = m.flying[side, i]
        r = m.requests[number]
        if r.state == FREE:
            continue
        if r.received == 0:
            firsts += 1
            in_time += me.clock - r.arrival <= r.ttft
        token_times[r.offset + r.received] = me.clock
        r.received += 1
        r.last_token = me.clock
        if r.received >= r.output_len:
            stopped += r.state == RUNNING
            requeued += r.state == WAITING
            ends += 1
            tokens += r.output_len
            _end(m, settings, number)
        elif r.state == WAITING and settings.keyed:
            requeued += 1
        elif r.state == RUNNING and settings.reuse:
            register(m, settings, number, True)
    if stopped:
        leave_running(m, RUNNING)
    if requeued:
        _wait_again(m, settings, key, side, count)
    if settings.looks:
        _learn(me, ends, tokens, firsts, in_time)


@kernel
def _learn(me: np.record, ends: int, tokens: int, firsts: int, in_time: int) -> None:
    """`take_snapshot.Lately`."""
    if ends:
        me.mean_output, me.seen_outputs = lately(me.mean_output, me.seen_outputs, ends, tokens)
    if firsts:
        me.attainment, me.seen_firsts = lately(me.attainment, me.seen_firsts, firsts, in_time)


@kernel
def _end(m: Machine, settings: np.record, number: int) -> None:
    r = m.requests[number]
    release(m, number)
    r.state, r.waiting = FREE, False
    m.me[0].live -= 1
    m.me[0].ended += 1
    if settings.expects:
        learn(m, r.received, r.received >= r.max_tokens)


@kernel
def _wait_again(m: Machine, settings: np.record, key: Keys, side: int, count: int) -> None:
    """Updates waiting requests that have just received tokens: some have ended, and the keys of
    others have changed."""
    for i in range(count):
        r = m.requests[m.flying[side, i]]
        if r.state == WAITING:
            r.waiting = False
    leave_waiting(m, m.me[0].end)
    for i in range(count):
        number = m.flying[side, i]
        if m.requests[number].state == WAITING:
            wait(m, settings, key, number)
