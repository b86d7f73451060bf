"""Blocks that real-time requests of BROS share with best-effort ones, in small cases.

A block holds four tokens, and a token takes 0.1 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.cache.cache_kinds import LEFT, NOBODY, RIGHT
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.plan import Checkpoint, Copy, Join, Operation, Preempt, Restore
from jaxserve.sched.policy import View
from jaxserve.sched.registry import make_policy
from tests.sched.cache.invariants import check_host
from tests.sched.driver import Drive
from tests.sched.policies.test_bros import BEST, LATER, TENTH


class Watched(Drive):
    """m: blocks of each plane. did: the last plan's operations."""

    def __init__(self, m: int, **options: Any) -> None:
        options = {"watermark": 0.0, "host_slots": 1000, "cost_model": TENTH, **options}
        super().__init__("bros", blocks=2 * m, block_size=4, **options)
        self.did: tuple[Operation, ...] = ()

    def step(self, now: float = 0.0) -> dict[int, int]:
        host = self.scheduler.host
        plan = self.policy.plan
        seen: list[Any] = []

        def watched(view: View, now: float) -> Any:
            seen.append(plan(view, now))
            return seen[-1]

        object.__setattr__(self.policy, "plan", watched)
        try:
            found = super().step(now)
        finally:
            object.__delattr__(self.policy, "plan")
        self.did = seen[-1].operations
        check_host(host)
        return found

    def kinds(self) -> list[type]:
        return [type(op) for op in self.did]


def test_real_time_tokens_come_from_the_left_and_best_effort_ones_from_the_right() -> None:
    run = Watched(8)
    high, low = run.add(4, 2, **LATER), run.add(4, 2, tier=BEST)
    run.step()
    assert run.pool.direction[[high, low]].tolist() == [LEFT, RIGHT]


def test_the_emptiest_blocks_are_joined_and_nothing_is_moved_yet() -> None:
    run = Watched(5)
    full, tail = run.add(8, 9, tier=BEST), run.add(9, 9, tier=BEST)
    run.step()
    ids = run.pool.blocks_of(tail)[:, 2]
    high = run.add(2, 3, **LATER)
    assert run.step() == {high: 2, tail: 1}, "the other needs a block"
    assert run.kinds() == [Join]
    assert run.pool.owners[ids].tolist() == [[high, tail]] * 2
    assert full not in run.preempted


def test_only_what_is_about_to_be_written_over_goes_to_the_host() -> None:
    run = Watched(3)
    low = run.add(11, 9, tier=BEST)
    run.step()
    high = run.add(2, 9, **LATER)
    assert run.step() == {high: 2}, "2 of its own, and 3 of the other's, of 4"
    checkpoint, join = run.did
    assert isinstance(checkpoint, Checkpoint) and isinstance(join, Join)
    assert (checkpoint.first.tolist(), checkpoint.end.tolist()) == ([10], [11])
    assert run.step() == {high: 1} and run.scheduler.host.tokens[low] == 2
    assert run.step() == {high: 1} and run.scheduler.host.tokens[low] == 3


def test_what_is_missing_comes_back_into_the_same_block() -> None:
    run = Watched(3)
    low = run.add(11, 2, tier=BEST)
    run.step()
    ids = run.pool.blocks_of(low).copy()
    high = run.add(2, 2, **LATER)
    run.step()
    assert run.step() == {high: 1} and run.ended == [high]
    assert run.step() == {low: 1} and run.kinds() == [Restore]
    assert run.scheduler.host.num_used == 0 and not run.preempted
    assert run.ended == [high, low]
    assert len(ids) == 2, "blocks of K and V"


def test_a_block_still_in_use_is_left_for_another_one() -> None:
    run = Watched(5)
    low, brief = run.add(11, 3, tier=BEST), run.add(7, 2, **LATER)
    run.step()
    high = run.add(2, 9, **LATER)
    assert run.step() == {brief: 1, high: 2} and run.ended == [brief]
    assert [run.step(), run.step()] == [{high: 1}, {high: 1}], "into what the other has"
    assert run.step() == {high: 1, low: 1} and run.kinds() == [Copy, Restore]
    assert run.pool.owners[run.pool.blocks_of(low)[:, 2], LEFT].tolist() == [NOBODY] * 2


