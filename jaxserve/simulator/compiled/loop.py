"""The event loop of the compiled simulation: `replica/event_loop.py` and `replica/replica.py`, in
machine code."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.host_overhead import BURST
from jaxserve.sched.cost.reachability import JUST_MISSED
from jaxserve.sched.progress import FUTILE
from jaxserve.sched.routing.take_snapshot import PACE
from jaxserve.sched.state.request_table import RESUMED, State
from jaxserve.simulator.compiled.bookkeeping import book, receive, sample
from jaxserve.simulator.compiled.cost import (
    Costs,
    batch_time,
    features,
    pace,
    prefill_time,
    scattered,
)
from jaxserve.simulator.compiled.events import LOOP, NOTICE
from jaxserve.simulator.compiled.front import (
    choose,
    event_at,
    next_stranded,
    send,
    timer,
)
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.order import Keys, refresh, wait
from jaxserve.simulator.compiled.pages import find
from jaxserve.simulator.compiled.plan import plan
from jaxserve.simulator.compiled.state import NOTHING, Machine, Rules, World
from jaxserve.simulator.settings import REFUSED

DONE, PAUSED, FULL, STUCK, NOWHERE, ON = range(6)
REFUSED_BY_ALL = -2  # as a choice
FREE, WAITING = int(State.FREE), int(State.WAITING)


def serve(world: World, rules: Rules, costs: Costs, key: Keys, until: int) -> int:
    """Runs the simulation until it is done or has to return to Python.

    Args:
        world: The whole state.
        rules: Constants of the simulation.
        costs: The cost model.
        key: The policy's key.
        until: Pause once this many requests have arrived.

    Returns:
        DONE if all requests have ended, PAUSED at `until`, FULL if the arrays are too small, STUCK
            if the policy plans nothing, NOWHERE if it makes no progress.
    """
    replicas, requests, settings = world.machines.me, world.requests, rules.settings[0]
    cursor = world.cursor[0]
    while True:
        event = world.event_heap[0]
        now = world.event_times[event]
        kind, index = event // len(replicas), event % len(replicas)
        number = NOTHING
        if cursor.arrived < len(requests) and requests[cursor.arrived].arrival <= now:
            if cursor.arrived >= until:
                return PAUSED
            number, now = cursor.arrived, requests[cursor.arrived].arrival
        elif now == math.inf:
            return DONE
        elif kind == NOTICE:
            number = next_stranded(world, index)
            if number == NOTHING:
                event_at(world, NOTICE, index, math.inf)
                continue
        if number != NOTHING:
            if not _place(world, rules, costs, key, number, now):
                return FULL
        elif kind != LOOP:
            timer(world, settings, kind, index, now)
        else:
            if settings.keeps_batches and replicas[index].batches >= world.machines.log.shape[1]:
                return FULL
            status = _once(_machine(world, index), rules, costs, key, world.token_times)
            if status != ON:
                return status
            replicas[index].changed = True
            event_at(world, LOOP, index, replicas[index].next_time)


@kernel
def _place(world: World, rules: Rules, costs: Costs, key: Keys, number: int, now: float) -> bool:
    """Sends a request to a replica, for the first time or again; False if the arrays have no room
    for it there."""
    r, cursor, settings = world.requests[number], world.cursor[0], rules.settings[0]
    if cursor.chosen == NOTHING:
        if number < cursor.arrived:
            _again(r)
        cursor.chosen = choose(world, settings, number, now)
        if cursor.chosen == NOTHING:
            cursor.chosen = REFUSED_BY_ALL
    index = cursor.chosen
    alive = index != REFUSED_BY_ALL and not world.machines.me[index].dead
    if alive and world.machines.me[index].live >= world.machines.running.shape[1]:
        return False
    cursor.chosen = NOTHING
    if number == cursor.arrived:
        cursor.arrived += 1
    elif index == REFUSED_BY_ALL and r.received:
        r.failed, r.state = True, FREE
        return True
    r.replica = REFUSED if index == REFUSED_BY_ALL else index
    if index != REFUSED_BY_ALL and settings.looks:
        send(world, index, number, now)
    if alive:
        _arrive(_machine(world, index), rules, costs, key, number, now)
        event_at(world, LOOP, index, world.machines.me[index].next_time)
    return True


@kernel
def _again(r: np.record) -> None:
    """Discards what its dead replica did for the request, but its tokens."""
    r.decided, r.state, r.begun, r.generated = False, WAITING, r.received, r.received
    r.computed = r.held = r.growth = r.lost_from = r.losses = r.losses_since = 0
    r.pages = r.found = r.hit = 0
    r.preemptions = r.preempted_order = r.last_batch_order = 0


@kernel
def _machine(world: World, index: int) -> Machine:
    every = world.machines
    return Machine(
        world.requests,
        every.me[index : index + 1],
        every.running[index],
        every.waiting[index],
        every.needs,
        every.lapses,
        every.chosen[index],
        every.victims[index],
        every.flying[index],
        every.scratch[index],
        every.log[index],
        every.reached[index],
        every.ended[index],
        every.mean[index],
        every.expected[index],
        every.bins_above,
        every.bin_of,
        every.pages[index],
    )


@kernel
def _arrive(m: Machine, rules: Rules, costs: Costs, key: Keys, number: int, now: float) -> None:
    """A request arrives at a replica, and is refused if the queue is full. Ended requests count
    until their last token is on the host."""
    me, r = m.me[0], m.requests[number]
    unfinished = me.live + (me.ended if me.landed > now else 0)
    if unfinished >= rules.settings[0].capacity and not r.begun:
        r.replica = REFUSED
        return
    r.seq = me.arrivals - (RESUMED if r.begun else 0)
    me.arrivals += 1
    me.live += 1
    me.came += 1
    if r.late and rules.settings[0].reuse:
        _reach(m, rules.settings[0], costs, number)
    wait(m, rules.settings[0], key, number)
    if me.next_time == math.inf:
        me.woken = now
    if now - me.woken <= BURST:
        me.clock = me.next_time = max(me.clock, now + rules.host[0].wake)


@kernel
def _reach(m: Machine, settings: np.record, costs: Costs, number: int) -> None:
    """`Scheduler.reachable`: targets are compared with the uncached rest of the prompt."""
    r = m.requests[number]
    find(m, settings, number)
    cached, seconds = r.found * settings.block_size, r.alone
    if cached > 0:
        seconds = prefill_time(costs, cached, r.prompt_len, settings.chunk)
    r.ttft = max(r.asked_ttft, seconds * JUST_MISSED)
    r.jct = max(r.asked_jct, seconds * JUST_MISSED)


@kernel
def _once(m: Machine, rules: Rules, costs: Costs, key: Keys, token_times: np.ndarray) -> int:
    """One iteration of the engine's loop. Returns ON, STUCK or NOWHERE."""
    me, settings, host = m.me[0], rules.settings[0], rules.host[0]
    me.woken = -math.inf
    side, count, end = me.side, me.flying, me.flying_end
    me.flying = NOTHING
    if me.live:
        me.slow = pace(costs, me.lot + me.batches)
        if me.most_losses >= FUTILE:
            return NOWHERE
        me.clock += (host.receive + host.receive_row * me.came) * me.slow
        me.came = 0
        refresh(m, settings, key)
        plan(m, settings, rules.groups)
        if not (me.chosen or me.victims or count != NOTHING):
            return STUCK
        me.clock += (host.plan + host.plan_row * me.live) * me.slow
        batch = features(m, costs)
        started = book(m, settings, key)
        if me.chosen:
            seconds = scattered(costs, me.lot + me.batches, batch, batch_time(costs, batch))
            _launch(m, rules, batch, seconds, started, count == NOTHING)
    if count != NOTHING:
        _land(m, rules, key, side, count, end, token_times)
    if me.flying != NOTHING and not settings.overlap:
        _land(m, rules, key, me.side, me.flying, me.flying_end, token_times)
        me.flying = NOTHING
    me.next_time = me.clock if me.live or me.flying != NOTHING else math.inf
    return ON


