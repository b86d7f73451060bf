"""Simulates serving: the engine's scheduler, policies and block accounting on a virtual clock.

Event-driven: the next thing to happen is an arrival, which is routed to a replica, or a replica's
loop coming round (`replica.py`). Nothing depends on the machine's own clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxserve.sched.blocks import blocks_for, slots_for, tokens_in
from jaxserve.sched.cost_model import CostModel, LinearCostModel
from jaxserve.sched.free_blocks import OutOfBlocks
from jaxserve.sched.online_cost import OnlineCostModel
from jaxserve.sched.parameters import parameters
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import PolicyName, is_built_in, make_policy
from jaxserve.sched.simulation.bounded_queue import REFUSED, BoundedQueue
from jaxserve.sched.simulation.profiles import System
from jaxserve.sched.simulation.replica import Replica
from jaxserve.sched.simulation.requests import Requests
from jaxserve.sched.simulation.results import BatchRecords, RequestRecords, SimulationResult
from jaxserve.sched.simulation.shortcut import shortened
from jaxserve.sched.simulation.state import SimulatedScheduler
from jaxserve.sched.workloads.workload import Workload

MAX_ROWS = 1 << 20  # of a batch, where nothing else is said: as good as unlimited
DEFAULT_C = 4096
SARATHI_CHUNK = 512  # P (InferMax Table 1)


class SimulationError(ValueError):
    """What was asked for cannot be simulated; one line says why."""


@dataclass(frozen=True)
class Rules:
    """How the accounting goes. overlap: a step is planned while the one before it runs, as the
    engine does. block_size: tokens a block holds, where nothing else is said. policy: what policies
    are made with."""

    overlap: bool
    block_size: int
    policy: dict[str, Any] = field(default_factory=dict)


RULES = {
    # As the engine serves.
    "jaxserve": Rules(overlap=True, block_size=16),
    # As InferMax's published simulator counts: blocks of one token, all of them for whoever comes,
    # each batch planned when the one before it has ended, its own batch times.
    "infermax_paper": Rules(
        overlap=False, block_size=1, policy={"watermark": 0.0, "requeue": True}
    ),
}


def rules_named(name: str) -> Rules:
    """SimulationError lists the names."""
    if name not in RULES:
        raise SimulationError(f"there are no rules {name!r}; known: {', '.join(RULES)}")
    return RULES[name]


def simulate(
    policy: str | Policy,
    workload: Workload,
    system: System | CostModel,
    *,
    limits: Limits | None = None,
    kv_tokens: int | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
    host_tokens: int = 0,
    rules: str = "jaxserve",
    overlap: bool | None = None,
    replicas: int = 1,
    routing: str = "round_robin",
    max_queue: int | None = None,
    rho: float | Literal["system"] | None = "system",
    seed: int = 0,
    checked: bool | None = None,
    coast: bool = True,
    online: LinearCostModel | None = None,
    record_rows: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Serves the workload to its end.

    policy: a name, or a policy, which serves one replica. system: M, C and padding come from it
    where they are not given; a bare cost model has none of them. limits: by default the system's C,
    P = 512 (C for policies that do not chunk), any number of rows. kv_tokens: M; num_blocks instead
    counts blocks, of which K and V of block_size tokens take two. host_tokens: of K and V that host
    memory holds of checkpoints. overlap: instead of the rules'. max_queue: requests that may wait
    beside max_rows; who comes then is refused. rho: what a token read from a hidden cache costs a
    step, see `View`; by default the system's, None for no hidden caches. checked: check plans as
    the engine does; by default all but those of `registry.is_built_in` policies. coast: take steps
    that are certain several at once; the outcome is the same. online: policies see a model that
    begins as this one and learns from the steps, as a server's do, not the true one. record_rows:
    keep who was in each batch. progress(n): n more have come.
    SimulationError if a request can never be served, InvalidPlan for what cannot be booked.
    """
    chosen = rules_named(rules)
    cost = system.cost_under(rules) if isinstance(system, System) else system
    policies = _policies(policy, chosen, replicas)
    limits = limits or default_limits(policies[0], system)
    size = block_size or _block_size(system, chosen)
    blocks = _num_blocks(system, kv_tokens, num_blocks, size)
    longest = _check_fits(workload, policies[0], limits, tokens_in(blocks, size))
    books = _Books(workload, _capacity(max_queue, limits), replicas)
    room: dict[str, Any] = {"num_blocks": blocks, "block_size": size, "max_model_len": longest}
    room |= {"host_slots": int(slots_for(host_tokens)), **_hidden(rho, system, cost)}
    room |= {"limits": limits, "seed": seed, "checked": _checked(checked, policy)}
    room["padding"] = system.padding if isinstance(system, System) else None
    how: dict[str, Any] = {"record_rows": record_rows, "coast": coast, "online": online}
    how["overlap"] = chosen.overlap if overlap is None else overlap
    machines = [books.replica(one, cost, room, **how) for one in policies]
    _serve(machines, Requests(workload), router(routing), books, progress)
    return books.result(machines, record_rows)


