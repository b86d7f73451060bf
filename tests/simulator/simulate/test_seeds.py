"""Whether a seed changes anything is found out from what is used of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.slo.classes import parse_classes
from jaxserve.simulator.settings import EngineOptions, FleetOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,64,8\n0.1,32,8\n0.3,16,4\n"
ARRAYS = ("arrival", "prompt_len", "output_len", "limit", "slo_class")


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, False),
        ({"rate": 2.0}, False),  # the trace's own arrivals, stretched
        ({"arrivals": "all"}, False),
        ({"arrivals": "poisson", "rate": 2.0}, True),
        ({"classes": parse_classes("a:0.5,b:0.5")}, True),
        ({"lengths": "fixed:64x8x3"}, False),
        ({"lengths": "fixed:64x8x3", "rate": 2.0}, True),
        ({"lengths": "alpaca"}, True),
        ({"lengths": "lilo+siso"}, True),
    ],
)
def test_a_workload_knows_whether_it_is_drawn(
    tmp_path: Path, options: dict[str, Any], drawn: bool
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    spec = WorkloadSpec(**{"lengths": str(path), **options})
    assert spec.drawn() is drawn
    one, other = spec.make_workload(0), spec.make_workload(1)
    same = [(getattr(one, name) == getattr(other, name)).all() for name in ARRAYS]
    assert all(same) is not drawn


@pytest.mark.parametrize(
    ("policy", "read"), [("sarathi", False), ("vllm", False), ("random", True)]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_simulation_knows_whether_its_policy_drew_lots(
    policy: str, read: bool, replicas: int
) -> None:
    workload = WorkloadSpec("fixed:64x16x12").make_workload()
    place = system("llama-2-7b@a100")
    found = simulate(
        policy,
        workload,
        place,
        engine=EngineOptions(kv_tokens=256),
        fleet=FleetOptions(replicas=replicas),
    )
    assert found.seed_read is read
    times = [
        simulate(
            policy,
            workload,
            place,
            engine=EngineOptions(kv_tokens=256),
            fleet=FleetOptions(replicas=replicas),
            run=RunOptions(seed=seed),
        )
        for seed in range(4)
    ]
    differ = {one.requests.token_times.tobytes() for one in times}
    assert (len(differ) > 1) is read