@kernel
def _launch(
    m: Machine, rules: Rules, batch: BatchFeatures, seconds: float, started: int, idle: bool
) -> None:
    """Starts the batch on the device, and keeps a record of it."""
    me, settings, host = m.me[0], rules.settings[0], rules.host[0]
    took = host.launch + host.launch_row * me.chosen + host.admit * started
    me.clock += took * me.slow
    start = max(me.clock, me.device_free)
    if idle:
        start += host.idle
    seconds *= me.slowdown
    if me.slowdown != me.pace:
        me.pace += PACE * (me.slowdown - me.pace)
    me.device_free = me.flying_end = start + seconds
    record = m.log[me.batches if settings.keeps_batches else 0]
    me.batches += 1
    record.start, record.duration = start, seconds
    record.num_tokens = batch.num_tokens
    record.num_decodes, record.num_prefills = batch.num_decodes, batch.num_prefills
    record.kv_used = (settings.num_blocks - me.free) * settings.block_size // 2
    record.preemptions, record.num_hidden = me.gone, 0
    record.num_recomputed = me.again
    record.saved_slots = record.loaded_slots = 0  # these policies move no caches
    record.num_shared = me.shared
    me.gone = 0
    me.side = 1 - me.side
    sample(m, settings)


@kernel
def _land(
    m: Machine,
    rules: Rules,
    key: Keys,
    side: int,
    count: int,
    end: float,
    token_times: np.ndarray,
) -> None:
    """The tokens of a launched step reach the host."""
    me, host = m.me[0], rules.host[0]
    me.clock = me.landed = max(me.clock, end)
    me.ended = 0
    receive(m, rules.settings[0], key, side, count, token_times)
    me.clock += (host.finish + host.finish_row * count) * me.slow
