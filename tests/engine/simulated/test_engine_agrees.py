"""The engine, put together as it is for serving, and the simulator, given the same trace and the
same clock, make the same plans and learn the same from the steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.startup.choices.pool_size import GIB
from jaxserve.sched.cache.cache_kinds import ABSORBED, PROJECTED
from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.plan import BatchPlan, Checkpoint, Preempt, Restore
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.request import Tier
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.prefixes import Prefixes
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.engine.simulated.engine_on_a_virtual_clock import LAYERS, MODEL, Served, configured
from tests.moving_caches import MovingCaches
from tests.sharing_caches import SharingCaches

DEPLOYABLE = [name for name in policies() if not make_policy(name).hypothetical]
HYBRID = [name for name in DEPLOYABLE if make_policy(name).hybrid_cache]


def _of_variants(policy: str) -> list[pytest.MarkDecorator]:
    base, _, variant = policy.partition("_")
    return [pytest.mark.slow] if variant and base in DEPLOYABLE else []


# Each kind of operation costs something of its own, so that one forgotten would show.
_OF_ALL = LinearCostModel(
    dataclasses.replace(
        system("llama-2-7b@a100").cost_model.coefficients,
        projected_token=3e-6,
        hidden_token=2e-6,
        hidden_prefill=1e-6,
        sampled_row=4e-6,
        copied_slot=5e-6,
        swapped_slot=7e-6,
    ),
    num_layers=32,
)


def scaled(model: LinearCostModel, factor: Callable[[], float]) -> LinearCostModel:
    """In LAYERS layers, each coefficient times a factor of its own."""
    change = model.num_layers / LAYERS
    values = {name: v * change * factor() for name, v in model.coefficients.as_dict().items()}
    return LinearCostModel(Coefficients(**values), LAYERS)


_RNG = np.random.default_rng(4)
TRUE = scaled(_OF_ALL, lambda: 1.0)
PRIOR = scaled(_OF_ALL, lambda: float(_RNG.uniform(0.3, 3.0)))
PROBE = BatchFeatures.from_rows(
    np.array([1, 1, 30]), np.array([40, 90, 0]), np.array([True, True, False])
)
SMALL, LARGE = 80, 800  # blocks


def trace(seed: int, rate: float, early: bool, count: int = 24, *, liars: bool = False) -> Workload:
    """early: outputs end before their limits, but for every third. Every second request has
    targets, every fourth is best effort, every fifth samples. liars: some targets could not be met
    by anybody."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    lengths = Lengths(rng.integers(2, 160, count), rng.integers(1, 60, count))
    limit = lengths.output_len
    if early:
        limit = limit + rng.integers(1, 30, count) * (np.arange(count) % 3 > 0)
    some = np.arange(count) % 2 == 0
    lies = liars & (np.arange(count) % 6 == 0)
    terms = SloColumns(
        tier=np.where(np.arange(count) % 4 == 3, Tier.BEST_EFFORT, Tier.REALTIME).astype(np.int8),
        ttft=np.where(some, rng.uniform(0.05, 0.5, count), np.inf) * np.where(lies, 1e-6, 1),
        tbt=np.where(some, rng.uniform(0.02, 0.1, count), np.inf),
        jct=np.where(np.arange(count) % 4 == 2, 2.0, np.inf),
        max_tbt=np.where(np.arange(count) % 8 == 0, 0.3, np.inf),
        slo_class=np.zeros(count, np.int64),
        greedy=np.arange(count) % 5 > 0,
        value=np.where(np.arange(count) % 3 == 0, 2.0, 1.0),
    )
    return Workload.create(arrival, lengths, limit=limit, terms=terms)


def turns() -> Workload:
    """Each begins as one of those before it has, or as what that was answered."""
    workload, rng = trace(3, 20.0, True, count=40), np.random.default_rng(5)
    prefixes = Prefixes.none(len(workload))
    for number in range(1, len(workload)):
        source = int(rng.integers(number))
        most = min(int(workload.prompt_len[number]), int(workload.lengths.total[source]))
        prefixes.prefix_of[number], prefixes.prefix_len[number] = source, rng.integers(1, most + 1)
    return dataclasses.replace(workload, **vars(prefixes))


