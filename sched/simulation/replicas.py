"""Simulations in Python: the event loop over replicas that each run the engine's own scheduler.

The next thing to happen is an arrival, which is routed to a replica, or a replica's loop coming
round (`replica.py`). Nothing depends on the machine's own clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost_model import LinearCostModel
from jaxserve.sched.free_blocks import OutOfBlocks
from jaxserve.sched.online_cost import OnlineCostModel
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Policy
from jaxserve.sched.simulation.arrivals import Arrivals
from jaxserve.sched.simulation.bounded_queue import BoundedQueue
from jaxserve.sched.simulation.compiled.setting import REFUSED, Outcome, Setting
from jaxserve.sched.simulation.late import Lateness
from jaxserve.sched.simulation.replica import BatchRows, Replica
from jaxserve.sched.simulation.state import SimulatedScheduler
from jaxserve.sched.workloads.closed_loop import ClosedLoop
from jaxserve.sched.workloads.workload import Workload


@dataclass(frozen=True)
class Options:
    """What only the simulation in Python knows of; each as `simulate` has it. host_slots: of the
    host memory; max_model_len: tokens that the longest request may get to have."""

    host_slots: int
    max_model_len: int
    checked: bool
    coast: bool
    online: LinearCostModel | None
    record_rows: bool
    best_effort: ClosedLoop | None
    until: float
    rho: float | None
    projects: bool
    refuse_late: float | None = None


@dataclass(frozen=True)
class Served:
    """workload: all that came. rows: per replica and batch who was in it, if that was asked for.
    seed_read: whether a policy asked for the seed. expected: seconds until the first token as each
    was told when it came, float64 [n], if that was asked for."""

    workload: Workload
    outcome: Outcome
    rows: list[list[BatchRows]] | None
    seed_read: bool
    expected: np.ndarray | None = None


def run_in_python(
    policies: Sequence[Policy],
    workload: Workload,
    setting: Setting,
    options: Options,
    progress: Callable[[int], None] | None,
) -> Served:
    """Serves the workload, with one policy for each replica. InvalidPlan as `_serve`."""
    arrivals = Arrivals(workload, options.best_effort, setting.seed)
    outputs = arrivals.outputs
    machines = [
        Replica(
            _scheduler(policy, setting, options),
            setting,
            outputs=outputs,
            # What is learned may change any plan.
            coasts=options.coast and policy.steady and options.online is None,
            record_rows=options.record_rows,
        )
        for policy in policies
    ]
    queue = BoundedQueue(setting.capacity, setting.replicas, outputs)
    late = Lateness(options.refuse_late)
    route = ROUTERS[setting.routing]
    served_by = _serve(machines, arrivals, route, queue, late, options.until, progress)
    logs = [machine.stop(options.until) for machine in machines]
    outputs.cut(options.until)
    came, numbers = arrivals.came()
    rows = [_renumbered(machine.rows_log, numbers) for machine in machines]
    return Served(
        came,
        Outcome(outputs.in_order(numbers), outputs.preemptions[numbers], served_by[numbers], logs),
        rows if options.record_rows else None,
        any(machine.scheduler.view.seed_read for machine in machines),
        late.expected(numbers),
    )


def _renumbered(rows: list[BatchRows], numbers: np.ndarray) -> list[BatchRows]:
    """With each request's place in order of arrival. numbers: those that they have, in that
    order."""
    if not rows or (numbers == np.arange(len(numbers))).all():
        return rows
    place = np.zeros(int(numbers.max()) + 1, np.int64)
    place[numbers] = np.arange(len(numbers))
    return [
        dataclasses.replace(one, requests=place[one.requests], preempted=place[one.preempted])
        for one in rows
    ]


def _scheduler(policy: Policy, setting: Setting, options: Options) -> SimulatedScheduler:
    online = options.online
    return SimulatedScheduler(
        policy,
        setting.limits,
        num_blocks=setting.num_blocks,
        block_size=setting.block_size,
        max_model_len=options.max_model_len,
        host_slots=options.host_slots,
        cost_model=setting.cost_model if online is None else OnlineCostModel(online),
        padding=setting.padding,
        seed=setting.seed,
        rho=options.rho,
        projects=options.projects,
        checked=options.checked,
    )


# Which replica gets request number i.
Router = Callable[[int, Sequence[Replica]], int]


def _least_loaded(number: int, machines: Sequence[Replica]) -> int:
    """The first of those with the fewest unfinished requests."""
    return min(range(len(machines)), key=lambda i: machines[i].live)


ROUTERS: dict[str, Router] = {
    "round_robin": lambda number, machines: number % len(machines),
    "least_loaded": _least_loaded,
}


def _serve(
    machines: list[Replica],
    arrivals: Arrivals,
    route: Router,
    queue: BoundedQueue,
    late: Lateness,
    until: float,
    progress: Callable[[int], None] | None,
) -> np.ndarray:
    """The event loop, until all is served or that time. The replica by number, int64 [n], REFUSED
    for who has none. InvalidPlan if a plan that is not checked wants more than the pool has."""
    served_by: dict[int, int] = {}
    while True:
        machine = min(machines, key=lambda m: m.next_time)
        arrival = arrivals.next_time
        if not min(arrival, machine.next_time) < until:
            break
        if arrival <= machine.next_time:
            number, request = arrivals.take()
            chosen = route(number, machines)
            taken = late.admits(machines[chosen], number, request)
            if taken and queue.admits(chosen, number, arrival):
                machines[chosen].receive(number, request)
                served_by[number] = chosen
            if progress is not None and number < arrivals.num_open:
                progress(1)
        else:
            try:
                machine.run(min(arrivals.horizon, until))
            except OutOfBlocks as error:
                raise InvalidPlan(f"more blocks than are free ({error})") from error
            arrivals.follow()
    found = np.full(len(arrivals.outputs.lengths), REFUSED)
    found[list(served_by.keys())] = list(served_by.values())
    return found
