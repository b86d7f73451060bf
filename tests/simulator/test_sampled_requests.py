"""Requests that sample otherwise than greedily, and what that costs the steps they are in."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.load_target import EngineTarget, Record, random_jobs
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import Request
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.optimal.problem import OptimalError, Problem
from jaxserve.simulator.replica.arrivals import Requests
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, fixed_lengths
from tests.simulator.grouped import simulate

# A step takes a second, and a hundredth more for each row where anybody samples.
COST = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0, sampled_row=0.01), 1)


def workload(*greedy: bool, output: tuple[int, ...] = ()) -> Workload:
    count = len(greedy)
    lengths = Lengths(np.full(count, 4), np.array(output or (3,) * count))
    terms = replace(SloColumns.none(count), greedy=np.array(greedy))
    return Workload.create(all_at_once(count), lengths, limit=lengths.output_len, terms=terms)


def run(asked: Workload, **options: Any) -> np.ndarray:
    result = simulate("vllm", asked, COST, kv_tokens=999, limits=Limits(99, 99, 9), **options)
    return result.batches.duration


@pytest.mark.parametrize("coast", [True, False])
def test_a_step_costs_more_where_anybody_samples(coast: bool) -> None:
    np.testing.assert_allclose(run(workload(True, True, True), coast=coast), [1.0] * 3)
    np.testing.assert_allclose(run(workload(True, False, True), coast=coast), [1.03] * 3)
    # Who samples ends first: the steps of the others are greedy again.
    mixed = workload(True, False, True, output=(20, 2, 20))
    np.testing.assert_allclose(run(mixed, coast=coast), [1.03] * 2 + [1.0] * 18)


def test_padded_rows_sample_too() -> None:
    place = replace(
        system("opt-1.3b@a100"), cost_model=COST, padding=Padding((1, 8), (16, 64)), rho=None
    )
    result = simulate("vllm", workload(True, False, True), place, limits=Limits(64, 64, 9))
    np.testing.assert_allclose(result.batches.duration[1:], 1.08)


def test_requests_say_how_they_sample() -> None:
    requests = Requests(workload(True, False, True))
    made = [requests.make_request(number, 0.0).sampling for number in range(3)]
    assert [one.is_plain_greedy for one in made] == [True, False, True]
    assert all(one.max_tokens == 3 for one in made)


def test_the_table_of_requests_has_it() -> None:
    asked = workload(True, False).select(np.array([1, 0]))
    result = simulate("vllm", asked, COST, kv_tokens=999)
    assert result.request_table()["greedy"].tolist() == [False, True]


def test_a_load_test_samples_as_the_workload_says() -> None:
    class Engine:
        def check(self, request: Request) -> None:
            pass

        def __init__(self) -> None:
            self.got: list[Request] = []

        def submit(self, request: Request, on_output: Any) -> None:
            self.got.append(request)

        def cancel(self, request_id: str) -> None: ...

        def info(self) -> Any: ...

    engine = Engine()
    target = EngineTarget(engine)
    for job in random_jobs(workload(True, False), 99, np.random.default_rng(0)):
        target.send(job, Record(0.0), threading.Semaphore(0))
    assert [one.sampling.is_plain_greedy for one in engine.got] == [True, False]


def test_optimal_schedules_are_of_greedy_requests() -> None:
    greedy = Workload.create(all_at_once(1), fixed_lengths(4, 3, 1))
    Problem(greedy, COST, kv_tokens=99, max_batch_tokens=9)
    with pytest.raises(OptimalError, match="all greedy"):
        Problem(workload(False), COST, kv_tokens=99, max_batch_tokens=9)
