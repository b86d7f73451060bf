"""FastServe's queues, in small cases. Blocks hold one token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policies.fastserve import FastServe
from tests.sched.driver import Drive
from tests.sched.policies.test_policy_properties import Case, cases, quick, serve

# Four tokens of a prompt cost as much as a decode.
FOUR_A_DECODE = LinearCostModel(Coefficients(0.25, 0, 0, 0, 0.75, 0, 0, 0, 0), 1)


def drive(policy: str, *, m: int = 1000, **options: Any) -> Drive:
    return Drive(policy, blocks=2 * m, block_size=1, **options)


def test_fastserve_joins_below_the_top_falls_and_returns() -> None:
    policy = FastServe(quantum=2.0, patience=5.0)
    run = drive("sarathi", c=100, cost_model=FOUR_A_DECODE)
    run.policy = run.scheduler.policy = policy
    short, long = run.add(4, 30), run.add(30, 30)  # cost 1 and 7.5 decodes
    rows = np.array([short, long])

    def queues(now: float = 0.0) -> list[int]:
        return policy.queue_of(run.scheduler.view, rows, now).tolist()

    assert queues() == [0, 2], "quanta are 2, 4, 8, 16, and the rest"
    run.step()
    assert queues() == [0, 2]
    run.step()
    assert queues() == [1, 3], "1 + 1 and 7.5 + 1 decodes"
    for _ in range(4):
        run.step()
    assert queues() == [2, 3]
    assert queues(now=6.0) == [0, 0], "nothing for longer than their patience"
    run.step(now=6.0)
    run.step(now=6.0)
    assert queues(now=6.0) == [1, 1]


def test_fastserve_starts_anew_with_whoever_gets_the_row() -> None:
    policy = FastServe(quantum=2.0, patience=5.0)
    run = drive("sarathi", cost_model=FOUR_A_DECODE)
    run.policy = run.scheduler.policy = policy
    first = run.add(4, 30)
    for _ in range(3):
        run.step()
    rows = np.array([first])
    assert policy.queue_of(run.scheduler.view, rows, 9.0).tolist() == [0], "it has starved"
    run.scheduler.finish(first)
    assert run.add(4, 30) == first
    run.step()
    run.step()
    assert policy.queue_of(run.scheduler.view, rows, 0.0).tolist() == [1], "1 + 1 decodes"


def test_fastserve_preempts_for_a_higher_queue() -> None:
    run = drive("fastserve", rows=1, quantum=2.0)
    first = run.add(4, 9)
    for _ in range(3):
        run.step()
    second = run.add(4, 9)
    assert run.step() == {second: 4} and run.preempted == [first]


def test_a_preempted_cache_comes_back_from_the_host() -> None:
    """Four prompt tokens and two of the three written are cached, in two planes each."""
    for slots, back in ((12, 1), (11, 7)):
        run = drive("fastserve", rows=1, quantum=2.0, host_slots=slots)
        first = run.add(4, 9)
        for _ in range(3):
            run.step()
        second = run.add(4, 2)
        assert run.step() == {second: 4} and run.preempted == [first]
        assert run.scheduler.host.num_used == (12 if back == 1 else 0)
        assert run.step() == {second: 1} and run.ended == [second]
        assert run.step() == {first: back}
        run.to_the_end()


@pytest.mark.parametrize("slots", [20, 60])
@settings(quick, max_examples=15)
@given(case=cases)
def test_it_serves_everything_whatever_the_host_has_room_for(slots: int, case: Case) -> None:
    drive = serve("fastserve:quantum=2.0", case, host_slots=slots)
    assert len(drive.ended) == len(case.jobs)


def test_nothing_is_computed_twice_with_room_on_the_host() -> None:
    run = drive("fastserve", m=30, quantum=1.0, host_slots=1000)
    rows = [run.add(9, 12) for _ in range(5)]
    run.to_the_end()
    assert len(run.preempted) > 5
    assert sum(sum(plan.values()) for plan in run.plans) == len(rows) * (9 + 12 - 1)