@pytest.fixture
def agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimulationResult]:
    """agree(make, workload, **fields of the configuration): the simulation, once everything in it
    has been found to be as the engine did it; make() makes the policy."""

    def run(make: Callable[[], Policy], workload: Workload, **fields: Any) -> SimulationResult:
        live, simulated = listening(make()), listening(make())
        monkeypatch.setattr(policy_choice, "make_policy", lambda name: live[0])
        longest = int((workload.prompt_len + workload.limit).max())
        config = configured(tmp_path, longest, PRIOR, **(FIELDS | fields))
        served = Served(config, workload, TRUE)
        result = simulated_as(served, simulated[0], workload, config)
        assert live[1] == simulated[1]
        assert len({told[0] for told in live[1]}) > 3, "nothing was learned"
        assert any(told[1] > 0 for told in live[1])
        same(served, result)
        return result

    return run


FIELDS: dict[str, Any] = {
    "cache__block_size": 8,
    "cache__num_blocks": LARGE,
    "scheduler__max_batch_tokens": 256,
    "scheduler__max_prefill_tokens": 64,
    "scheduler__max_rows": 12,
    "scheduler__seed": 5,
}


def listening(policy: Policy) -> tuple[Policy, list[tuple[float, ...]]]:
    """The policy, and what it was told whenever it planned: what `PROBE` takes, when the step in
    flight ends, and of those that run when their tokens came."""
    plan, heard = policy.plan, list[tuple[float, ...]]()

    def listen(view: View, now: float) -> BatchPlan:
        table, rows = view.table, view.table.in_state(RUNNING)
        came = (table.first_token, table.last_token, table.late_gaps, table.longest_gap)
        told = [value for column in came for value in column[rows].tolist()]
        heard.append((float(view.step_time(PROBE)), view.step_end(now), *told))
        return plan(view, now)

    object.__setattr__(policy, "plan", listen)
    return policy, heard


def simulated_as(
    served: Served, policy: Policy, workload: Workload, config: Any
) -> SimulationResult:
    """The simulation of what the engine has served."""
    chosen = served.chosen
    projects = chosen.kernels.model.hidden_read == PROJECTED
    place = System(
        "true", TRUE, kv_tokens=1, padding=chosen.memory.buckets.padding, projects=projects
    )
    return simulate(
        policy,
        workload,
        place,
        engine=EngineOptions(
            limits=chosen.scheduling.limits,
            num_blocks=chosen.memory.num_blocks,
            block_size=chosen.scheduling.block_size,
            host_tokens=chosen.memory.host_slots // 2,
            overlap=config.engine.overlap,
            rho=served.engine.info().rho,
            online=PRIOR,
            prefix_caching=config.cache.prefix_caching,
        ),
        run=RunOptions(seed=config.scheduler.seed, checked=True, record_rows=True),
    )


def same(served: Served, result: SimulationResult) -> None:
    assert result.rows is not None
    assert len(served.plans) == len(result.rows[0])
    for i, (plan, batch) in enumerate(zip(served.plans, result.rows[0], strict=True)):
        assert plan.rows.tolist() == batch.requests.tolist(), i
        assert plan.num_tokens.tolist() == batch.tokens.tolist(), i
        assert plan.preempted.tolist() == batch.preempted.tolist(), i
    records, batches = result.requests, result.batches
    for number, engines in served.token_times.items():
        first = int(records.offsets[number])
        ours = records.token_times[first : first + len(engines)]
        assert len(engines) == records.workload.output_len[number]
        np.testing.assert_allclose(ours, engines, rtol=1e-9)
    hidden = [int(np.count_nonzero(plan.kinds)) for plan in served.plans]
    assert hidden == batches.num_hidden.tolist()
    counted = [
        (s.num_recomputed_tokens, s.num_shared, s.features.saved_slots, s.features.loaded_slots)
        for s in served.steps
    ]
    names = ("num_recomputed", "num_shared", "saved_slots", "loaded_slots")
    assert counted == [*zip(*(getattr(batches, name).tolist() for name in names), strict=True)]
    longer = np.array([stats.lengthening for stats in served.steps])
    np.testing.assert_allclose(longer, result.lengthening, rtol=1e-9, atol=1e-15)
    tier = records.workload.terms.tier
    both = np.array([len(set(tier[plan.rows].tolist())) > 1 for plan in served.plans])
    assert longer[both].any() == both.any()
    if (
        not served.chosen.scheduling.policy.moves_cache
    ):  # else there are operations without a batch, too
        measured = [stats.device_time for stats in served.steps]
        np.testing.assert_allclose(measured, batches.duration, rtol=1e-9)


