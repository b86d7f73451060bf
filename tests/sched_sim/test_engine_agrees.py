"""The engine and the simulator, given the same trace and the same clock, make the same plans."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.policy import Limits
from jaxserve.sched.simulation.simulator import simulate
from jaxserve.sched.simulation.systems import system
from jaxserve.sched.workloads.workload import Lengths, Workload
from tests.sched_sim.engine_on_a_virtual_clock import serve

COST = system("llama-2-7b@a100").cost_model
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
    workload = trace(3, rate, early)
    options = {"num_blocks": num_blocks, "block_size": 8, "overlap": overlap}
    plans, token_times = serve(policy, workload, COST, LIMITS, **options)
    result = simulate(
        policy,
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
    if num_blocks == 80:
        assert result.batches.preemptions.sum() > 0, "the small pool should have led to preemptions"
    offsets, times = result.requests.offsets, result.requests.token_times
    for number, engines in token_times.items():
        first = int(offsets[number])
        ours = times[first : first + len(engines)]
        assert len(engines) == workload.output_len[number]
        np.testing.assert_allclose(ours, engines, rtol=1e-9)
