"""The event loop of the compiled simulation: `replicas.py` and `replica.py`, in machine code."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.host_terms import BURST
from jaxserve.sched.keys import Key
from jaxserve.sched.progress import FUTILE
from jaxserve.sched.simulation.compiled.book import book, receive, sample
from jaxserve.sched.simulation.compiled.cost import Costs, Features, batch_time, features
from jaxserve.sched.simulation.compiled.jit import kernel
from jaxserve.sched.simulation.compiled.order import refresh, wait
from jaxserve.sched.simulation.compiled.plan import plan
from jaxserve.sched.simulation.compiled.setting import REFUSED
from jaxserve.sched.simulation.compiled.state import NOTHING, Machine, Rules, World

DONE, PAUSED, FULL, STUCK, NOWHERE, ON = range(6)


def serve(world: World, rules: Rules, costs: Costs, key: Key, until: int) -> int:
    """Lets the world go on until all requests are over (DONE), `until` of them have arrived
    (PAUSED), its arrays have no room for more (FULL), or a policy plans nothing (STUCK) or gets
    nowhere (NOWHERE)."""
    replicas, requests = world.replicas, world.requests
    while True:
        soonest = 0
        for i in range(1, len(replicas)):
            if replicas[i].next_time < replicas[soonest].next_time:
                soonest = i
        number, next_time = world.arrived[0], replicas[soonest].next_time
        if number < len(requests) and requests[number].arrival <= next_time:
            if number >= until:
                return PAUSED
            chosen = _route(replicas, rules.settings[0], number)
            if replicas[chosen].live >= world.running.shape[1]:
                return FULL
            _arrive(_machine(world, chosen), rules, key, number, chosen)
            world.arrived[0] += 1
        elif next_time < math.inf:
            if replicas[soonest].batches >= world.log.shape[1]:
                return FULL
            status = _once(_machine(world, soonest), rules, costs, key, world.token_times)
            if status != ON:
                return status
        else:
            return DONE


@kernel
def _machine(world: World, index: int) -> Machine:
    return Machine(
        world.requests,
        world.replicas[index : index + 1],
        world.running[index],
        world.waiting[index],
        world.needs,
        world.chosen[index],
        world.victims[index],
        world.flying[index],
        world.scratch[index],
        world.log[index],
        world.reached[index],
        world.ended[index],
        world.mean[index],
        world.expected[index],
        world.bins_above,
        world.bin_of,
    )


@kernel
def _route(replicas: np.ndarray, settings: np.record, number: int) -> int:
    """As `replicas.ROUTERS`."""
    if not settings.least_loaded:
        return number % len(replicas)
    least = 0
    for i in range(1, len(replicas)):
        if replicas[i].live < replicas[least].live:
            least = i
    return least


@kernel
def _arrive(m: Machine, rules: Rules, key: Key, number: int, replica: int) -> None:
    """Unless it finds the queue full: who has ended counts until its last token is there."""
    me, r = m.me[0], m.requests[number]
    unfinished = me.live + (me.ended if me.landed > r.arrival else 0)
    if unfinished >= rules.settings[0].capacity:
        r.replica = REFUSED
        return
    r.seq, r.replica = me.arrivals, replica
    me.arrivals += 1
    me.live += 1
    me.came += 1
    wait(m, rules.settings[0], key, number)
    if me.next_time == math.inf:
        me.woken = r.arrival
    if r.arrival - me.woken <= BURST:
        me.clock = me.next_time = max(me.clock, r.arrival + rules.host[0].wake)


@kernel
def _once(m: Machine, rules: Rules, costs: Costs, key: Key, token_times: np.ndarray) -> int:
    """Once round the engine's loop, ON; or STUCK, or NOWHERE."""
    me, settings, host = m.me[0], rules.settings[0], rules.host[0]
    me.woken = -math.inf
    side, count, end = me.side, me.flying, me.flying_end
    me.flying = NOTHING
    if me.live:
        if me.most_losses >= FUTILE:
            return NOWHERE
        me.clock += host.receive + host.receive_row * me.came
        me.came = 0
        refresh(m, settings, key)
        plan(m, settings, rules.groups)
        if not (me.chosen or me.victims or count != NOTHING):
            return STUCK
        me.clock += host.plan + host.plan_row * me.live
        batch = features(m, costs)
        started = book(m, settings, key)
        if me.chosen:
            _launch(m, rules, batch, batch_time(costs, batch), started, count == NOTHING)
    if count != NOTHING:
        _land(m, rules, key, side, count, end, token_times)
    if me.flying != NOTHING and not settings.overlap:
        _land(m, rules, key, me.side, me.flying, me.flying_end, token_times)
        me.flying = NOTHING
    me.next_time = me.clock if me.live or me.flying != NOTHING else math.inf
    return ON


@kernel
def _launch(
    m: Machine, rules: Rules, batch: Features, seconds: float, started: int, idle: bool
) -> None:
    """Starts the batch on the device, and keeps a record of it."""
    me, settings, host = m.me[0], rules.settings[0], rules.host[0]
    me.clock += host.launch + host.launch_row * me.chosen + host.admit * started
    start = max(me.clock, me.device_free)
    if idle:
        start += host.idle
    me.device_free = me.flying_end = start + seconds
    record = m.log[me.batches]
    me.batches += 1
    record.start, record.duration = start, seconds
    record.num_tokens = batch.num_tokens
    record.num_decodes, record.num_prefills = batch.num_decodes, batch.num_prefills
    record.kv_used = (settings.num_blocks - me.free) * settings.block_size // 2
    record.preemptions, record.num_hidden = me.gone, 0
    record.num_recomputed = me.again
    record.saved_slots = record.loaded_slots = record.num_shared = 0  # the family moves no caches
    me.gone = 0
    me.side = 1 - me.side
    sample(m)


@kernel
def _land(
    m: Machine,
    rules: Rules,
    key: Key,
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
    me.clock += host.finish + host.finish_row * count
