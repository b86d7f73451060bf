"""Simulations in Python: the event loop over replicas that each run the engine's own scheduler.

The next thing to happen is an arrival, which is routed to a replica, or a replica's loop coming
round (`replica.py`). Nothing depends on the machine's own clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost_model import LinearCostModel
from jaxserve.sched.free_blocks import OutOfBlocks
from jaxserve.sched.online_cost import OnlineCostModel
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Policy
from jaxserve.sched.simulation.bounded_queue import BoundedQueue
from jaxserve.sched.simulation.compiled.setting import REFUSED, Outcome, Setting
from jaxserve.sched.simulation.replica import BatchRows, Replica
from jaxserve.sched.simulation.requests import Requests
from jaxserve.sched.simulation.state import SimulatedScheduler
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
    rho: float | None
    projects: bool


@dataclass(frozen=True)
class Served:
    """rows: per replica and batch who was in it, if that was asked for. seed_read: whether a policy
    asked for the seed."""

    outcome: Outcome
    rows: list[list[BatchRows]] | None
    seed_read: bool


def run_in_python(
    policies: Sequence[Policy],
    workload: Workload,
    setting: Setting,
    options: Options,
    progress: Callable[[int], None] | None,
) -> Served:
    """Serves the workload to its end, with one policy for each replica. InvalidPlan as `_serve`."""
    offsets = np.cumsum(workload.output_len) - workload.output_len
    token_times = np.full(int(workload.output_len.sum()), np.nan)
    preemptions = np.zeros(len(workload), np.int64)
    machines = [
        Replica(
            _scheduler(policy, setting, options),
            setting,
            output_len=workload.output_len,
            offsets=offsets,
            token_times=token_times,
            preemptions=preemptions,
            # What is learned may change any plan.
            coasts=options.coast and policy.steady and options.online is None,
            record_rows=options.record_rows,
        )
        for policy in policies
    ]
    last = offsets + workload.output_len - 1
    queue = BoundedQueue(setting.capacity, setting.replicas, last, token_times)
    served_by = _serve(machines, Requests(workload), ROUTERS[setting.routing], queue, progress)
    logs = [machine.batches() for machine in machines]
    return Served(
        Outcome(token_times, preemptions, served_by, logs),
        [machine.rows_log for machine in machines] if options.record_rows else None,
        any(machine.scheduler.view.seed_read for machine in machines),
    )


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
    requests: Requests,
    route: Router,
    queue: BoundedQueue,
    progress: Callable[[int], None] | None,
) -> np.ndarray:
    """The event loop. The replica of each request, int64 [n]. InvalidPlan if a plan that is not
    checked wants more than the pool has."""
    number, count = 0, len(requests)
    served_by = np.full(count, REFUSED)
    while True:
        machine = min(machines, key=lambda m: m.next_time)
        arrival = requests.arrival[number]
        if number < count and arrival <= machine.next_time:
            chosen = route(number, machines)
            if queue.admits(chosen, number, arrival):
                machines[chosen].receive(number, requests.make(number))
                served_by[number] = chosen
            number += 1
            if progress is not None:
                progress(1)
        elif machine.next_time < math.inf:
            try:
                machine.run(arrival)
            except OutOfBlocks as error:
                raise InvalidPlan(f"more blocks than are free ({error})") from error
        else:
            return served_by
