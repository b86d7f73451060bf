"""BROS and round robin over random loads of both tiers, every plan checked before it is booked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policy import Limits
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload

COST = LinearCostModel(
    Coefficients(5e-3, 1e-2, 1e-4, 0, 0, 0, 0, 0, 0, copied_slot=1e-4, swapped_slot=1e-3), 1
)
POLICIES = [
    *("bros", "bros:sharing=false", "bros:late_last=false:replace=false:initial=2:growth=1"),
    "bros:in_order=false",
    *("bros:max_age=0.5", "bros:floor=40", "bros:watermark=0.2:ttft=5:tbt=5", "round_robin"),
]


def load(count: int, rate: float, seed: int) -> Workload:
    """Requests of up to 20 tokens in and 12 out, every second of them best-effort."""
    rng = np.random.default_rng(seed)
    lengths = Lengths(rng.integers(1, 21, count), rng.integers(1, 13, count))
    terms = dataclasses.replace(
        SloColumns.none(count), tier=rng.integers(0, 2, count).astype(np.int8)
    )
    return Workload.create(np.cumsum(rng.exponential(1 / rate, count)), lengths, terms=terms)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rate=st.sampled_from((2.0, 10.0, 100.0)),
    seed=st.integers(0, 10**6),
    blocks=st.integers(16, 60),
    rows=st.sampled_from((2, 6, 40)),
    host=st.sampled_from((0, 10, 1000)),
    overlap=st.booleans(),
)
def test_both_tiers_end(
    policy: str, rate: float, seed: int, blocks: int, rows: int, host: int, overlap: bool
) -> None:
    work = load(40, rate, seed)
    result = simulate(
        policy,
        work,
        COST,
        engine=EngineOptions(
            limits=Limits(40, 40, rows),
            num_blocks=blocks,
            block_size=4,
            host_tokens=host,
            overlap=overlap,
        ),
        run=RunOptions(checked=True),
    )
    times = result.requests.token_times
    assert len(times) == work.output_len.sum() and np.isfinite(times).all()


def test_real_time_requests_are_served_beside_a_batch_job() -> None:
    """More best-effort work than memory holds is there from the start."""
    rng = np.random.default_rng(1)
    best, real = 50, 60
    lengths = Lengths(
        np.concatenate([rng.integers(512, 1025, best), rng.integers(20, 400, real)]),
        np.concatenate([rng.integers(32, 129, best), rng.integers(20, 300, real)]),
    )
    terms = dataclasses.replace(
        SloColumns.none(best + real), tier=np.repeat([1, 0], [best, real]).astype(np.int8)
    )
    arrival = np.concatenate([np.zeros(best), np.cumsum(rng.exponential(0.2, real))])
    work = Workload.create(arrival, lengths, terms=terms)
    first = np.cumsum(work.output_len) - work.output_len
    in_time = {}
    for policy in ("bros", "round_robin", "vllm"):
        result = simulate(
            policy,
            work,
            system("opt-13b@2xa100-40g"),
            engine=EngineOptions(
                limits=Limits(4096, 4096, 256), kv_tokens=20_000, host_tokens=20_000
            ),
            run=RunOptions(checked=True),
        )
        waited = result.requests.token_times[first] - arrival
        in_time[policy] = (waited[best:] < 0.4).mean()
    assert in_time["bros"] > 0.9 > 0.7 > max(in_time["round_robin"], in_time["vllm"])