class _Books:
    """What becomes of each request, written by the replicas. capacity: of each, see
    `BoundedQueue`."""

    def __init__(self, workload: Workload, capacity: float, replicas: int) -> None:
        self.offsets = np.cumsum(workload.output_len) - workload.output_len
        self.token_times = np.full(int(workload.output_len.sum()), np.nan)
        self.preemptions = np.zeros(len(workload), np.int64)
        self.served_by = np.full(len(workload), REFUSED)
        last = self.offsets + workload.output_len - 1
        self.queue = BoundedQueue(capacity, replicas, last, self.token_times)
        self._workload = workload

    def replica(
        self,
        policy: Policy,
        cost_model: CostModel,
        room: dict[str, Any],
        *,
        coast: bool,
        online: LinearCostModel | None,
        **options: Any,
    ) -> Replica:
        """A replica that writes here. coast, online: see `simulate`; room: options of its
        scheduler; the rest are its own."""
        coast = coast and online is None  # what is learned may change any plan
        return Replica(
            SimulatedScheduler(
                shortened(policy) if coast else policy,
                cost_model=cost_model if online is None else OnlineCostModel(online),
                **room,
            ),
            cost_model,
            coasts=coast and policy.steady,
            output_len=self._workload.output_len,
            offsets=self.offsets,
            token_times=self.token_times,
            preemptions=self.preemptions,
            **options,
        )

    def result(self, machines: Sequence[Replica], with_rows: bool) -> SimulationResult:
        """When all requests have ended."""
        served = np.repeat(self.served_by != REFUSED, self._workload.output_len)
        requests = RequestRecords(
            self._workload, self.preemptions, self.served_by, self.token_times[served]
        )
        batches = BatchRecords.of([machine.batches() for machine in machines])
        rows = [machine.rows_log for machine in machines] if with_rows else None
        kv_tokens = machines[0].scheduler.pool.pool_tokens
        seed_read = any(machine.scheduler.view.seed_read for machine in machines)
        return SimulationResult(requests, batches, rows, kv_tokens, seed_read)


def _policies(policy: str | Policy, rules: Rules, replicas: int) -> list[Policy]:
    if replicas < 1 or (replicas > 1 and not isinstance(policy, str)):
        raise SimulationError("replicas must be at least 1, and each needs a policy of its own")
    return [policy_under(policy, rules) for _ in range(replicas)]


def _checked(wanted: bool | None, policy: str | Policy) -> bool:
    return wanted if wanted is not None else not (isinstance(policy, str) and is_built_in(policy))


def _block_size(system: System | CostModel, rules: Rules) -> int:
    """The measured engine's, under the product's own rules."""
    known = system.block_size if isinstance(system, System) else None
    return known if known is not None and rules is RULES["jaxserve"] else rules.block_size


def policy_under(policy: str | Policy, rules: Rules) -> Policy:
    """The policy as the rules have it: with those of their parameters that it has, and that its
    name does not set. A policy that has been made stays as it is."""
    if not isinstance(policy, str):
        return policy
    said, has = PolicyName.parse(policy).params, parameters(make_policy(policy))
    ours = {name: value for name, value in rules.policy.items() if name in has.keys() - said}
    return make_policy(policy, **ours)


def default_limits(
    policy: Policy,
    system: System | CostModel,
    *,
    max_batch_tokens: int | None = None,
    max_prefill_tokens: int | None = None,
    max_rows: int | None = None,
) -> Limits:
    """The system's, where nothing else is given; where that says nothing, C = 4096, Sarathi's P
    for policies that chunk, and rows without limit."""
    known = system if isinstance(system, System) else None
    c = max_batch_tokens or (known.max_batch_tokens if known else DEFAULT_C)
    p = c
    if policy.chunked:
        own = known.max_prefill_tokens if known else None
        p = max_prefill_tokens or min(own or SARATHI_CHUNK, c)
    return Limits(c, p, max_rows or (known.max_rows if known else None) or MAX_ROWS)


