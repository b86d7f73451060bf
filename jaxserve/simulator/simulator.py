"""Simulates serving: the engine's scheduler, policies and block accounting on a virtual clock; in
Python (`replica/event_loop.py`), which is the reference, or compiled (`dispatch.py`), with the same
outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_for, slots_for, tokens_in
from jaxserve.sched.cache.groups.states import StateGroups
from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.cost.cost_model import CostModel
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.parameters import parameters
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policies.oracle import OraclePolicy
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.registry import PolicyName, is_built_in, make_policy, make_retention
from jaxserve.sched.routing.take_snapshot import constant_fields
from jaxserve.simulator import dispatch
from jaxserve.simulator.oracle.search import Found, search
from jaxserve.simulator.results import BatchRecords, RequestRecords, SimulationResult
from jaxserve.simulator.settings import (
    EngineOptions,
    FleetOptions,
    Routing,
    RunOptions,
    Served,
    Setting,
    TrafficOptions,
)
from jaxserve.simulator.workloads.workload import Workload

MAX_ROWS = 1 << 20  # default of max_rows: practically unlimited
DEFAULT_C = 4096
SARATHI_CHUNK = 512  # P (InferMax Table 1)
_ENGINE, _FLEET = EngineOptions(), FleetOptions()
_TRAFFIC, _RUN = TrafficOptions(), RunOptions()


class SimulationError(ValueError):
    """The simulation is impossible; the message says why."""


@dataclass(frozen=True)
class Rules:
    """The rules of the accounting. No field has a default: rules state everything that changes
    their figures, so that new defaults elsewhere do not change them.

    Attributes:
        overlap: Whether a step is planned while the one before it runs, as in the engine.
        host: Whether the host's work takes time, and step times scatter as measured.
        padding: Whether batches are rounded up to the system's shapes.
        block_size: Default tokens of a block.
        prefix_caching: Default of prefix caching in `jaxserve simulate`; it also covers what
        preempted requests had computed themselves.
        policy: Parameters of policies.
    """

    name: str
    overlap: bool
    host: bool
    padding: bool
    block_size: int
    prefix_caching: bool
    policy: dict[str, Any]


RULES = {
    # As in the engine.
    "jaxserve": Rules(
        "jaxserve",
        overlap=True,
        host=True,
        padding=True,
        block_size=16,
        prefix_caching=True,
        policy={},
    ),
    # As in InferMax's published simulator: blocks of one token, all of them available, each batch
    # planned when the one before it has ended, its own batch times, and preempted requests
    # recomputed in full.
    "infermax_paper": Rules(
        "infermax_paper",
        overlap=False,
        host=False,
        padding=False,
        block_size=1,
        prefix_caching=False,
        policy={"watermark": 0.0, "requeue": True, "probing": False},
    ),
}


def rules_named(name: str) -> Rules:
    """The rules by name. Raises SimulationError with the known names."""
    if name not in RULES:
        raise SimulationError(f"there are no rules {name!r}; known: {', '.join(RULES)}")
    return RULES[name]


def simulate(
    policy: str | Policy,
    workload: Workload,
    system: System | CostModel,
    *,
    engine: EngineOptions = _ENGINE,
    fleet: FleetOptions = _FLEET,
    traffic: TrafficOptions = _TRAFFIC,
    run: RunOptions = _RUN,
) -> SimulationResult:
    """Serves the workload, to its end or `traffic.until`.

    Args:
        policy: A name, or a policy object, which serves one replica.
        workload: The requests.
        system: Source of M, C and padding by default. A bare cost model has none.
        engine: How each replica serves.
        fleet: The replicas.
        traffic: Additional traffic, and when the run is cut off.
        run: How the simulation runs, and what it records.

    Raises:
        InvalidPlan: The policy's plan cannot be booked, or it makes no progress.
        SimulationError: This cannot be simulated.
    """
    rules = rules_named(engine.rules)
    policies = _policies(policy, rules, fleet.replicas)
    limits = engine.limits or default_limits(policies[0], system)
    setting = replace(
        _setting(system, rules, limits, engine),
        replicas=fleet.replicas,
        seed=run.seed,
        keeps_batches=run.record_batches,
        capacity=_capacity(engine.max_queue, limits),
    )
    setting = _routed(setting, policies[0], fleet.routing)
    count = len(workload)
    if traffic.drop_too_long:
        workload = _that_fit(workload, policies[0], setting)
    longest = _check_fits(workload, policies[0], setting)
    longest = max(longest, _check_end(traffic, policies[0], setting))
    setting = replace(setting, max_model_len=longest)
    _check_retention(engine)
    run = _resolved(run, policy, setting, traffic)
    served, found = _run(policy, policies, workload, setting, traffic, run)
    if isinstance(system, System) and system.transport:
        served = replace(served, token_times=served.token_times + system.transport)
    result = _result(setting, served, found, traffic.until)
    return replace(result, num_dropped=count - len(workload))


def _check_retention(engine: EngineOptions) -> None:
    """SimulationError if the retention is unknown, or without prefix caching."""
    try:
        make_retention(engine.retention)
    except ValueError as error:
        raise SimulationError(str(error)) from error
    if engine.retention != LRU and not engine.prefix_caching:
        raise SimulationError(f"retention {engine.retention} needs prefix_caching")


def _check_end(traffic: TrafficOptions, policy: Policy, setting: Setting) -> int:
    """Checks `until` and the closed loop. Returns the tokens of the loop's longest request, 0
    without a loop. Raises SimulationError if the end is not positive, or if the loop has no end or
    does not fit."""
    loop, until = traffic.best_effort, traffic.until
    if not until > 0:
        raise SimulationError(f"until must be a positive time, got {until}")
    if loop is None:
        return 0
    if until == math.inf:
        raise SimulationError("best_effort requests come again and again: until is needed")
    if setting.capacity < math.inf:
        raise SimulationError("best_effort requests would find the queue full: give no max_queue")
    try:
        return _check_fits(loop.longest(), policy, setting)
    except SimulationError as error:
        raise SimulationError(f"best_effort: {error}") from error


def _setting(
    system: System | CostModel, rules: Rules, limits: Limits, engine: EngineOptions
) -> Setting:
    """The setting of one replica, from the options, the rules and the system."""
    size = engine.block_size or _block_size(system, rules)
    known = system if isinstance(system, System) else None
    cost = system.cost_under(rules.name) if isinstance(system, System) else system
    setting = Setting(
        limits=limits,
        num_blocks=_num_blocks(system, engine.kv_tokens, engine.num_blocks, size),
        block_size=size,
        cost_model=cost,
        overlap=rules.overlap if engine.overlap is None else engine.overlap,
        host_slots=int(slots_for(engine.host_tokens)),
        rho=_rho(engine.rho, known, cost),
        projects=known is not None and known.projects,
        refuse_late=engine.refuse_late,
        prefix_caching=engine.prefix_caching,
        retention=engine.retention,
        online=engine.online,
        groups=engine.groups or state_groups(known, size),
    )
    if known is None:
        return setting
    return replace(
        setting,
        padding=known.padding if rules.padding else None,
        host=known.host if rules.host else HostOverhead(),
        scatter=known.scatter if rules.host else None,
    )


def _routed(setting: Setting, policy: Policy, routing: str | Routing) -> Setting:
    """The setting with routing; a name stands for one router that always sees the present state."""
    if not 0 <= setting.seed < 1 << 63:
        raise SimulationError(f"seed must be at least 0 and below 2**63, got {setting.seed}")
    known: dict[str, Any] = {}
    try:
        if isinstance(routing, str):
            routing = Routing(routing)
        if routing.looks:
            known = constant_fields(
                setting.cost_model,
                policy,
                setting.limits,
                setting.num_blocks,
                setting.block_size,
            )
    except ValueError as error:
        raise SimulationError(str(error)) from error
    most = f"at most as many as replicas, {setting.replicas}"
    if routing.routers > setting.replicas:
        raise SimulationError(f"routers must be {most}, got {routing.routers}")
    if routing.roles is not None and sum(routing.roles) != setting.replicas:
        raise SimulationError(f"roles must be of all {setting.replicas} replicas")
    last = max((fault.replica for fault in routing.faults), default=0)
    if last >= setting.replicas:
        raise SimulationError(f"there is no replica {last} that could have a fault")
    # The bound of an oracle assumes the model's step times.
    scatter = None if isinstance(policy, OraclePolicy) else setting.scatter
    return replace(setting, routing=routing, fixed=known, scatter=scatter)


def _resolved(
    options: RunOptions, policy: str | Policy, setting: Setting, traffic: TrafficOptions
) -> RunOptions:
    """The options with their defaults filled in. policy: the argument of `simulate`."""
    if options.watch is not None:  # only checked plans have blocks with ids
        options = replace(options, checked=True, coast=False)
    built_in = isinstance(policy, str) and is_built_in(policy)
    return replace(
        options,
        compiled=_compiled(options, setting, traffic),
        checked=not built_in if options.checked is None else options.checked,
    )


def _compiled(options: RunOptions, setting: Setting, traffic: TrafficOptions) -> bool | None:
    share, cut = setting.refuse_late, traffic.until < math.inf
    if share is not None and not share >= 0:
        raise SimulationError(f"refuse_late must be at least 0, got {share}")
    plain = not (options.checked or setting.online or options.record_rows or cut)
    in_python = not plain or share is not None or setting.groups is not None
    in_python |= setting.routing.link is not None
    if options.compiled and in_python:
        raise SimulationError(
            "compiled simulations check no plans, learn nothing, record no rows, predict no waits, "
            "know no groups of layers and no moves, and are not cut off"
        )
    return False if in_python else options.compiled


def _run(
    policy: str | Policy,
    policies: list[Policy],
    workload: Workload,
    setting: Setting,
    traffic: TrafficOptions,
    options: RunOptions,
) -> tuple[Served, Found | None]:
    """Runs `dispatch.run`, or the search if the policy is the oracle. policy: the argument of
    `simulate`."""
    try:
        if isinstance(policies[0], OraclePolicy):
            found = search(policies[0], workload, setting, traffic, options)
            return found.served, found
        return dispatch.run(policies, workload, setting, traffic, options), None
    except dispatch.NotCompiled as error:
        raise SimulationError(f"the simulation cannot run compiled: {error}") from error
    except InvalidPlan as error:
        name = policy if isinstance(policy, str) else type(policy).__name__
        raise InvalidPlan(f"policy {name}: {error}") from error


def _result(
    setting: Setting, served: Served, found: Found | None, until: float
) -> SimulationResult:
    if not len(served.workload):
        raise SimulationError(f"no request comes until {until:g} s")
    requests = RequestRecords.from_served(served, until)
    tokens = tokens_in(setting.num_blocks, setting.block_size)
    batches = BatchRecords.from_logs(served.batches)
    searched: dict[str, Any] = {}
    if found is not None:
        searched = {"goodput_bound": found.bound, "search_runs": found.runs, "found_by": found.name}
    return SimulationResult(
        requests,
        batches,
        rows=served.rows,
        kv_tokens=tokens,
        seed_read=served.seed_read or setting.scatter is not None,
        **searched,
        expected=served.expected,
        programs=served.programs,
    )


def _policies(policy: str | Policy, rules: Rules, replicas: int) -> list[Policy]:
    if replicas < 1 or (replicas > 1 and not isinstance(policy, str)):
        raise SimulationError("replicas must be at least 1, and each needs a policy of its own")
    return [policy_under(policy, rules) for _ in range(replicas)]


def _block_size(system: System | CostModel, rules: Rules) -> int:
    """The measured engine's block size, under the product's own rules."""
    known = system.block_size if isinstance(system, System) else None
    return known if known is not None and rules is RULES["jaxserve"] else rules.block_size


def policy_under(policy: str | Policy, rules: Rules) -> Policy:
    """Makes a policy with the rules' parameters, if it has them and its name does not set them. A
    policy object is returned unchanged."""
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
    """Limits of a simulation: explicit values, otherwise the system's, otherwise defaults.

    Args:
        policy: If it does not chunk prompts, P = C.
        system: A bare cost model has no limits.
        max_batch_tokens: C; 4096 by default.
        max_prefill_tokens: P; by default 512 (InferMax Table 1), at most C.
        max_rows: Most requests in a batch; no limit by default.
    """
    known = system if isinstance(system, System) else None
    c = max_batch_tokens or (known.max_batch_tokens if known else DEFAULT_C)
    p = c
    if policy.chunked:
        own = known.max_prefill_tokens if known else None
        p = max_prefill_tokens or min(own or SARATHI_CHUNK, c)
    return Limits(c, p, max_rows or (known.max_rows if known else None) or MAX_ROWS)


def _rho(
    rho: float | Literal["system"] | None, system: System | None, cost: CostModel
) -> float | None:
    """The given value, otherwise the system's. None if the cost model does not price hidden
    caches."""
    if rho != "system":
        return rho
    return system.rho if system is not None and cost is system.cost_model else None


def _capacity(max_queue: int | None, limits: Limits) -> float:
    """Most requests of a replica, queued and running, as the engine counts them."""
    if max_queue is None:
        return math.inf
    if max_queue < 0:
        raise SimulationError(f"max_queue must be at least 0, got {max_queue}")
    if limits.max_rows >= MAX_ROWS:
        raise SimulationError("max_queue needs a limit of max_rows; there is none here")
    return max_queue + limits.max_rows


def state_groups(system: System | None, block_size: int) -> StateGroups | None:
    """The groups of a system's layers with a state, in a pool of such blocks; None for none."""
    if system is None or not system.state_groups:
        return None
    return StateGroups(system.state_groups, -(-system.state_slots // block_size))


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


def _check_fits(workload: Workload, policy: Policy, setting: Setting) -> int:
    """Checks that every request fits. Returns the tokens of the longest request, prompt and limit.

    Raises SimulationError if M cannot hold a request at its limit, which a server would refuse, or
    if C cannot hold one that is not chunked. The last token of a request is never stored.
    """
    kv_tokens, limits = setting.longest_alone, setting.limits
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


def _that_fit(workload: Workload, policy: Policy, setting: Setting) -> Workload:
    """The requests that pass `_check_fits`, once their limits are cut to M. Raises SimulationError
    if there are none."""
    most = setting.longest_alone + 1
    step = most if policy.chunked else setting.limits.max_batch_tokens + 1
    fits = ~workload.programs.cut_off(workload.lengths.total > min(most, step))
    if not fits.any():
        raise SimulationError(
            f"all requests have more tokens than the {min(most, step) - 1} that fit"
        )
    kept = workload.select(fits)
    return replace(kept, limit=np.minimum(kept.limit, most - kept.prompt_len))


def _shape(workload: Workload, number: int) -> str:
    return (
        f"request {number} has {workload.prompt_len[number]} tokens in and "
        f"{workload.output_len[number]} out"
    )
