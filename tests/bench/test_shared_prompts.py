"""Prompts of a load test share what its workload says."""

from __future__ import annotations

import numpy as np

from jaxserve.bench.load_target import random_jobs
from jaxserve.simulator.workloads.prefixes import Prefixes
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once


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