def test_with_no_room_on_the_host_the_block_is_lost_and_computed_again() -> None:
    run = Watched(3, host_slots=0)
    low = run.add(11, 2, tier=BEST)
    run.step()
    high = run.add(2, 2, **LATER)
    assert run.step() == {high: 2}
    (preempt,) = run.did
    assert isinstance(preempt, Preempt)
    assert (preempt.rows.tolist(), preempt.keep.tolist()) == ([low], [8])
    assert run.step() == {high: 1} and run.ended == [high] and not run.did
    assert run.step() == {low: 4} and run.ended == [high, low]


def test_the_latest_of_several_is_cut() -> None:
    run = Watched(4, host_slots=2)
    first, second = (run.add(8, 9, tier=BEST) for _ in range(2))
    run.step()
    high = run.add(5, 2, **LATER)
    assert run.step() == {high: 5}, "of one 4 tokens are in the way, of the other 1"
    assert [type(op) for op in run.did] == [Preempt]
    assert run.did[0].rows.tolist() == [second]  # type: ignore[union-attr]
    assert first not in run.preempted


def test_who_must_not_wait_leaves_a_block_before_the_other_writes_there() -> None:
    run = Watched(3, max_age=1.0)
    low, brief = run.add(5, 8, tier=BEST), run.add(3, 2, **LATER)
    run.step()
    high = run.add(2, 9, **LATER)
    assert run.step() == {brief: 1, high: 2, low: 1} and run.kinds() == [Join]
    assert run.step(9.0) == {low: 1, high: 1} and run.kinds() == [Copy], "two slots"
    assert not run.scheduler.host.num_used
    run.to_the_end()


def test_what_one_leaves_is_what_the_next_one_takes() -> None:
    """One block a plane is free for the first of those who must not wait. The next one gets what
    that leaves, once the real-time request there is dropped."""
    run = Watched(5, max_age=1.0)
    first, second = (run.add(5, 8, tier=BEST) for _ in range(2))
    brief = run.add(3, 2, **LATER)
    run.step()
    urgent, patient = (run.add(2, 9, ttft=100.0, tbt=tbt) for tbt in (50.0, 90.0))
    run.step()
    assert run.ended == [brief] and run.pool.num_free == 2
    left = run.pool.blocks_of(first)[:, 1].tolist()
    assert run.pool.owners[left, LEFT].tolist() == [patient] * 2
    assert run.step(9.0) == {first: 1, second: 1, urgent: 1} and run.preempted == [patient]
    assert run.kinds() == [Checkpoint, Preempt, Copy, Copy]
    assert sorted(run.pool.blocks_of(second)[:, 1].tolist()) == sorted(left)
    run.to_the_end()


def test_a_cache_that_is_dropped_comes_back_from_the_host() -> None:
    run = Watched(6, max_model_len=24)
    first, last = (run.add(11, 12, tbt=tbt, ttft=90.0) for tbt in (50.0, 90.0))
    run.to_the_end()
    assert run.preempted == [last]
    assert sum(sum(plan.values()) for plan in run.plans) == 2 * (11 + 12 - 1), "nothing twice"
    assert run.ended == [first, last]


def test_those_with_most_time_lose_their_caches_first() -> None:
    run = Watched(3)
    rows = [run.add(4, 3, ttft=90.0, tbt=tbt) for tbt in (20.0, 30.0, 10.0)]
    run.step()
    assert run.step() == {rows[2]: 1} and run.preempted == [rows[1]]
    assert run.kinds() == [Checkpoint, Preempt]
    run.to_the_end()


@pytest.mark.parametrize("on", [False, True])
def test_best_effort_requests_take_places_of_those_with_more_to_bring_back(on: bool) -> None:
    run = Watched(6, max_model_len=24)
    first, last = (run.add(11, 12, tbt=tbt, ttft=90.0) for tbt in (50.0, 90.0))
    while not run.preempted:
        run.step()
    run.scheduler.finish(first)
    run.live -= 1
    low = run.add(4, 3, tier=BEST)
    run.policy = run.scheduler.policy = make_policy("bros", watermark=0.0, replace=on)
    view = run.scheduler.view
    run.scheduler.view = replace(view, limits=replace(view.limits, max_rows=1))
    assert list(run.step()) == [low if on else last]
    run.to_the_end()


