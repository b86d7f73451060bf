"""Round robin between the tiers, in small cases. Blocks hold one token."""

from __future__ import annotations

from typing import Any

from jaxserve.sched.request import Tier
from tests.sched.driver import Drive

BEST = Tier.BEST_EFFORT


def drive(*, m: int = 1000, **options: Any) -> Drive:
    return Drive("round_robin", blocks=2 * m, block_size=1, **options)


def test_the_tiers_take_turns() -> None:
    run = drive()
    high, low = run.add(5, 3), run.add(4, 3, tier=BEST)
    turns = [run.step() for _ in range(5)]
    assert turns == [{high: 5}, {low: 4}, {high: 1}, {low: 1}, {high: 1}]


def test_a_turn_nobody_wants_is_the_others() -> None:
    run = drive()
    low = run.add(4, 3, tier=BEST)
    assert [run.step(), run.step()] == [{low: 4}, {low: 1}]
    high = run.add(2, 2)
    assert [run.step(), run.step(), run.step()] == [{high: 2}, {low: 1}, {high: 1}]


def test_each_queue_is_vllms() -> None:
    """Prompts first, whole, then decodes, each in order of arrival."""
    run = drive(rows=3, c=10, p=10)
    a, b = run.add(8, 3, tier=BEST), run.add(4, 3, tier=BEST)
    assert [run.step() for _ in range(3)] == [{a: 8}, {b: 4}, {a: 1, b: 1}]


def test_who_lacks_memory_takes_it_from_the_latest_of_all() -> None:
    run = drive(m=14, watermark=0.0)
    high = run.add(6, 9)
    run.step()
    low = run.add(7, 8, tier=BEST)
    assert [run.step() for _ in range(2)] == [{low: 7}, {high: 1}]
    assert run.step() == {} and run.preempted == [low], "itself"
    assert run.step() == {high: 1}
    run.to_the_end()
    assert sorted(run.ended) == [high, low]
