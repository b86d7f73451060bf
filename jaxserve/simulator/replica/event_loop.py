"""Simulations in Python: the event loop over replicas, each of which runs the engine's own
scheduler.

The next event is an arrival, which is routed to a replica, an event in front of the replicas
(`router_front.py`), or the next iteration of a replica's loop (`replica.py`). Nothing depends on
the machine's own clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.sched.cache.free_blocks import OutOfBlocks
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import make_retention
from jaxserve.sched.request import Request
from jaxserve.simulator.program_records import ProgramRecords
from jaxserve.simulator.replica.admission import BoundedQueue, Lateness
from jaxserve.simulator.replica.alone import served_alone
from jaxserve.simulator.replica.arrivals import Arrivals
from jaxserve.simulator.replica.drafter import Guesses
from jaxserve.simulator.replica.event_queue import Events
from jaxserve.simulator.replica.replica import Replica, as_keys
from jaxserve.simulator.replica.router_front import Front
from jaxserve.simulator.replica.scheduler_state import SimulatedScheduler
from jaxserve.simulator.settings import (
    REFUSED,
    BatchRows,
    RunOptions,
    Served,
    Setting,
    TrafficOptions,
)
from jaxserve.simulator.workloads.shared_prefixes import BlockKeys
from jaxserve.simulator.workloads.workload import Workload


def run_in_python(
    policies: Sequence[Policy],
    workload: Workload,
    setting: Setting,
    traffic: TrafficOptions,
    options: RunOptions,
) -> Served:
    """Serves the workload in Python.

    Args:
        policies: One per replica.
        workload: The requests.
        setting: Where they are served.
        traffic: Additional traffic, and when the run is cut off.
        options: Execution options.

    Raises:
        InvalidPlan: A policy's plan cannot be booked, or it makes no progress.
    """
    arrivals = Arrivals(workload, traffic.best_effort, setting.seed)
    outputs = arrivals.outputs
    keys = BlockKeys(workload, setting.block_size) if setting.prefix_caching else None
    guesses = None
    if any(policy.speculates for policy in policies) and workload.guess_share.any():
        guesses = Guesses(workload, setting.seed)
    machines = [
        Replica(
            _scheduler(policy, setting, options),
            setting,
            outputs=outputs,
            number=number,
            # Learned values, or cached prefixes, may change any plan.
            coasts=options.coast
            and policy.steady
            and not policy.speculates
            and keys is None
            and setting.online is None
            and not setting.routing.faults
            and setting.routing.link is None,
            record_rows=options.record_rows,
            block_keys=keys,
            guesses=guesses,
        )
        for number, policy in enumerate(policies)
    ]
    queue = BoundedQueue(setting.capacity, setting.replicas, outputs)
    loops = Events(len(machines))
    front = Front(setting, machines, loops, outputs)
    late = Lateness(setting.refuse_late)
    loop = _Loop(machines, arrivals, front, loops, queue, late, keys)
    served_by = loop.run(traffic.until, options.progress)
    logs = [machine.stop(traffic.until) for machine in machines]
    if not setting.keeps_batches:
        logs = [log[:0] for log in logs]
    outputs.cut(traffic.until)
    failed = np.isin(np.arange(len(served_by)), list(front.failed))
    came, numbers = arrivals.came()
    rows = [_renumbered(machine.rows_log, numbers) for machine in machines]
    programs = None
    if workload.programs.closed:
        alone = served_alone(workload, setting)
        programs = ProgramRecords.from_releases(workload, arrivals.releases, alone, traffic.until)
    drawn = setting.routing.draws or guesses is not None
    drawn |= any(one.scheduler.view.seed_read for one in machines)
    return Served(
        workload=came,
        token_times=outputs.in_order(numbers),
        preemptions=outputs.preemptions[numbers],
        replica=served_by[numbers],
        failed=failed[numbers],
        batches=logs,
        seed_read=drawn,
        rows=rows if options.record_rows else None,
        expected=late.expected(numbers),
        found=outputs.found[numbers] if setting.prefix_caching else None,
        moves=None if setting.routing.link is None else outputs.moves[numbers],
        drafts=None if guesses is None else (outputs.drafted[numbers], outputs.accepted[numbers]),
        programs=programs,
    )


def _renumbered(rows: list[BatchRows], numbers: np.ndarray) -> list[BatchRows]:
    """The batches with each request's place in order of arrival instead of its number. numbers:
    those of all requests, in order of arrival."""
    if not rows or (numbers == np.arange(len(numbers))).all():
        return rows
    place = np.zeros(int(numbers.max()) + 1, np.int64)
    place[numbers] = np.arange(len(numbers))
    return [
        dataclasses.replace(one, requests=place[one.requests], preempted=place[one.preempted])
        for one in rows
    ]


def _scheduler(policy: Policy, setting: Setting, options: RunOptions) -> SimulatedScheduler:
    online = setting.online
    return SimulatedScheduler(
        policy,
        setting.limits,
        num_blocks=setting.num_blocks,
        block_size=setting.block_size,
        max_model_len=setting.max_model_len,
        host_slots=setting.host_slots,
        cost_model=setting.cost_model if online is None else OnlineCostModel(online),
        padding=setting.padding,
        seed=setting.seed,
        rho=setting.rho,
        projects=setting.projects,
        checked=bool(options.checked),
        prefix_caching=setting.prefix_caching,
        retention=make_retention(setting.retention),
        groups=setting.groups,
        watch=options.watch,
    )


class _Loop:
    """The event loop.

    Args:
        machines: The replicas.
        arrivals: The requests that come.
        front: What is in front of the replicas.
        loops: When the loop of each replica runs next.
        queue: How many each may take.
        late: Which of them are refused, since they would be late.
        keys: Block keys of the requests; None without prefix caching.
    """

    def __init__(
        self,
        machines: list[Replica],
        arrivals: Arrivals,
        front: Front,
        loops: Events,
        queue: BoundedQueue,
        late: Lateness,
        keys: BlockKeys | None,
    ) -> None:
        self._machines, self._arrivals, self._front = machines, arrivals, front
        self._loops, self._queue, self._late, self._keys = loops, queue, late, keys
        self._served_by: dict[int, int] = {}  # the replica of each request, by number

    def _place(
        self,
        number: int,
        request: Request,
        now: float,
        to: int = REFUSED,
        sent: Sequence[bytes] = (),
    ) -> None:
        """Brings a request to the replica that its router chooses, or to which it moves.

        Args:
            number: Its number.
            request: The request.
            now: Seconds.
            to: The replica to which it moves; REFUSED if it does not.
            sent: Keys of the pages that come along, there or when it arrives.
        """
        front, served_by, outputs = self._front, self._served_by, self._arrivals.outputs
        begun = outputs.so_far(number) if number in served_by else []
        if to != REFUSED:
            self._queue.leave(served_by[number], number)
        moves = to != REFUSED and not self._machines[to].dead
        chosen = to if moves else front.choose(number, request, now, len(begun))
        if chosen is None and begun:
            front.failed.add(number)
            outputs.end(number)
            return
        served_by.pop(number, None)
        if chosen is None:
            self._arrivals.refused(number, now)
            return
        machine = self._machines[chosen]
        if not machine.dead:
            again = bool(begun) or to != REFUSED  # what was admitted once
            taken = again or self._late.admits(machine, number, request, now)
            if not (taken and self._queue.admits(chosen, number, now, always=again)):
                self._arrivals.refused(number, now)
                return
            machine.receive(number, request, now, begun, sent if moves or to == REFUSED else ())
            self._loops.at(chosen, machine.next_time)
        served_by[number] = chosen
        front.taken(chosen, number, request, now, len(begun))

    def run(self, until: float, progress: Callable[[int], None] | None) -> np.ndarray:
        """Runs until all requests have ended, or `until`. Returns each request's replica by number,
        int64 [n], or REFUSED. Raises InvalidPlan if an unchecked plan wants more blocks than are
        free."""
        machines, arrivals, front, loops = self._machines, self._arrivals, self._front, self._loops
        place, keys, served_by = self._place, self._keys, self._served_by
        while True:
            (time, index), arrival, timer = loops.first(), arrivals.next_time, front.next_time
            if not min(arrival, timer, time) < until:
                break
            if arrival <= min(timer, time):
                number, request = arrivals.take_first()
                brought: Sequence[bytes] = ()
                if keys is not None and number < len(keys):
                    known = as_keys(keys.of(number, len(request.prompt)))
                    request = dataclasses.replace(request, block_keys=known)
                    brought = known[: arrivals.brought[number] // keys.block_size]
                place(number, request, arrival, sent=brought)
                if progress is not None and number < arrivals.num_open:
                    progress(1)
            elif timer <= time and front.comes:
                number, request, to, sent = front.come()
                place(number, request, timer, to, sent)
            elif timer <= time:
                stranded = front.run(arrivals.more)
                arrivals.release(front.failed, timer)
                if stranded is not None:
                    place(*stranded, timer)
            else:
                machine = machines[index]
                try:
                    machine.run(min(arrivals.horizon(time), timer, until))
                except OutOfBlocks as error:
                    raise InvalidPlan(f"more blocks than are free ({error})") from error
                if machine.began:
                    front.move(index)
                loops.at(index, machine.next_time)
                front.changed(index)
                arrivals.follow()
                for name, tools in arrivals.release(front.failed, time).items():
                    machine.scheduler.programs.note_tools(name, tools)
        found = np.full(len(arrivals.outputs.lengths), REFUSED)
        found[list(served_by.keys())] = list(served_by.values())
        return found
