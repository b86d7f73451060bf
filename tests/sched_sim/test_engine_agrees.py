"""The engine and the simulator, given the same trace and the same clock, make the same plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.cost_model import LinearCostModel
from jaxserve.sched.plan import BatchPlan, Checkpoint, Preempt, Restore
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.simulator import simulate
from jaxserve.sched.simulation.systems import system
from jaxserve.sched.table import RUNNING, WAITING
from jaxserve.sched.workloads.workload import Lengths, Workload
from tests.moving_caches import MovingCaches
from tests.sched_sim.engine_on_a_virtual_clock import serve

# Each kind of operation costs something of its own, so that one forgotten would show.
COST = LinearCostModel(
    dataclasses.replace(
        system("llama-2-7b@a100").cost_model.coefficients,
        projected_token=3e-6,
        hidden_token=2e-6,
        copied_slot=5e-6,
        swapped_slot=7e-6,
    ),
    num_layers=32,
)
LIMITS = Limits(256, 64, 12)


def trace(seed: int, rate: float, early: bool, count: int = 24) -> Workload:
    """early: outputs end before their limits, but for every third."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    lengths = Lengths(rng.integers(2, 160, count), rng.integers(1, 60, count))
    limit = lengths.output_len
    if early:
        limit = limit + rng.integers(1, 30, count) * (np.arange(count) % 3 > 0)
    return Workload.of(arrival, lengths, limit=limit)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["sarathi", "vllm", "edf", "infermax"])
@pytest.mark.parametrize(("rate", "num_blocks"), [(4.0, 800), (100.0, 80)])
@pytest.mark.parametrize("early", [True, False])
def test_the_plans_are_the_same_one_by_one(
    policy: str, overlap: bool, rate: float, num_blocks: int, early: bool
) -> None:
    options = {"num_blocks": num_blocks, "block_size": 8, "overlap": overlap}
    result = agree(policy, policy, trace(3, rate, early), **options)
    if num_blocks == 80:
        assert result.batches.preemptions.sum() > 0, "the small pool should have led to preemptions"


@pytest.mark.parametrize("overlap", [True, False])
def test_the_operations_are_the_same_and_cost_the_same(overlap: bool) -> None:
    policies = MovingCaches(), MovingCaches()
    options: dict[str, Any] = {"num_blocks": 4000, "block_size": 8, "overlap": overlap}
    agree(*policies, trace(3, 50.0, True), host_tokens=2000, rho=1e-6, **options)
    assert policies[0].did == policies[1].did
    assert min(policies[0].did[name] for name in ("restore", "cut", "copy", "to_kv")) > 5


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
def test_operations_without_a_batch_take_their_time(overlap: bool) -> None:
    options: dict[str, Any] = {"num_blocks": 4000, "block_size": 8, "overlap": overlap}
    policies = ThereAndBack(), ThereAndBack()
    result = agree(*policies, trace(3, 50.0, True), host_tokens=10_000, **options)
    told, all_there_were = result.batches.preemptions.sum(), result.requests.preemptions.sum()
    assert 50 < all_there_were - 1 <= told <= all_there_were  # one may come behind the last batch


def agree(
    live: str | Policy, simulated: str | Policy, workload: Workload, **options: Any
) -> SimulationResult:
    """The simulation, once everything in it has been found to be as the engine did it."""
    plans, token_times = serve(live, workload, COST, LIMITS, **options)
    result = simulate(
        simulated,
        workload,
        COST,
        limits=LIMITS,
        checked=True,
        record_rows=True,
        coast=False,
        **options,
    )
    assert result.rows is not None
    assert len(plans) == len(result.rows[0])
    for i, ((_, plan), batch) in enumerate(zip(plans, result.rows[0], strict=True)):
        assert plan.rows.tolist() == batch.requests.tolist(), i
        assert plan.num_tokens.tolist() == batch.tokens.tolist(), i
        assert plan.preempted.tolist() == batch.preempted.tolist(), i
    offsets, times = result.requests.offsets, result.requests.token_times
    for number, engines in token_times.items():
        first = int(offsets[number])
        ours = times[first : first + len(engines)]
        assert len(engines) == workload.output_len[number]
        np.testing.assert_allclose(ours, engines, rtol=1e-9)
    return result
