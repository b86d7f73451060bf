"""Arrivals, lengths and shared prompts of a load (jaxserve/simulator/workloads/workload.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.bench.load_target import random_jobs
from jaxserve.sched.slo.classes import draw_terms, parse_classes
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.prefixes import Prefixes
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import (
    Lengths,
    Workload,
    WorkloadError,
    all_at_once,
    fixed_lengths,
    gamma_arrivals,
    poisson_arrivals,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("cv", "tolerance"), [(0.25, 0.01), (1.0, 0.02), (3.0, 0.1)])
def test_gamma_gaps_have_the_rate_and_the_cv_asked_for(cv: float, tolerance: float) -> None:
    gaps = np.diff(gamma_arrivals(4.0, cv, 100_000, rng()))
    assert gaps.mean() == pytest.approx(0.25, rel=tolerance)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=tolerance)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(poisson_arrivals(2.0, 100_000, rng()), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.5, rel=0.02)
    assert (gaps > 1.0).mean() == pytest.approx(np.exp(-2.0), rel=0.03)


@given(
    rate=st.floats(0.01, 1000), cv=st.floats(0.1, 10), count=st.integers(1, 50), seed=st.integers(0)
)
@settings(max_examples=50, deadline=None)
def test_arrivals_ascend_and_repeat_with_the_seed(
    rate: float, cv: float, count: int, seed: int
) -> None:
    arrival = gamma_arrivals(rate, cv, count, rng(seed))
    workload = Workload.create(arrival, fixed_lengths(3, 4, count))
    assert len(workload) == count
    assert (arrival == gamma_arrivals(rate, cv, count, rng(seed))).all()


def test_all_at_once_and_fixed_lengths() -> None:
    workload = Workload.create(all_at_once(3), fixed_lengths(5, 7, 3))
    assert workload.arrival.tolist() == [0.0, 0.0, 0.0]
    assert workload.prompt_len.tolist() == [5, 5, 5]
    assert workload.output_len.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("rate", "cv", "count", "named"),
    [(0.0, 1.0, 3, "rate"), (np.inf, 1.0, 3, "rate"), (1.0, -1.0, 3, "cv"), (1.0, 1.0, 0, "num_")],
)
def test_impossible_arrivals_are_refused(rate: float, cv: float, count: int, named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        gamma_arrivals(rate, cv, count, rng())


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(WorkloadError, match="output_len must be at least 1, got 0"):
        fixed_lengths(3, 0, 2)
    with pytest.raises(WorkloadError, match="2 arrivals for 3 lengths"):
        Workload.create(all_at_once(2), fixed_lengths(1, 1, 3))
    with pytest.raises(WorkloadError, match="ascending"):
        Workload.create(np.array([2.0, 1.0]), fixed_lengths(1, 1, 2))
    with pytest.raises(WorkloadError, match="same length"):
        Lengths(np.ones(2, np.int64), np.ones(3, np.int64))
    with pytest.raises(WorkloadError, match="5 requests are asked for, of 2"):
        fixed_lengths(1, 1, 2).first(5)


def test_without_a_limit_a_request_may_write_what_the_longest_one_leaves() -> None:
    lengths = Lengths(np.array([5, 90, 7]), np.array([7, 20, 1]))
    made = Workload.create(all_at_once(3), lengths)
    assert made.limit.tolist() == [105, 20, 103]
    assert made.first(1).limit.tolist() == [105]  # cut out, not worked out again
    assert Workload.create(all_at_once(3), lengths, limit=lengths.output_len).limit.tolist() == [
        7, 20, 1
    ]  # fmt: skip
    with pytest.raises(WorkloadError, match=r"request 2 has an output of 20 tokens, more .* 19"):
        Workload.create(all_at_once(3), lengths, limit=np.array([7, 19, 1]))


def test_impossible_terms_are_refused() -> None:
    plain = SloColumns.none(2)
    for change, problem in (
        ({"ttft": np.array([1.0, 0.0])}, "ttft must be a positive time, got 0.0"),
        ({"jct": np.array([np.nan, 1.0])}, "jct must be a positive time"),
        ({"tbt": np.ones(3)}, "the same length"),
        ({"tier": np.array([0, 7], np.int8)}, "tier must be one of 0, 1"),
        ({"slo_class": np.array([0, 1])}, "an index into classes"),
    ):
        with pytest.raises(ValueError, match=problem):
            dataclasses.replace(plain, **change)
    with pytest.raises(WorkloadError, match="2 terms for 3 requests"):
        Workload.create(all_at_once(3), fixed_lengths(1, 1, 3), terms=plain)


def test_parts_of_a_workload_keep_what_they_ask_for() -> None:
    classes = parse_classes("a:0.5:ttft=1s,b:0.5:tier=best_effort:jct=9s")
    made = Workload.create(
        np.arange(200.0), fixed_lengths(9, 4, 200), terms=draw_terms(classes, 200, rng())
    )
    odd = made.select(np.arange(200) % 2 == 1)
    for name in ("arrival", "limit", "tier", "ttft", "tbt", "jct", "slo_class"):
        assert (getattr(odd, name) == getattr(made, name)[1::2]).all()
    assert odd.classes == ("a", "b")
    slower = made.at_rate(0.5)
    assert slower.arrival[-1] == pytest.approx(398) and (slower.ttft == made.ttft).all()
    short = made.within(11)
    assert short.output_len.tolist() == short.limit.tolist() == [2] * 200
    assert (short.slo_class == made.slo_class).all()


def test_prompts_share_prompts_and_stand_ins_for_answers() -> None:
    lengths = Lengths(np.array([4, 9, 8, 7]), np.full(4, 3))
    prefixes = Prefixes(np.array([-1, 0, 1, 0]), np.array([0, 6, 5, 7]))
    made = Workload.create(all_at_once(4), lengths, prefixes=prefixes)
    jobs = random_jobs(made, 10**9, np.random.default_rng(0))
    first, second, third, fourth = (job.prompt for job in jobs)
    assert [len(job.prompt) for job in jobs] == [4, 9, 8, 7]
    assert second[:4] == first and third[:5] == second[:5] and fourth[:6] == second[:6]
    assert third[5] != second[5] and fourth[6] != second[6]


def test_prompts_that_share_nothing_are_as_they_were() -> None:
    made = WorkloadSpec("alpaca", 5).make_workload()
    rng = np.random.default_rng(1)
    expected = [tuple(rng.integers(0, 99, n).tolist()) for n in made.prompt_len.tolist()]
    jobs = random_jobs(made, 99, np.random.default_rng(1))
    assert [job.prompt for job in jobs] == expected