@pytest.mark.promise(23)
@pytest.mark.parametrize(
    ("policy", "rate", "blocks", "early"),
    [
        *(
            pytest.param(policy, 100.0, SMALL, True, marks=_of_variants(policy))
            for policy in DEPLOYABLE
        ),
        ("edf", 6.0, LARGE, False),
    ],
)
def test_the_plans_are_the_same_one_by_one(
    policy: str, rate: float, blocks: int, early: bool, agree: Callable[..., SimulationResult]
) -> None:
    workload = trace(3, rate, early, liars=not early)
    fields: dict[str, Any] = {"cache__num_blocks": blocks}
    if policy in HYBRID:
        fields["cache__hidden_read"] = ABSORBED  # cheap enough that some are taken
    result = agree(lambda: make_policy(policy), workload, **fields)
    if blocks == SMALL and policy not in ("orca", "thunderagent", *HYBRID):
        assert result.batches.preemptions.sum() > 0, "the small pool should have led to preemptions"
    if blocks == SMALL and policy in HYBRID:
        # To read a pool full of them takes longer here than a step: goodput takes none.
        assert (result.batches.num_hidden.sum() > 0) == (policy != "goodput")


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [("sarathi", LARGE), *((policy, SMALL) for policy in ("vllm", "bros", "aptserve"))],
)
def test_so_is_what_is_found_again(
    policy: str, blocks: int, agree: Callable[..., SimulationResult]
) -> None:
    fields = {"cache__num_blocks": blocks, "cache__prefix_caching": True}
    found = agree(lambda: make_policy(policy), turns(), **fields).requests.found
    assert found is not None and found.sum() > 100