@pytest.mark.parametrize("in_order", [False, True])
def test_newcomers_keep_nobody_waiting_who_has_tokens_on_the_host(in_order: bool) -> None:
    run = Watched(8, rows=2, in_order=in_order)
    low = [run.add(4, 3, tier=BEST) for _ in range(2)]
    run.step()
    high = [run.add(4, 1, **LATER) for _ in range(2)]
    assert list(run.step()) == high and run.scheduler.host.tokens[low].tolist() == [4, 4]
    later = [run.add(4, 2, tier=BEST) for _ in range(4)]
    for _ in range(20):
        later += [run.add(4, 2, tier=BEST) for _ in range(2)]
        run.step()
    assert run.ended[:4] == [*high, *(low if in_order else later[:2])]
    assert (set(low) <= set(run.ended)) == in_order
    run.to_the_end()


@pytest.mark.parametrize("aged", [4, 12])
def test_those_that_must_not_wait_are_served_in_order_too(aged: int) -> None:
    run = Watched(8, rows=1, max_age=1.0)
    low = run.add(4, 3, tier=BEST)
    run.step()
    run.add(4, 1, **LATER)
    run.step()
    for _ in range(aged):
        run.add(4, 2, tier=BEST)
    assert list(run.step(5.0)) == [low]


def test_a_cache_that_takes_too_long_to_come_back_is_passed_over() -> None:
    slow = LinearCostModel(Coefficients(0.1, 0, 0, 0, 0, 0, 0, 0, 0, swapped_slot=0.5), 1)
    run = Watched(8, rows=2, cost_model=slow)
    low = run.add(4, 3, tier=BEST)
    run.step()
    brief, high = run.add(4, 1, **LATER), run.add(4, 9, ttft=100.0, tbt=2.0)
    assert run.step() == {brief: 4, high: 4} and run.scheduler.host.tokens[low] == 4
    other = run.add(4, 3, tier=BEST)
    assert run.step() == {high: 1, other: 4}, "4 tokens of K and V take 4 s"
    assert run.step() == {high: 1, other: 1}


def test_nobody_moves_caches_without_sharing() -> None:
    assert make_policy("bros").moves_cache and not make_policy("bros:sharing=false").moves_cache
    run = Watched(3, sharing=False)
    low = run.add(11, 9, tier=BEST)
    run.step()
    high = run.add(2, 2, **LATER)
    assert run.step() == {high: 2} and run.kinds() == [Preempt] and run.preempted == [low]


def test_the_earliest_is_looked_at_however_much_it_has_on_the_host() -> None:
    """So that somebody can always take a block from the others."""
    run = Watched(40, rows=40, c=1000, in_order=False)
    rows = np.array([run.add(4, 9, tier=BEST) for _ in range(20)])
    run.step()
    side = run.pool.direction[rows[0]]
    for count, row in enumerate(rows[::-1].tolist()):
        run.scheduler._checkpoint(
            None,  # type: ignore[arg-type]
            Checkpoint(*(np.array([n]) for n in (row, 4 - 1 - count // 19, 4))),
        )
    assert side == RIGHT
    planned = run.step()
    assert int(rows[0]) in planned


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_only_best_effort_requests_read_is_lent_too(forgotten: bool) -> None:
    """Several of them, or one that is left, whether others would find it or not any more."""
    run = Drive("bros", prefix_caching=True, blocks=64, c=256, p=256)
    keys = tuple(b"%d" % number for number in range(12))
    readers = []
    for number in range(3):
        readers.append(run.add(49, 8, tier=BEST, keys=keys))
        run.step(float(number))
    assert run.pool.num_shared == 24
    if forgotten:
        run.scheduler.forget_all()
    run.scheduler.finish(readers.pop(0), complete=False)
    run.live -= 1
    urgent = [run.add(60, 2, arrival=3.0, ttft=100.0, tbt=5.0) for _ in range(2)]
    assert run.step(3.0) == dict.fromkeys(urgent, 60), "30 of 32 pairs of blocks"
    assert run.preempted == readers[::-1]
    run.to_the_end()


def test_who_alone_still_reads_blocks_owns_them() -> None:
    run = Drive("bros", prefix_caching=True, blocks=64, c=256, p=256)
    keys = tuple(b"%d" % number for number in range(12))
    first, second = (run.add(49, 8, tier=BEST, keys=keys) for _ in range(2))
    run.step(0.0)
    run.step(1.0)
    assert run.pool.num_shared == 24
    run.scheduler.forget_all()
    run.scheduler.finish(first, complete=False)
    run.live -= 1
    ids = run.pool.blocks_of(second)
    assert (run.pool.owners[ids, RIGHT] == second).all()
    assert (run.pool.at[ids, RIGHT] == np.arange(13)).all()
    run.to_the_end()
