"""FastServe's queues, in small cases. Blocks hold one token."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policies.fastserve import FastServe
from tests.sched.driver import Drive

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
