"""Targets that cannot be met: what they are compared with is what an idle engine takes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.reachability import SloProblemKind, least_output, slo_problems
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO, Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.sched.driver import Drive
from tests.simulator.grouped import simulate

SECOND = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)  # every step takes 1 s
SEVEN = system("llama-2-7b@a100").cost_model
LIMITS = Limits(max_batch_tokens=64, max_prefill_tokens=16, max_rows=4)
TTFT, TBT, JCT, EARLY, MAX_TBT = SloProblemKind


def idle(policy: str, model: LinearCostModel, c: int = 64) -> Scheduler:
    memory = {"blocks": 400, "block_size": 16, "max_model_len": 1024}
    return Drive(policy, c=c, p=16, rows=4, cost_model=model, **memory).scheduler


def found(
    slo: SLO, prompt: int = 40, model: LinearCostModel = SECOND, *, policy: str = "sarathi", **asked
) -> dict[SloProblemKind, tuple[float, float]]:
    """Kind -> (target, limit)."""
    scheduler = idle(policy, model)
    request = Request("a", (1,) * prompt, SamplingParams(**asked), slo)
    problems = slo_problems(request, scheduler.alone(request))
    return {problem.kind: (problem.target, problem.limit) for problem in problems}


def test_a_prompt_that_takes_three_steps_has_no_token_in_two() -> None:
    assert found(SLO(ttft=2.9)) == {TTFT: (2.9, 3.0)}
    assert found(SLO(ttft=3.0)) == {}
    # Computed whole, it takes one.
    assert found(SLO(ttft=2.9), policy="vllm") == {}
    assert found(SLO(ttft=0.9), policy="vllm") == {TTFT: (0.9, 1.0)}


def test_what_is_cached_brings_targets_within_reach() -> None:
    drive = Drive("sarathi", c=64, p=16, block_size=16, cost_model=SECOND, prefix_caching=True)
    keys = (b"a", b"b")
    first = drive.add(prompt=40, output=1, keys=keys, ttft=1.5)
    assert drive.table.ttft[first] == pytest.approx(3.0, rel=1e-5), "three steps"
    drive.to_the_end()
    row = drive.add(prompt=40, output=1, keys=keys, ttft=1.5)
    assert drive.table.ttft[row] == 1.5 and drive.table.alone[row] == 3.0
    drive.to_the_end()
    row = drive.add(prompt=40, output=1, keys=(b"a", b"c"), ttft=0.5)
    assert drive.table.ttft[row] == pytest.approx(2.0, rel=1e-5)


def test_no_token_comes_sooner_after_another_than_a_step_takes() -> None:
    assert found(SLO(tbt=0.9)) == {TBT: (0.9, 1.0)}
    assert found(SLO(tbt=1.0)) == {}
    assert found(SLO(tbt=0.9), max_tokens=1) == {}  # there is no second token
    assert found(SLO(tbt=1.0, max_tbt=0.9)) == {MAX_TBT: (0.9, 1.0)}
    assert found(SLO(tbt=1e-9)) == {TBT: (1e-9, 1.0)}, "nobody asked for its default"


def test_a_job_takes_its_prompt_and_what_it_must_write() -> None:
    assert found(SLO(jct=2.9)) == {JCT: (2.9, 3.0)}  # its first token may end it
    assert found(SLO(jct=3.0)) == {}
    assert found(SLO(jct=7.9), min_tokens=5) == {JCT: (7.9, 8.0)}
    assert found(SLO(jct=8.0), min_tokens=5) == {}
    assert found(SLO(jct=11.9), max_tokens=10, ignore_eos=True) == {JCT: (11.9, 12.0)}
    assert found(SLO(jct=12.0), max_tokens=10, ignore_eos=True) == {}


def test_a_job_that_ends_before_its_first_token_has_to_come_contradicts_itself() -> None:
    assert found(SLO(ttft=9.0, jct=5.0)) == {EARLY: (5.0, 9.0)}
    assert found(SLO(ttft=5.0, jct=5.0)) == {}


def test_whoever_has_no_target_has_no_problem() -> None:
    assert found(SLO()) == {}


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        ({}, 1),
        ({"min_tokens": 5}, 6),
        ({"min_tokens": 9, "max_tokens": 9}, 9),
        ({"max_tokens": 9, "ignore_eos": True}, 9),
        ({"max_tokens": 9, "ignore_eos": True, "stop": ("x",)}, 1),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (3,)}, 1),
    ],
)
def test_how_little_a_request_may_write(asked: dict, least: int) -> None:
    assert least_output(SamplingParams(**asked)) == least


@given(st.integers(1, 200), st.integers(1, 20), st.sampled_from(["sarathi", "vllm"]))
@settings(deadline=None, max_examples=30)
def test_alone_on_an_idle_engine_the_limits_are_what_it_takes(
    prompt: int, output: int, policy: str
) -> None:
    """So that a target just below is out of reach, and one just above is not."""
    limits = dataclasses.replace(LIMITS, max_batch_tokens=256)
    workload = Workload.create(np.zeros(1), Lengths(np.array([prompt]), np.array([output])))
    result = simulate(policy, workload, SEVEN, limits=limits, kv_tokens=4096, compiled=False)
    times = result.requests.times
    gaps, _ = times.tbt
    took = {"ttft": float(times.ttft[0]), "jct": float(times.e2e[0])}
    if output > 1:
        took["tbt"] = float(gaps.min())
    scheduler = idle(policy, SEVEN, c=256)

    def kinds(share: float) -> set[str]:
        slo = SLO(**{name: share * seconds for name, seconds in took.items()})
        sampling = SamplingParams(output, ignore_eos=True)
        request = Request("a", (1,) * prompt, sampling, slo)
        problems = slo_problems(request, scheduler.alone(request))
        return {problem.kind.removesuffix("_unreachable") for problem in problems}

    assert kinds(1 + 1e-9) == set()
    assert kinds(1 - 1e-9) == set(took)
