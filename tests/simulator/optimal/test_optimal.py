"""The constraint program against exhaustive search, its own replay, and policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.registry import make_policy
from jaxserve.simulator.optimal import solve as optimal
from jaxserve.simulator.optimal.cost import ScaledCost
from jaxserve.simulator.optimal.replay import Schedule
from jaxserve.simulator.optimal.solve import OptimalError, Problem, Solution, solve
from jaxserve.simulator.systems.presets import PRESETS
from jaxserve.simulator.workloads.workload import Lengths, Workload

from .exhaustive import best

pytest.importorskip("ortools")

LLAMA = PRESETS["llama-2-7b@a100"]
BIG = PRESETS["llama-3-70b@4xa100"]
# A token alone is cheap, any other batch dear.
ALONE = dataclasses.replace(
    LLAMA.cost_model,
    coefficients=dataclasses.replace(LLAMA.cost_model.coefficients, batch_bias=2e-4),
)
EQUAL = 1e-4  # more than the rounding of time, less than any difference between schedules


def workload(*requests: tuple[int, int], arrivals: tuple[float, ...] = ()) -> Workload:
    prompt, output = np.array(requests, np.int64).T
    return Workload.create(
        np.array(arrivals or (0.0,) * len(requests)), Lengths(prompt.copy(), output.copy())
    )


def problem(*requests: tuple[int, int], m: int, c: int = 64, **more: Any) -> Problem:
    cost = more.pop("cost_model", LLAMA.cost_model)
    arrivals = more.pop("arrivals", ())
    return Problem(workload(*requests, arrivals=arrivals), cost, m, c, **more)


def proven(task: Problem, **how: Any) -> Solution:
    found = solve(task, time_limit=60, workers=1, **how)
    assert found.status == "optimal", found
    assert found.objective is not None and found.bound is not None and found.schedule is not None
    # The same total from the engine's accounting, and a bound that is one.
    assert found.objective == task.value(task.play(found.schedule))
    assert found.bound <= found.objective <= found.bound * (1 + EQUAL)
    return found


TINY = {
    "preempts": problem((4, 3), (4, 3), m=8, chunked=False),
    "unequal": problem((2, 4), (7, 2), m=10, chunked=False),
    "three": problem((3, 2), (3, 2), (5, 3), m=9, chunked=False),
    "one_token": problem((5, 1), (3, 1), m=6, c=7, chunked=False),
    "chunks": problem((6, 2), (4, 3), m=9, c=4, max_prefill_tokens=3),
    "chunked_refill": problem((4, 3), (4, 3), m=8),
    "prefill_limit": problem((4, 2), (4, 2), m=16, c=8, max_prefill_tokens=4, chunked=False),
    "blocks": problem((3, 3), (4, 2), m=12, block_size=4, chunked=False),
    "blocks_and_chunks": problem((3, 3), (5, 2), m=9, c=4, block_size=3),
    "ttft": problem((6, 3), (2, 3), (3, 2), m=9, chunked=False, objective="mean_ttft"),
    "ttft_chunks": problem((5, 2), (3, 2), m=7, c=4, objective="mean_ttft"),
    "papers_own": problem((9, 3), (7, 3), (8, 2), m=20, chunked=False, cost_model=LLAMA.paper),
    "papers_70b": problem((9, 2), (7, 3), (8, 2), m=20, chunked=False, cost_model=BIG.paper),
    "one_alone": problem((4, 3), (3, 2), m=6, chunked=False, cost_model=ALONE),
    "online": problem(
        (4, 2), (6, 2), m=8, chunked=False, objective="makespan", arrivals=(0.0, 0.004)
    ),
    "online_ttft": problem(
        (6, 2),
        (2, 2),
        (3, 1),
        m=8,
        objective="mean_ttft",
        chunked=False,
        arrivals=(0, 0.001, 0.004),
    ),
    "online_latency": problem((4, 2), (6, 2), m=8, chunked=False, arrivals=(0.0, 0.5)),
    "online_gap": problem((4, 2), (6, 2), m=8, objective="makespan", arrivals=(0.01, 0.05)),
}


@pytest.mark.parametrize("name", TINY)
def test_it_finds_what_exhaustive_search_finds(name: str) -> None:
    task = TINY[name]
    assert proven(task).objective == pytest.approx(best(task), rel=EQUAL)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=2, max_size=3),
    spare=st.integers(0, 6),
    objective=st.sampled_from(["latency", "mean_ttft"]),
)
def test_random_workloads(requests: list[tuple[int, int]], spare: int, objective: str) -> None:
    peak = max(prompt + output - 1 for prompt, output in requests)
    task = problem(*requests, m=peak + spare, chunked=False, objective=objective)
    assert proven(task).objective == pytest.approx(best(task), rel=EQUAL)


def test_preempting_short_requests_pays_and_long_ones_does_not() -> None:
    """InferMax section 5.1 with two requests."""
    short = proven(problem((8, 4), (8, 4), m=16, chunked=False))
    long = proven(problem((512, 4), (512, 4), m=1024, c=4096, chunked=False))
    assert short.schedule is not None and short.schedule.preemptions == 1
    assert long.schedule is not None and long.schedule.preemptions == 0


def test_is_there_a_better_one() -> None:
    task = problem((4, 3), (4, 3), m=8, chunked=False)
    least = best(task)
    yes = solve(task, better_than=least * 1.01, workers=1)
    assert yes.status == "feasible" and yes.objective is not None
    assert yes.objective < least * 1.01
    no = solve(task, better_than=least * 0.99, workers=1)
    assert no.status == "infeasible" and no.schedule is None and no.bound is None


@pytest.mark.parametrize("policy", ["vllm", "sarathi", "vllm+ef"])
def test_a_policys_schedule_is_a_start(policy: str) -> None:
    chunk = 12 if policy == "sarathi" else 0
    task = problem((6, 4), (6, 4), (6, 4), m=14, c=24, max_prefill_tokens=chunk)
    start = task.record(make_policy(policy))
    found = solve(task, warm_start=start, workers=1, time_limit=0.2, max_batches=len(start))
    assert found.objective is not None and "left out" not in found.note
    assert found.objective <= task.value(task.play(start))


def test_the_start_is_returned_when_time_is_up() -> None:
    """The hint is a complete solution of the program, so it is found in no time at all."""
    task = problem((6, 4), (6, 4), (6, 4), m=14, chunked=False)
    start = task.record(make_policy("vllm"))
    found = solve(task, warm_start=start, time_limit=1e-3, workers=1)
    assert found.status == "feasible" and found.objective == task.value(task.play(start))
    assert found.gap is not None and found.gap > 0


def test_a_start_that_breaks_a_limit_is_left_out() -> None:
    task = problem((4, 2), (4, 2), m=6, chunked=False)
    both = np.array([[4, 4], [1, 1]])
    found = proven(task, warm_start=Schedule(both, np.zeros(both.shape, bool)))
    assert "left out" in found.note
    cut = np.array([[2, 0], [2, 0], [1, 0], [0, 4], [0, 1]])
    assert "a prompt is cut" in proven(task, warm_start=Schedule(cut, cut < 0)).note


def test_fewer_batches_than_needed_are_said() -> None:
    task = problem((4, 3), (4, 3), m=8, chunked=False)
    found = solve(task, max_batches=4, workers=1, better_than=best(task) * 0.99)
    assert found.status == "unknown" and "at most 4 batches" in found.note


def test_time_is_counted_finely_enough() -> None:
    for cost in (LLAMA.cost_model, LLAMA.paper, BIG.cost_model, BIG.paper):
        assert cost is not None
        scaled = ScaledCost.from_cost_model(cost)
        assert scaled.error < EQUAL
        assert optimal.EXACT * scaled.unit > 60  # a minute of schedule can still be counted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 5}, "request 0 needs 6 tokens of cache, there are 5"),
        ({"m": 11, "block_size": 6, "c": 0}, "max_batch_tokens must be at least 1"),
        ({"m": 8, "c": 3, "chunked": False}, "a prompt of 4 tokens"),
        ({"m": 8, "objective": "joy"}, "objective must be one of"),
        ({"m": 8, "max_prefill_tokens": 65}, "max_prefill_tokens must be 0 to 64"),
    ],
)
def test_what_cannot_be_posed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimalError, match=message):
        problem((4, 3), **change)


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(OptimalError, match="literals, limit"):
        solve(problem(*[(8, 64)] * 64, m=1000))
