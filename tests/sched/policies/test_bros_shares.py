"""What best-effort requests of BROS may count on: an age limit, a floor, or nothing.

A token takes 0.1 s, and blocks hold one.
"""

from __future__ import annotations

import pytest

from tests.sched.policies.test_bros import BEST, LATER, drive, flood


@pytest.mark.parametrize(
    ("options", "served"), [({}, False), ({"max_age": 5.0}, True), ({"floor": 2.0}, True)]
)
def test_best_effort_requests_starve_only_where_nothing_is_set(
    options: dict[str, float], served: bool
) -> None:
    run = drive(**options)
    low = run.add(4, 4, tier=BEST)
    flood(run, 30)
    assert (low in run.ended) == served
    run.to_the_end()


def test_nobody_waits_longer_than_the_age_limit() -> None:
    run = drive(max_age=5.0)
    low = run.add(4, 9, tier=BEST)
    flood(run, 30)
    turns = [number for number, plan in enumerate(run.plans) if low in plan]
    assert turns == [6, 12, 18, 24]


def test_the_floor_is_what_best_effort_work_gets() -> None:
    """2 tokens a second, so 60 in half a minute, all beside real-time requests in time."""
    run = drive(floor=2.0, m=200, rows=100, c=500, max_model_len=200)
    for _ in range(40):
        run.add(4, 9, tier=BEST)
    done = 0
    for number in range(31):
        run.add(10, 1, arrival=float(number), ttft=1.0)
        plan = run.step(float(number))
        done += sum(n for row, n in plan.items() if run.table.tier[row] == BEST)
    assert 60 <= done <= 60 + 4


def test_work_that_is_done_again_does_not_count_for_the_floor() -> None:
    run = drive(floor=1.0, m=20)
    low = run.add(8, 9, tier=BEST)
    assert run.step(0.0) == {low: 8}
    high = run.add(15, 1, **LATER)
    assert run.step(1.0) == {high: 15} and run.preempted == [low]
    assert run.step(2.0) == {low: 9}, "eight of them once more"
    high = run.add(10, 1, arrival=3.0, ttft=1.05)
    assert run.step(3.0) == {low: 1, high: 10}, "the floor is behind again, by one"


def test_nobody_is_old_while_a_token_is_on_its_way() -> None:
    run = drive(max_age=1.0)
    low = run.add(4, 9, tier=BEST)
    assert run.scheduler.schedule(5.0).rows.tolist() == [low]
    high = run.add(10, 1, arrival=5.5, ttft=1.05)
    assert run.scheduler.schedule(5.1).rows.tolist() == [high], "it ends at 5.5"


def test_an_aged_request_takes_even_real_time_memory() -> None:
    run = drive(m=12, max_age=1.0)
    low = run.add(3, 2, tier=BEST)
    high = run.add(11, 9, **LATER)
    assert run.step(0.0) == {high: 11}
    assert run.step(2.0)[low] == 3 and run.preempted == [high]


@pytest.mark.parametrize(("tbt", "served"), [(0.5, 3), (1.25, 2)])
def test_those_whom_an_aged_request_makes_late_limit_nobody(tbt: float, served: int) -> None:
    """It takes 1 s, so 0.5 s are over anyway, and 1.25 s after two more."""
    run = drive(max_age=1.0)
    rows = [run.add(2, 9, ttft=100.0, tbt=tbt) for _ in range(3)]
    run.step()
    low = run.add(10, 2, arrival=-5.0, tier=BEST)
    assert run.step() == {low: 10, **dict.fromkeys(rows[:served], 1)}
