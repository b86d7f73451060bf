"""Policies that pass over who finds no room, instead of waiting behind it (InferMax section 3.1).

Blocks hold one token, so M is a number of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.plan import BatchPlan, Preempt
from tests.sched.driver import Drive


def drive(policy: str, m: int = 30, **options: Any) -> Drive:
    return Drive(policy, blocks=2 * m, block_size=1, watermark=0.0, **options)


def test_probing_passes_over_who_finds_no_memory() -> None:
    runs = [drive("rank_org", probing=probing) for probing in (False, True)]
    for run in runs:
        a = run.add(10, 9)
        run.step()
        _, small, large = run.add(25, 2), run.add(12, 2), run.add(8, 2)
        smaller = run.add(7, 2)
    assert runs[0].step() == {a: 1}
    assert runs[1].step() == {a: 1, small: 12, smaller: 7} and large not in runs[1].plans[-1]
    runs[1].to_the_end()


def test_probing_passes_over_whole_prompts_that_c_has_no_room_for() -> None:
    run = drive("sarathi_nocp", m=100, c=32, p=32, probing=True)
    a, b, c = run.add(20, 3), run.add(30, 3), run.add(2, 3)
    assert run.step() == {a: 20, c: 2}
    assert run.step() == {a: 1, c: 1, b: 30}


def test_probing_passes_over_who_was_preempted_in_the_same_step() -> None:
    run = drive("sarathi", probing=True)
    a, b = run.add(14, 9), run.add(15, 9)
    run.step()
    small = run.add(2, 2)
    assert run.step() == {a: 1, small: 2} and run.preempted == [b]
    run.to_the_end()


def test_probing_finds_who_can_take_memory_behind_who_cannot() -> None:
    """The refill of 20 tokens would find the 12 of the last; the prompt of 9 behind it does."""
    run = drive("rank_i", m=40, probing=True)
    first, again = run.add(5, 30), run.add(8, 30)
    for _ in range(12):
        run.step()
    run.scheduler._preempt(BatchPlan(), Preempt.whole(np.array([again])))
    second = run.add(7, 20)
    assert run.step() == {first: 1, second: 7}
    last = run.add(12, 9)
    assert run.step() == {first: 1, second: 1, last: 12}
    nine = run.add(9, 2)
    assert run.step() == {first: 1, second: 1, nine: 9} and run.preempted == [last]
    run.to_the_end()
