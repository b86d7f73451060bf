"""The part in front of the replicas in the compiled simulation: snapshots, their delivery to the
routers, the routers' choices, and failures of replicas. See `replica/router_front.py`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.sched.routing import estimate, random_draws, snapshot, take_snapshot
from jaxserve.sched.routing.routers import ROUTERS
from jaxserve.sched.state.request_table import State
from jaxserve.simulator.compiled.blocks import PLANES
from jaxserve.simulator.compiled.events import (
    DELIVER,
    FAULT,
    LOOP,
    NOTICE,
    PUBLISH,
    at,
)
from jaxserve.simulator.compiled.jit import OPTIONS, kernel
from jaxserve.simulator.compiled.state import NOTHING, World

FREE = int(State.FREE)
ROUND_ROBIN, LEAST_LOADED, TWO_CHOICES, SLO = map(
    list(ROUTERS).index, ("round_robin", "least_loaded", "two_choices", "slo")
)
for _called in (
    snapshot.prompt_seconds,
    snapshot.prompt_blocks,
    estimate.first_token,
    estimate.miss,
):
    register_jitable(**OPTIONS)(_called)
_a_plane = kernel(blocks_a_plane)
_take, _add = kernel(snapshot.reset_known), kernel(snapshot.add_request)
_violation = kernel(estimate.violation)
_drawn, _below = kernel(random_draws.drawn), kernel(random_draws.below)
lately = kernel(take_snapshot.lately)


class _Asked(NamedTuple):
    """`RoutingRequest` without prefixes."""

    prompt_len: int
    tier: int
    ttft: float
    tbt: float
    jct: float
    sequences: int
    prompts: int


@kernel
def _asked(r: np.record) -> _Asked:
    ttft = math.inf if r.begun else r.asked_ttft
    return _Asked(r.prompt_len + r.begun, r.tier, ttft, r.asked_tbt, r.asked_jct, 1, 1)


@kernel
def event_at(world: World, kind: int, index: int, time: float) -> None:
    """Sets the time of a replica's event.

    Args:
        world: All state.
        kind: Kind of event, of `events.py`.
        index: The replica.
        time: Seconds; inf for never.
    """
    event = kind * len(world.machines.me) + index
    at(world.event_times, world.event_heap, world.event_place, event, time)


@kernel
def timer(world: World, settings: np.record, kind: int, index: int, now: float) -> None:
    """Handles a fault, or a snapshot that is taken or delivered.

    Args:
        world: All state.
        settings: A record of SETTINGS.
        kind: FAULT, PUBLISH or DELIVER.
        index: The replica.
        now: Seconds.
    """
    me = world.machines.me[index]
    event_at(world, kind, index, math.inf)
    if kind == FAULT:
        fault = world.faults[index]
        if fault.slowdown < math.inf:
            me.slowdown = fault.slowdown
            return
        me.dead, me.next_time = True, math.inf
        event_at(world, LOOP, index, math.inf)
        event_at(world, PUBLISH, index, math.inf)
        event_at(world, NOTICE, index, now + fault.notice)
    elif kind == PUBLISH:
        _observe(world, settings, index, now)
        lost = False
        if settings.loss > 0.0:
            me.draw = _drawn(me.draw)
            lost = me.draw <= settings.loss * random_draws.MODULUS
        if not lost:
            if settings.age > 0.0:
                event_at(world, DELIVER, index, now + settings.age)
            else:
                _hear(world, index)
        if world.cursor[0].arrived < len(world.requests):
            event_at(world, PUBLISH, index, now + settings.interval)
    elif kind == DELIVER and not world.known[index].dead:
        _hear(world, index)


@kernel
def next_stranded(world: World, index: int) -> int:
    """The next request of a dead replica that has to be rerouted, NOTHING if there is none."""
    me, s = world.machines.me[index], world.known[index]
    s.dead = True
    s.first_sent = s.last_sent = NOTHING
    while me.stranded < world.cursor[0].arrived:
        r = world.requests[me.stranded]
        if r.replica == index and r.state != FREE:
            return int(me.stranded)
        me.stranded += 1
    return NOTHING


@kernel
def send(world: World, index: int, number: int, now: float) -> None:
    """Notes at the request's router where it was sent.

    Args:
        world: All state.
        index: The replica.
        number: The request.
        now: Seconds.
    """
    s, r = world.known[index], world.requests[number]
    r.sent, r.next_sent = now, NOTHING
    if s.last_sent == NOTHING:
        s.first_sent = number
    else:
        world.requests[s.last_sent].next_sent = number
    s.last_sent = number
    _add(s, _asked(r), 0, now)
    world.machines.me[index].changed = True


@kernel
def choose(world: World, settings: np.record, number: int, now: float) -> int:
    """Routes a request like `routing.routers`; indices count only the router's own replicas.

    Args:
        world: All state.
        settings: A record of SETTINGS.
        number: The request.
        now: Seconds.

    Returns:
        The replica; NOTHING if none is up.
    """
    count, step, first = len(world.machines.me), settings.routers, number % settings.routers
    router, there = world.routers[first], 0
    fresh = settings.looks and settings.interval == 0.0
    for i in range(first, count, step):
        me = world.machines.me[i]
        if fresh and me.changed and not me.dead:
            _observe(world, settings, i, now)
            _hear(world, i)
        there += not world.known[i].dead
    if there == 0:
        return NOTHING
    if settings.routing == ROUND_ROBIN:
        size = (count - first + step - 1) // step
        turn = router.turn
        while world.known[first + turn * step].dead:
            turn = (turn + 1) % size
        router.turn = (turn + 1) % size
        return int(first + turn * step)
    if settings.routing == TWO_CHOICES:
        return _two_choices(world, router, first, step, there)
    r = world.requests[number]
    chosen, least = NOTHING, math.inf
    for i in range(first, count, step):
        s = world.known[i]
        if s.dead:
            continue
        value = s.unfinished
        if settings.routing == SLO:
            work, short = s.best_effort_work, s.best_effort_short
            if r.tier == 0:
                work, short = s.realtime_work, s.realtime_short
            value = _violation(s, work, short, _asked(r), 0, now)
        if value < least or chosen == NOTHING:
            chosen, least = i, value
    return chosen


@kernel
def _two_choices(world: World, router: np.record, first: int, step: int, there: int) -> int:
    router.state = _drawn(router.state)
    one = _nth_up(world, first, step, _below(router.state, there))
    if there == 1:
        return one
    router.state = _drawn(router.state)
    nth = _below(router.state, there - 1)
    # The previous draw decided which replica is left out.
    other = _nth_up(world, first, step, nth)
    if other >= one:
        other = _nth_up(world, first, step, nth + 1)
    return other if world.known[other].unfinished < world.known[one].unfinished else one


@kernel
def _nth_up(world: World, first: int, step: int, nth: int) -> int:
    for i in range(first, len(world.machines.me), step):
        if not world.known[i].dead:
            if nth == 0:
                return i
            nth -= 1
    return NOTHING


@kernel
def _hear(world: World, index: int) -> None:
    """`Fleet.hear`."""
    s, n = world.known[index], world.published[index]
    while s.first_sent != NOTHING and world.requests[s.first_sent].sent <= n.time:
        s.first_sent = world.requests[s.first_sent].next_sent
    if s.first_sent == NOTHING:
        s.last_sent = NOTHING
    _take(s, n)
    number = s.first_sent
    while number != NOTHING:
        r = world.requests[number]
        _add(s, _asked(r), 0, r.sent)
        number = r.next_sent


@kernel
def _observe(world: World, settings: np.record, index: int, now: float) -> None:
    """`take_snapshot`."""
    me, n = world.machines.me[index], world.published[index]
    me.changed = False
    cached = 0
    tbt = math.inf
    n.realtime_tokens = n.best_effort_tokens = n.realtime_quad = n.best_effort_quad = 0.0
    n.realtime_blocks = n.best_effort_blocks = 0.0
    for i in range(me.running):
        r = world.requests[world.machines.running[index, i]]
        cached += r.computed
        tbt = min(tbt, r.tbt)
        _count(n, r, 0)
    for i in range(me.first, me.end):
        r = world.requests[world.machines.waiting[index, i]]
        _count(n, r, _a_plane(r.prompt_len + r.generated, settings.block_size) * PLANES)
    n.time, n.unfinished, n.running, n.waiting = now, me.live, me.running, me.end - me.first
    n.cached, n.free_blocks, n.tbt = cached, me.free, tbt
    n.busy = max(me.device_free - now, 0.0)
    n.mean_output, n.attainment, n.pace = me.mean_output, me.attainment, me.pace


@kernel
def _count(n: np.record, r: np.record, blocks: int) -> None:
    """Adds to a snapshot a request's remaining work and the blocks that it needs."""
    tokens = r.prompt_len + r.generated - r.computed
    if r.generated > 0 and tokens == 1:
        tokens = 0  # it decodes
    quad = tokens * (tokens + 2 * r.computed)
    if r.tier == 0:
        n.realtime_tokens += tokens
        n.realtime_quad += quad
        n.realtime_blocks += blocks
    else:
        n.best_effort_tokens += tokens
        n.best_effort_quad += quad
        n.best_effort_blocks += blocks
