"""Routed simulations are the same compiled and in Python: from snapshots that are late or lost,
with replicas that get slow or die, and several routers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.policy import Limits
from jaxserve.sched.routing.routers import ROUTERS
from jaxserve.simulator.settings import Fault, Routing
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from tests.simulator.grouped import grouped

from .test_compiled import HOST, assert_same, drawn

SEVEN = system("llama-2-7b@a100")


@st.composite
def faults(draw: st.DrawFn, replicas: int) -> tuple[Fault, ...]:
    hit = draw(st.lists(st.integers(0, replicas - 1), unique=True, max_size=replicas))
    return tuple(
        Fault(
            replica,
            draw(st.sampled_from([0.0, 0.1, 0.5, 2.0])),
            draw(st.sampled_from([3.0, math.inf])),
            draw(st.sampled_from([0.0, 0.3])),
        )
        for replica in hit
    )


@given(
    data=st.data(),
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(["sarathi", "priority", "edf+ef", "infermax:enough=3"]),
    kv_tokens=st.integers(400, 3000),
    rate=st.sampled_from([20.0, 200.0]),
    rules=st.sampled_from(["jaxserve", "infermax_paper"]),
    host=st.sampled_from([HostOverhead(), HOST]),
    replicas=st.integers(1, 6),
    routing=st.sampled_from(list(ROUTERS)),
    interval=st.sampled_from([0.0, 0.05, 0.3]),
    late=st.sampled_from([0.0, 0.5]),
    loss=st.sampled_from([0.0, 0.4]),
    max_queue=st.sampled_from([None, 3]),
)
@settings(max_examples=20, deadline=None)
def test_the_outcome_is_the_same(
    data: st.DataObject,
    seed: int,
    policy: str,
    rate: float,
    host: HostOverhead,
    replicas: int,
    routing: str,
    interval: float,
    late: float,
    loss: float,
    **options: Any,
) -> None:
    place = dataclasses.replace(SEVEN, host=host)
    options |= {
        "replicas": replicas,
        "routing": Routing(
            routing,
            data.draw(st.integers(1, replicas)),
            interval,
            late * interval,
            loss if interval else 0.0,
            data.draw(faults(replicas)),
        ),
        "limits": Limits(400, 100, 8),
        "seed": seed,
    }
    workload = drawn(seed, 40, rate)
    slow = simulate(policy, workload, place, **grouped(compiled=False, coast=False, **options))
    quick = simulate(policy, workload, place, **grouped(compiled=True, **options))
    assert_same(quick, slow)
    np.testing.assert_array_equal(quick.requests.failed, slow.requests.failed)
    assert_same(simulate(policy, workload, place, **grouped(compiled=False, **options)), slow)
