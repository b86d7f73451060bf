"""The part in front of the simulated replicas: routers that choose by snapshots, and replicas that
become slow or die."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.sched.request import Request
from jaxserve.sched.routing.behind import Sent
from jaxserve.sched.routing.fleet import Fleet, Role, RoutingRequest
from jaxserve.sched.routing.random_draws import MODULUS, drawn, seeded
from jaxserve.sched.routing.routers import NoReplica, Router
from jaxserve.sched.routing.snapshot import Snapshot
from jaxserve.sched.routing.take_snapshot import idle_snapshot, take_snapshot
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.simulator.replica.event_queue import Events
from jaxserve.simulator.replica.outputs import Outputs
from jaxserve.simulator.replica.replica import Replica
from jaxserve.simulator.settings import Setting

FAULT, NOTICE, PUBLISH, DELIVER = range(4)
Came = tuple[int, Request]  # a request with its number


class Front:
    """The routers. Router i of k has every k-th replica, and the requests whose numbers are i
    modulo k.

    Args:
        setting: How requests are routed, and the faults.
        machines: The replicas.
        loops: When the loop of each replica runs next.
        outputs: Outputs of all requests.

    Attributes:
        failed: Numbers of the requests that ended with their replica, since no other one was up.
    """

    def __init__(
        self, setting: Setting, machines: Sequence[Replica], loops: Events, outputs: Outputs
    ) -> None:
        self._setting, self._machines, self._outputs = setting, machines, outputs
        self._loops = loops
        count, self.failed = len(machines), set[int]()
        step = self._step = setting.routing.routers
        fleets = [Fleet(len(range(i, count, step))) for i in range(step)]
        self._routers = [
            Router(setting.routing.name, f, setting.seed, i, link=setting.routing.link)
            for i, f in enumerate(fleets)
        ]
        self._timers = Events(4 * count)
        link = setting.routing.link
        self._latency = 0.0 if link is None else link.latency
        # When, whose, where, and the keys of pages that come along.
        self._travelling: list[tuple[float, int, int, list[bytes]]] = []
        # When, whose, where to and how many: of pages sent ahead of requests that go on.
        self._leaving: list[tuple[float, int, int, int]] = []
        self._ahead: dict[int, tuple[float, int, int, int]] = {}  # the same by request
        self._requests: dict[int, Request] = {}  # of those that may move
        self._asks: dict[int, RoutingRequest] = {}  # likewise
        # By replica: what is there, or was, since when, and with how many tokens it came.
        self._stays: list[dict[int, tuple[float, int]]] = [{} for _ in range(count)]
        self._moved: Counter[int] = Counter()  # how often, because they were behind
        self._at: dict[int, int] = {}  # where each request is, or where it goes
        self._draws = [seeded(setting.seed, step + i) for i in range(count)]
        self._under_way: dict[int, Snapshot] = {}
        self._changed = np.zeros(count, bool)
        self._dying = {f.replica for f in setting.routing.faults if f.slowdown == math.inf}
        self._there: dict[int, list[Came]] = {replica: [] for replica in self._dying}
        for fault in setting.routing.faults:
            self._timers.at(FAULT * count + fault.replica, fault.time)
        self._faults = {fault.replica: fault for fault in setting.routing.faults}
        for i in range(count):
            self._fleet(i).find(i // step)
            if setting.routing.roles is not None:
                role = Role.PROMPTS if i < setting.routing.roles[0] else Role.DECODES
                self._fleet(i).set_role(i // step, role)
            if setting.routing.looks:
                self._hear(i, idle_snapshot(setting.fixed), 0.0)
        if setting.routing.looks and setting.routing.interval:
            for i, time in enumerate(setting.routing.first_times(count).tolist()):
                self._timers.at(PUBLISH * count + i, time)

    @property
    def next_time(self) -> float:
        """The next time at which a snapshot is taken or delivered, a fault occurs, a death is
        noticed or a request leaves or comes that moves."""
        return min(self._timers.first()[0], _first(self._travelling), _first(self._leaving))

    def changed(self, replica: int) -> None:
        """Notes that the replica has changed since its last snapshot."""
        self._changed[replica] = True

    def choose(self, number: int, request: Request, now: float, begun: int) -> int | None:
        """Routes a request.

        Args:
            number: Its number in the workload.
            request: The request.
            now: Seconds.
            begun: Tokens that another replica has generated of it.

        Returns:
            The replica; None if none is up.
        """
        router = self._routers[number % self._step]
        self._look(number % self._step, now)
        ask = RoutingRequest.from_request(request, self._setting.block_size).after(begun, "")
        if not self._setting.routing.prefixes:
            ask = ask._replace(marks=b"")
        try:
            place = router.choose(ask, now)
        except NoReplica:
            return None
        replica = number % self._step + place * self._step
        if self._setting.routing.looks:
            router.fleet.send(place, ask, now)
            self._changed[replica] = True
        return replica

    def taken(self, replica: int, number: int, request: Request, now: float, begun: int) -> None:
        """Notes that the replica has admitted the request.

        Args:
            replica: The replica.
            number: The request's number.
            request: The request.
            now: Seconds.
            begun: Tokens that other replicas have generated of it.
        """
        if replica in self._dying:
            self._there[replica].append((number, request))
        self._at[number] = replica
        if self._setting.routing.link is not None:
            self._requests[number] = request
            self._ahead.pop(number, None)  # it was to leave a replica that has died
            if number not in self._asks:
                ask = RoutingRequest.from_request(request, self._setting.block_size)
                self._asks[number] = ask
            self._stays[replica][number] = now, begun

    def move(self, replica: int) -> None:
        """Lets requests whose first tokens have just come from the replica go on elsewhere."""
        machine = self._machines[replica]
        began, machine.began = machine.began, []
        for number in began:
            router = self._routers[number % self._step]
            now = float(self._outputs.times[self._outputs.offsets[number]])
            self._look(number % self._step, now)
            ask = self._asks[number].after(1, "")
            here = replica // self._step
            place = router.goes_on_at(here, ask, now)
            there = self._at[number] == replica and number not in self._ahead
            if place == here or self._outputs.over[number] or not there:
                continue
            router.fleet.send(place, ask, now, moves=True)
            self._go(number, place, ask, now)

    def _go(self, number: int, place: int, ask: RoutingRequest, now: float) -> None:
        """A request that runs goes on at another replica of its router: now, or once its pages are
        there."""
        replica, to = self._at[number], self._replica(number, place)
        if self._routers[number % self._step].sends_ahead(replica // self._step, ask, now):
            pages = self._machines[replica].pages(number)
            seconds = self._way(to, pages, 0)
            if seconds is not None:
                leaving = now + (self._latency + seconds), number, place, len(pages)
                heapq.heappush(self._leaving, leaving)
                self._ahead[number] = leaving
                return
        self._leave(number, place, now)

    def _way(self, to: int, pages: Sequence[bytes], before: int) -> float | None:
        """Seconds that these pages are on the way to a replica, where this many of them are
        already; None if it computes all of them as soon."""
        link, scheduler = self._setting.routing.link, self._machines[to].scheduler
        assert link is not None
        tokens = max(len(pages) - before, 0) * self._setting.block_size
        seconds = tokens * link.per_token
        return seconds if seconds < scheduler.recompute_seconds(pages) else None

    def _replica(self, number: int, place: int) -> int:
        return number % self._step + place * self._step

    def _leave(self, number: int, place: int, now: float, before: int = 0) -> None:
        """A request leaves its replica for another one of its router, with its pages.

        Args:
            number: The request's.
            place: The other replica's.
            now: Seconds.
            before: How many pages are there already.
        """
        replica = self._at[number]
        pages = self._machines[replica].leave(number)
        self._ahead.pop(number, None)
        del self._stays[replica][number]
        self._changed[replica] = True
        self._outputs.moves[number] += 1
        self._at[number] = to = self._replica(number, place)
        seconds = self._way(to, pages, before)
        if seconds is None:
            pages = pages[:before]
        when = now + (self._latency + (seconds or 0.0))
        heapq.heappush(self._travelling, (when, number, to, pages))

    def come(self) -> tuple[int, Request, int, list[bytes]]:
        """The request that comes at `next_time`: its number, the request, where, and the keys of
        the pages that come along."""
        _, number, replica, sent = heapq.heappop(self._travelling)
        return number, self._requests[number], replica, sent

    @property
    def comes(self) -> bool:
        """Whether the event at `next_time` is a request that moves."""
        comes = _first(self._travelling)
        return comes < math.inf and comes <= min(self._timers.first()[0], _first(self._leaving))

    def run(self, more: bool) -> Came | None:
        """Handles the event at `next_time`.

        Args:
            more: Whether requests are still to arrive.

        Returns:
            A request of a dead replica that has to be rerouted, if any.
        """
        now, event = self._timers.first()
        if self._leaving and _first(self._leaving) <= now:
            self._leave_next()
            return None
        kind, replica = divmod(event, len(self._machines))
        if kind == NOTICE:
            return self._stranded(replica)
        self._timers.at(event, math.inf)
        if kind == FAULT:
            self._fault(replica, now)
        elif kind == PUBLISH:
            self._publish(replica, now, more)
        elif not self._fleet(replica).columns.dead[replica // self._step]:
            self._hear(replica, self._under_way[replica], now)
        return None

    def _leave_next(self) -> None:
        """The pages of a request are where it goes on. If that has died, it stays."""
        leaving = when, number, place, pages = heapq.heappop(self._leaving)
        if self._ahead.get(number) is not leaving:
            return
        del self._ahead[number]
        machine, other = (
            self._machines[at] for at in (self._at[number], self._replica(number, place))
        )
        if not (machine.dead or other.dead or self._outputs.over[number]):
            self._leave(number, place, max(when, machine.now), pages)

    def _look(self, first: int, now: float) -> None:
        """Takes snapshots now if there is no interval."""
        if not self._setting.routing.looks or self._setting.routing.interval:
            return
        for replica in range(first, len(self._machines), self._step):
            if self._changed[replica] and not self._machines[replica].dead:
                self._hear(replica, self._observe(replica, now), now)

    def _observe(self, replica: int, now: float) -> Snapshot:
        self._changed[replica] = False
        machine = self._machines[replica]
        with machine.scheduler.view.untracked():
            backlog = Backlog.from_scheduler(machine.scheduler, now, machine.device_free)
        known = self._setting.fixed
        return take_snapshot(backlog, machine.live, known, machine.lately, draining=False)

    def _publish(self, replica: int, now: float, more: bool) -> None:
        snapshot, routing = self._observe(replica, now), self._setting.routing
        lost = False
        if routing.loss:
            self._draws[replica] = drawn(self._draws[replica])
            lost = self._draws[replica] <= routing.loss * MODULUS
        count = len(self._machines)
        if not lost:
            if routing.age:
                self._under_way[replica] = snapshot
                self._timers.at(DELIVER * count + replica, now + routing.age)
            else:
                self._hear(replica, snapshot, now)
        if more or (self._setting.routing.link is not None and self._goes_on):
            self._timers.at(PUBLISH * count + replica, now + routing.interval)

    @property
    def _goes_on(self) -> bool:
        """Whether a request may still move."""
        return bool(self._travelling) or any(machine.live for machine in self._machines)

    def _hear(self, replica: int, snapshot: Snapshot, now: float) -> None:
        """The router of the replica hears a snapshot, and has requests leave that are behind."""
        router, here = self._routers[replica % self._step], replica // self._step
        router.fleet.hear(here, snapshot)
        if self._setting.routing.link is None or self._machines[replica].dead:
            return
        stays, over = self._stays[replica], self._outputs.over
        for number in [number for number in stays if over[number]]:
            del stays[number]
        numbers = [number for number in stays if number not in self._ahead]
        there = [self._known(number, *stays[number], now) for number in numbers]
        for which, place in router.behind(here, there, now):
            self._moved[numbers[which]] += 1
            # Its engine notices between two steps.
            leaves = max(now, self._machines[replica].now)
            if there[which].begun:
                self._go(numbers[which], place, there[which].ask, leaves)
            else:
                self._leave(numbers[which], place, leaves)

    def _known(self, number: int, since: float, before: int, now: float) -> Sent:
        """What the router knows of a request. since, before: of `_stays`."""
        tokens = sum(time <= now for time in self._outputs.so_far(number))
        request, ask = self._requests[number], self._asks[number].after(tokens, "")
        return Sent(ask, request.arrival, since, tokens > before, self._moved[number])

    def _fleet(self, replica: int) -> Fleet:
        return self._routers[replica % self._step].fleet

    def _fault(self, replica: int, now: float) -> None:
        machine, fault, count = self._machines[replica], self._faults[replica], len(self._machines)
        if fault.slowdown < math.inf:
            machine.slowdown = fault.slowdown
            return
        machine.die()
        self._loops.at(replica, math.inf)
        self._timers.at(PUBLISH * count + replica, math.inf)
        self._timers.at(NOTICE * count + replica, now + fault.notice)

    def _stranded(self, replica: int) -> Came | None:
        """The next request of a dead replica to reroute."""
        self._fleet(replica).lose(replica // self._step)
        outputs, there = self._outputs, self._there[replica]
        there.sort(key=lambda came: came[0], reverse=True)
        while there:
            number, request = there.pop()
            if not outputs.over[number] and self._at[number] == replica:
                outputs.preemptions[number] = 0
                return number, request
        self._timers.at(NOTICE * len(self._machines) + replica, math.inf)
        return None


def _first(events: Sequence[tuple[Any, ...]]) -> float:
    """When the first of a heap of events is; inf if there is none."""
    return events[0][0] if events else math.inf
