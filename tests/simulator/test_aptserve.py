"""Apt-Serve's policies under more load than the system takes, OPT-13B on an A100 with 40 GB."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads import lengths
from jaxserve.simulator.workloads.workload import Workload, poisson_arrivals
from tests.simulator.grouped import grouped

TARGET = SLO(ttft=1.0, tbt=1.0)


@cache
def served(policy: str, read: str = "absorbed", **overrides: Any) -> SimulationResult:
    rng = np.random.default_rng(3)
    arrival, terms = poisson_arrivals(6.0, 300, rng), with_targets(SloColumns.none(300), TARGET)
    workload = Workload.create(arrival, lengths.sampler("sharegpt")(300, rng), terms=terms)
    chosen = system("opt-13b@a100-40g", read)
    made = make_policy(policy, **overrides)
    return simulate(
        made,
        workload,
        chosen,
        engine=EngineOptions(block_size=16),
        run=RunOptions(checked=True),
    )


def attainment(result: SimulationResult) -> float:
    """Share of the requests whose TTFT and 99th percentile of TBT are within the target."""
    gaps, counts = result.requests.tbt
    each = np.split(gaps, np.cumsum(counts)[:-1])
    p99 = np.array([np.percentile(g, 99) if len(g) else 0.0 for g in each])
    return float(np.mean((result.requests.ttft <= 1.0) & (p99 <= 1.0)))


def test_more_requests_are_in_time_than_first_come_first_served() -> None:
    adaptive, fcfs = attainment(served("aptserve")), attainment(served("aptserve_fcfs"))
    assert adaptive > 1.2 * fcfs > 1.2 * attainment(served("vllm"))


def test_hidden_caches_that_are_cheap_to_read_make_more_of_them_in_time() -> None:
    assert attainment(served("aptserve")) > attainment(served("aptserve_kv"))
    sizes = [served(name).batches.num_decodes.mean() for name in ("aptserve", "aptserve_kv")]
    assert sizes[0] > 1.1 * sizes[1]


def test_a_decay_shortens_the_tail_at_the_cost_of_attainment() -> None:
    plain, decayed = served("aptserve_kv"), served("aptserve_kv", slo_decay=0.4)
    worst = [float(np.percentile(r.requests.ttft, 99)) for r in (plain, decayed)]
    assert worst[1] < 0.9 * worst[0]
    assert attainment(decayed) < attainment(plain)


@pytest.mark.parametrize("policy", ["aptserve", "aptserve_s", "aptserve_fcfs", "aptserve_kv"])
def test_without_hidden_caches_all_are_the_same_as_with_kv_only(policy: str) -> None:
    options: dict[str, Any] = {"rho": None, "block_size": 16, "checked": True}
    made = served("aptserve").requests.workload.first(60)
    a100 = system("opt-13b@a100-40g")
    mine = simulate(make_policy(policy), made, a100, **grouped(**options))
    kv_only = simulate(make_policy(policy, hybrid_cache=False), made, a100, **grouped(**options))
    np.testing.assert_array_equal(mine.requests.token_times, kv_only.requests.token_times)