@pytest.mark.parametrize("policy", ["sarathi", "aptserve"])
def test_so_is_what_comes_back_from_the_host(
    policy: str, agree: Callable[..., SimulationResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, model in (("TRUE", TRUE), ("PRIOR", PRIOR)):  # copies pay
        cheap = dataclasses.replace(model.coefficients, swapped_slot=5e-6)
        monkeypatch.setitem(globals(), name, LinearCostModel(cheap, LAYERS))
    gib = 2 * 1000 * SLOT_BYTES / GIB
    fields = {"cache__num_blocks": SMALL, "cache__prefix_caching": True, "cache__host_gib": gib}
    result = agree(lambda: make_policy(policy), turns(), **fields)
    assert result.batches.loaded_slots.sum() > 100 < result.batches.saved_slots.sum()


def test_so_they_are_where_hidden_caches_are_projected(
    agree: Callable[..., SimulationResult],
) -> None:
    fields = {"cache__num_blocks": SMALL, "cache__hidden_read": PROJECTED}
    result = agree(lambda: make_policy("aptserve"), trace(1, 100.0, True), **fields)
    assert result.batches.num_hidden.sum() > 0


@pytest.mark.parametrize(
    ("policy", "rate", "blocks"), [("vllm", 6.0, LARGE), ("aptserve", 100.0, SMALL)]
)
def test_so_they_are_without_overlap(
    policy: str, rate: float, blocks: int, agree: Callable[..., SimulationResult]
) -> None:
    fields = {"cache__num_blocks": blocks, "engine__overlap": False}
    agree(lambda: make_policy(policy), trace(3, rate, blocks == LARGE), **fields)


HOST_TOKENS = 10_000
SLOT_BYTES = LAYERS * MODEL["hidden_size"] * 4
MOVING: dict[str, Any] = {
    "cache__num_blocks": 4000,
    "cache__host_gib": 2 * HOST_TOKENS * SLOT_BYTES / GIB,
}


@pytest.mark.parametrize("overlap", [True, False])
def test_the_operations_are_the_same_and_cost_the_same(
    overlap: bool, agree: Callable[..., SimulationResult]
) -> None:
    made = list[MovingCaches]()

    def make() -> Policy:
        made.append(MovingCaches())
        return made[-1]

    hidden = {"cache__hidden_read": "absorbed"}  # auto has none in so large a pool
    agree(make, trace(3, 50.0, True), engine__overlap=overlap, **MOVING, **hidden)
    assert made[0].did == made[1].did
    assert min(made[0].did[name] for name in ("restore", "cut", "copy", "to_kv")) > 5


def test_blocks_are_shared_alike(agree: Callable[..., SimulationResult]) -> None:
    made = list[SharingCaches]()

    def make() -> Policy:
        made.append(SharingCaches([7 * i * i + 3 * i for i in range(97)]))
        return made[-1]

    agree(make, trace(5, 50.0, True), **MOVING)
    assert made[0].did == made[1].did
    assert min(made[0].did[name] for name in ("join", "checkpoint", "restore", "elsewhere")) > 5


def test_bros_shares_blocks_alike(agree: Callable[..., SimulationResult]) -> None:
    did: list[list[str]] = []

    def make() -> Policy:
        policy, mine = make_policy("bros"), list[str]()
        did.append(mine)
        plan = policy.plan

        def listen(view: View, now: float) -> BatchPlan:
            found = plan(view, now)
            mine.extend(type(op).__name__ for op in found.operations)
            return found

        object.__setattr__(policy, "plan", listen)
        return policy

    gib = 2 * 40 * SLOT_BYTES / GIB  # of 40 tokens
    fields = {"cache__num_blocks": SMALL, "cache__host_gib": gib}
    agree(make, trace(5, 100.0, True, count=60), **fields)
    assert did[0] == did[1]
    assert min(did[0].count(op) for op in ("Join", "Checkpoint", "Restore", "Preempt")) > 5


class ThereAndBack(Policy):
    """Serves all at once, but now and then there is no batch: every cache goes to the host, and
    comes back, and of the first two the second is lost again before it has been in a batch."""

    moves_cache = True

    def __init__(self) -> None:
        self._turn = 0

    def plan(self, view: View, now: float) -> BatchPlan:
        self._turn = (self._turn + 1) % 6
        table = view.table
        running, waiting = table.in_state(RUNNING), table.in_state(WAITING)
        away = np.array([row for row in waiting.tolist() if view.host.segments(row)], np.int64)
        start = np.zeros(len(running), np.int64)
        if self._turn == 3 and len(running):
            save = Checkpoint(running, start, table.computed[running])
            return BatchPlan(operations=(save, Preempt.whole(running)))
        if self._turn == 4 and len(away):
            return BatchPlan(operations=(Restore(away, np.zeros(len(away), np.int64)),))
        if self._turn == 5 and len(running) > 1:
            return BatchPlan(operations=(Preempt.whole(running[1:2]),))
        rows = np.concatenate([running, waiting])[: view.limits.max_rows]
        tokens = np.minimum(table.pending(rows), view.limits.max_batch_tokens // len(rows))
        return BatchPlan(rows, tokens, table.computed[rows] + tokens, 0 * rows)


@pytest.mark.parametrize("overlap", [True, False])
def test_operations_without_a_batch_take_their_time(
    overlap: bool, agree: Callable[..., SimulationResult]
) -> None:
    result = agree(ThereAndBack, trace(3, 50.0, True), engine__overlap=overlap, **MOVING)
    told, all_there_were = result.batches.preemptions.sum(), result.requests.preemptions.sum()
    assert 50 < all_there_were - 1 <= told <= all_there_were  # one may come behind the last batch