def _hidden(
    rho: float | Literal["system"] | None, system: System | CostModel, cost: CostModel
) -> dict[str, Any]:
    """rho and projects of the view: as given, else the system's. Batch times that leave hidden
    caches out offer none."""
    known = system if isinstance(system, System) else None
    if rho == "system":
        rho = known.rho if known and cost is known.cost_model else None
    return {"rho": rho, "projects": known is not None and known.projects}


Router = Callable[[int, Sequence[Replica]], int]


def router(name: str) -> Router:
    """Which replica gets request number i: `round_robin`, or `least_loaded`, the first of those
    with the fewest unfinished requests. SimulationError lists the names."""
    if name not in ROUTERS:
        raise SimulationError(f"there is no routing {name!r}; known: {', '.join(ROUTERS)}")
    return ROUTERS[name]


def _least_loaded(number: int, machines: Sequence[Replica]) -> int:
    return min(range(len(machines)), key=lambda i: machines[i].live)


ROUTERS: dict[str, Router] = {
    "round_robin": lambda number, machines: number % len(machines),
    "least_loaded": _least_loaded,
}


def _serve(
    machines: list[Replica],
    requests: Requests,
    route: Router,
    books: _Books,
    progress: Callable[[int], None] | None,
) -> None:
    """The event loop. InvalidPlan if a plan that is not checked wants more than the pool has."""
    number, count = 0, len(requests)
    while True:
        machine = min(machines, key=lambda m: m.next_time)
        arrival = requests.arrival[number]
        if number < count and arrival <= machine.next_time:
            chosen = route(number, machines)
            if books.queue.admits(chosen, number, arrival):
                machines[chosen].receive(number, requests.make(number))
                books.served_by[number] = chosen
            number += 1
            if progress is not None:
                progress(1)
        elif machine.next_time < math.inf:
            try:
                machine.run(arrival)
            except OutOfBlocks as error:
                raise InvalidPlan(f"more blocks than are free ({error})") from error
        else:
            return


def _capacity(max_queue: int | None, limits: Limits) -> float:
    """Requests that a replica has at most, queued and running, as the engine counts them."""
    if max_queue is None:
        return math.inf
    if max_queue < 0:
        raise SimulationError(f"max_queue must be at least 0, got {max_queue}")
    if limits.max_rows >= MAX_ROWS:
        raise SimulationError("max_queue needs a limit of max_rows; there is none here")
    return max_queue + limits.max_rows


def _num_blocks(
    system: System | CostModel, kv_tokens: int | None, num_blocks: int | None, block_size: int
) -> int:
    if num_blocks is not None:
        if kv_tokens is not None:
            raise SimulationError("give kv_tokens or num_blocks, not both")
        return num_blocks
    if kv_tokens is None:
        if not isinstance(system, System):
            raise SimulationError("kv_tokens or num_blocks is needed with a bare cost model")
        kv_tokens = system.kv_tokens
    return int(blocks_for(kv_tokens // block_size * block_size, block_size))


def _check_fits(workload: Workload, policy: Policy, limits: Limits, kv_tokens: int) -> int:
    """The tokens that the longest request may get to have. SimulationError if M does not hold what
    every request may get to, as a server refuses it, or C what it does get to. The last token of a
    request is never stored."""
    allowed, total = workload.prompt_len + workload.limit, workload.lengths.total
    worst = int(np.lexsort((total, allowed))[-1])
    longest = int(allowed[worst])
    if longest - 1 > kv_tokens:
        asked = f", of {workload.limit[worst]} asked for" if total[worst] < longest else ""
        raise SimulationError(
            f"{_shape(workload, worst)}{asked}; the cache holds {kv_tokens} tokens"
        )
    # After a preemption the generated tokens are part of the prompt.
    worst = int(total.argmax())
    if not policy.chunked and total[worst] - 1 > limits.max_batch_tokens:
        raise SimulationError(
            f"{_shape(workload, worst)}, and the policy computes it in one step; max_batch_tokens "
            f"is {limits.max_batch_tokens}"
        )
    return longest


def _shape(workload: Workload, number: int) -> str:
    return (
        f"request {number} has {workload.prompt_len[number]} tokens in and "
        f"{workload.output_len[number]} out"
    )
