"""Runs the compiled simulation: builds its arrays from a workload, and reads the outcome from
them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core.errors import NumbaError

from jaxserve.sched.cost.cost_model import BatchFeatures, InferMaxCostModel, LinearCostModel
from jaxserve.sched.cost.reachability import JUST_MISSED, Alone
from jaxserve.sched.cost.step_residuals import first_lot
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.progress import futile
from jaxserve.sched.routing.random_draws import seeded
from jaxserve.sched.routing.routers import ROUTERS
from jaxserve.sched.routing.snapshot import KNOWN, SNAPSHOT, reset_known
from jaxserve.sched.routing.take_snapshot import idle_snapshot
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.sched.state.output_lengths import BINS, bin_of, bins_above
from jaxserve.sched.state.request_table import WAITING
from jaxserve.sched.unified.policy_spec import CompiledSpec
from jaxserve.sched.unified.unified_policy import Phase, Reserve, UnifiedPolicy
from jaxserve.simulator.compiled.cost import Costs, Linear, Paper, Prices
from jaxserve.simulator.compiled.events import FAULT, KINDS, PUBLISH, first_heap
from jaxserve.simulator.compiled.kernel import compiled_key, compiled_serve
from jaxserve.simulator.compiled.loop import DONE, FULL, NOWHERE, STUCK
from jaxserve.simulator.compiled.state import (
    ASKED,
    CURSOR,
    FAULTS,
    GROUP,
    HOST,
    NOTHING,
    PAGE,
    REPLICA,
    REQUEST,
    ROUTER,
    SETTINGS,
    Machine,
    Rules,
    World,
)
from jaxserve.simulator.settings import BATCH, Served, Setting
from jaxserve.simulator.workloads.shared_prefixes import BlockKeys
from jaxserve.simulator.workloads.workload import Workload

NO_CAPACITY = np.iinfo(np.int64).max
_FIRST_LIVE, _FIRST_BATCHES = 256, 4096
_PAUSES = 200  # to report progress


class NotCompilable(ValueError):
    """numba cannot compile a key."""


def key_of(form: CompiledSpec) -> Any:
    """Compiles the form's key. Raises NotCompilable if numba cannot."""
    try:
        return compiled_key(form.key or _no_key, form.lapse)
    except (NumbaError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise NotCompilable((lines[1:2] or lines or [type(error).__name__])[0]) from error


def run(
    policy: UnifiedPolicy,
    form: CompiledSpec,
    key: Any,
    workload: Workload,
    setting: Setting,
    progress: Callable[[int], None] | None = None,
    compiling: Callable[[], None] | None = None,
    *,
    reuse: bool = False,
) -> Served:
    """Serves the workload to its end.

    Args:
        policy: Serves every replica.
        form: Its compiled spec.
        key: `key_of` the form.
        workload: The requests.
        setting: Where they are served.
        progress: progress(n) is called when n more requests have arrived.
        compiling: Called when numba begins to compile.
        reuse: Whether blocks are reused.

    Raises:
        InvalidPlan: The policy plans nothing although it could, or makes no progress.
    """
    rules, costs = _rules(policy, form, setting), _costs(setting)
    chunk = policy.prefill_limit(setting.limits)
    world = _world(workload, setting, form.given, chunk, knows=policy.hypothetical)
    if reuse:
        rules.settings["reuse"] = True
        world = _with_pages(world, BlockKeys(workload, setting.block_size))
    serve = compiled_serve(world, rules, costs, compiling)
    count, seen = len(workload), 0
    every = count if progress is None else max(count // _PAUSES, 1)
    while True:
        status = serve(world, rules, costs, key, min(seen + every, count))
        arrived = int(world.cursor["arrived"][0])
        if progress is not None and arrived > seen:
            progress(arrived - seen)
        seen = arrived
        if status in (STUCK, NOWHERE):
            stuck = world.machines.me[world.machines.me["next_time"].argmin()]
            if status == NOWHERE:
                raise futile(int(stuck["batches"]))
            raise InvalidPlan(f"it plans nothing for {stuck['live']} requests")
        if status == FULL:
            world = _larger(world)
        elif status == DONE:
            break
    kept = world.machines.me["batches"] * setting.keeps_batches
    logs = [log[:n].copy() for log, n in zip(world.machines.log, kept, strict=True)]
    names = ("preemptions", "replica", "failed")
    preemptions, replica, failed = (world.requests[name].copy() for name in names)
    found = np.where(failed, 0, world.requests["hit"]) if reuse else None
    served = (workload, world.token_times, preemptions, replica, failed, logs)
    return Served(*served, found=found)


def _no_key(request: Any) -> float:
    return 0.0


def _rules(policy: UnifiedPolicy, form: CompiledSpec, setting: Setting) -> Rules:
    limits = setting.limits
    s = np.zeros(1, SETTINGS)
    for owner, names in (
        (limits, ("max_batch_tokens", "max_prefill_tokens")),
        (setting, ("num_blocks", "block_size", "overlap", "keeps_batches")),
        (setting.routing, ("looks", "routers", "interval", "age", "loss")),
        (policy, ("mixed_batches", "chunked", "requeue", "probing")),
        (form, ("expects", "promises", "enough")),
    ):
        for name in names:
            s[name] = getattr(owner, name)
    if policy.full_prefill:
        s["max_prefill_tokens"] = limits.max_batch_tokens
    s["chunk"], s["max_rows"] = policy.prefill_limit(limits), policy.row_limit(limits)
    s["watermark"] = int(policy.watermark * setting.num_blocks)
    s["reserve"] = list(Reserve).index(policy.reserve)
    s["keyed"], s["lapses"] = form.key is not None, form.lapse is not None
    s["routing"] = list(ROUTERS).index(setting.routing.name)
    s["capacity"] = min(setting.capacity, NO_CAPACITY)
    groups = np.zeros(len(policy.groups), GROUP)
    for i, group in enumerate(policy.groups):
        phases = group.phases
        members = (Phase.DECODE in phases, Phase.PREFILL in phases, Phase.WAITING in phases)
        groups[i] = (*members, group.preempts)
    host = np.zeros(1, HOST)
    for name in HOST.names or ():
        host[name] = getattr(setting.host, name)
    return Rules(s, host, groups)


def _costs(setting: Setting) -> Costs:
    model = setting.cost_model
    linear = model.linear if isinstance(model, InferMaxCostModel) else model
    assert isinstance(linear, LinearCostModel)
    prices = Prices(*(float(value) for value in linear.coefficients.as_dict().values()))
    residual, factor = (0.0, 0.0, 0.0), 1.0
    if isinstance(model, InferMaxCostModel):
        a, b, c = model.residual
        residual, factor = (float(a), float(b), float(c)), float(model.attention_factor)
    plain = Linear(prices, linear.num_layers, linear.overlapped, *linear.experts)
    padding = setting.padding
    return Costs(
        Paper(plain, residual, factor),
        isinstance(model, InferMaxCostModel),
        np.array(padding.rows if padding else (), np.int64),
        np.array(padding.tokens if padding else (), np.int64),
        padding.decode_group if padding else 1,
        padding.decode_chunk if padding else 1,
        *_scatter(setting),
    )


def _scatter(setting: Setting) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    scatter = setting.scatter
    if scatter is None:
        return np.zeros((2, 0)), np.zeros((2, 0)), np.zeros(0), np.zeros((2, 0), np.int64)
    return scatter.factors, scatter.bounds, scatter.host, scatter.lots(setting.seed)


def _world(
    workload: Workload, setting: Setting, given: np.ndarray | None, chunk: int, *, knows: bool
) -> World:
    """chunk: see `Alone.from_lengths`."""
    count, replicas = len(workload), setting.replicas
    requests = _requests(workload, setting, knows=knows)
    _set_targets(requests, workload, setting, chunk)
    requests["given"] = 0.0 if given is None else given
    machines = np.zeros(replicas, REPLICA)
    machines["next_time"], machines["free"] = math.inf, setting.num_blocks
    machines["flying"], machines["woken"] = NOTHING, -math.inf
    room = min(_FIRST_LIVE, max(count, 2))
    machines["first"] = machines["end"] = room
    machines["next_lapse"] = math.inf
    machines["slow"] = machines["slowdown"] = machines["pace"] = machines["attainment"] = 1.0
    machines["draw"] = [seeded(setting.seed, setting.routing.routers + i) for i in range(replicas)]
    machines["lot"] = [first_lot(i) for i in range(replicas)]
    longest = int(workload.output_len.max()) + 2  # including tokens computed in vain
    every = Machine(
        requests,
        machines,
        running=np.zeros((replicas, room), np.int64),
        waiting=np.zeros((replicas, 2 * room), np.int64),
        needs=np.zeros(count, np.int64),
        lapses=np.full(count, math.inf),
        chosen=np.zeros((replicas, room), np.int64),
        victims=np.zeros((replicas, room), np.int64),
        flying=np.zeros((replicas, 2, room), np.int64),
        scratch=np.zeros((replicas, room), np.int64),
        log=np.zeros((replicas, _FIRST_BATCHES), BATCH),
        reached=np.zeros((replicas, BINS)),
        ended=np.zeros((replicas, BINS)),
        mean=np.zeros((replicas, BINS)),
        expected=np.zeros((replicas, BINS)),
        bins_above=bins_above(np.arange(longest + 1)),
        bin_of=np.array([0, *map(bin_of, range(1, longest + 1))]),
        pages=np.zeros((replicas, 1), PAGE),
    )
    times = np.full(int(workload.output_len.sum()), np.nan)
    cursor = np.array([(0, NOTHING)], CURSOR)
    return World(requests, times, cursor, machines=every, **_front(setting))


def _with_pages(world: World, keys: BlockKeys) -> World:
    """The initial world with pages for prefix caching."""
    requests, machines = world.requests, world.machines
    requests["parent"], requests["common"] = keys.parent, keys.common
    requests["base"] = keys.base + 1  # page 0 is the head of a list
    # Pages take memory only once they are touched, so unused ones of other replicas take none.
    pages = np.zeros((len(machines.me), keys.count + 1), PAGE)
    return world._replace(machines=machines._replace(pages=pages))


def _front(setting: Setting) -> dict[str, np.ndarray]:
    """The initial state in front of the replicas."""
    count = setting.replicas
    known, published = np.zeros(count, KNOWN), np.zeros(count, SNAPSHOT)
    known["first_sent"] = known["last_sent"] = NOTHING
    times = np.full((KINDS, count), math.inf)
    if setting.routing.looks:
        said = idle_snapshot(setting.fixed)
        published[:] = tuple(getattr(said, name) for name in SNAPSHOT.names or ())
        for one in known.view(np.recarray):
            reset_known(one, said)
        if setting.routing.interval:
            times[PUBLISH] = setting.routing.first_times(count)
    faults = np.array([(math.inf, 1.0, 0.0)] * count, FAULTS)
    for fault in setting.routing.faults:
        faults[fault.replica] = (fault.time, fault.slowdown, fault.notice)
    times[FAULT] = faults["time"]
    flat = times.reshape(-1)
    heap, place = first_heap(flat)
    lots = [(0, seeded(setting.seed, i)) for i in range(setting.routing.routers)]
    return {
        "routers": np.array(lots, ROUTER),
        "known": known,
        "published": published,
        "faults": faults,
        "event_times": flat,
        "event_heap": heap,
        "event_place": place,
    }


def _requests(workload: Workload, setting: Setting, *, knows: bool) -> np.ndarray:
    """knows: whether the policy knows output lengths."""
    requests = np.zeros(len(workload), REQUEST)
    requests["arrival"] = requests["last_token"] = workload.arrival
    for name in ("prompt_len", "output_len", "tier", "greedy"):
        requests[name] = getattr(workload, name)
    requests["max_tokens"] = workload.limit
    requests["most_output"] = workload.output_len if knows else workload.limit
    requests["offset"] = np.cumsum(workload.output_len) - workload.output_len
    requests["seed"], requests["state"] = setting.seed, int(WAITING)
    return requests


def _set_targets(requests: np.ndarray, workload: Workload, setting: Setting, chunk: int) -> None:
    """Sets the targets like `RequestTable.add`."""
    padding, cost = setting.padding, setting.cost_model

    def step_time(batch: BatchFeatures) -> Any:
        return cost.batch_time(batch if padding is None else batch.padded(padding))

    alone = Alone.from_lengths(workload.prompt_len, workload.limit, step_time, chunk)
    requests["late"] = (workload.ttft < alone.ttft) | (workload.jct < alone.jct)
    some = np.zeros(len(workload), bool)
    for name, asked in zip(TARGETS, ASKED, strict=True):
        target = getattr(workload, name)
        requests[asked] = target
        requests[name] = np.maximum(target, getattr(alone, name) * JUST_MISSED)
        some |= target < math.inf
    some |= workload.max_tbt < math.inf
    requests["alone"] = np.where(some, alone.ttft, 0.0)


def _larger(world: World) -> World:
    """The world with room for twice as many live requests and batches."""
    lists = ("running", "waiting", "chosen", "victims", "flying", "scratch", "log")
    arrays = {name: getattr(world.machines, name) for name in lists}
    twice = {n: np.concatenate([a, np.zeros_like(a)], axis=-1) for n, a in arrays.items()}
    return world._replace(machines=world.machines._replace(**twice))
