"""AccelGen and the cache: whose memory goes, what starts leave. As in test_accelgen.py, a token
takes 0.1 s and blocks hold one."""

from __future__ import annotations

import pytest

from tests.sched.policies.accelgen.test_accelgen import BEST, LATER, drive


@pytest.mark.parametrize("sparing", [True, False])
def test_urgent_requests_take_memory_from_whoever_has_most_time(sparing: bool) -> None:
    run = drive(m=20, sparing=sparing)
    some, most = run.add(8, 9, ttft=90.0, tbt=20.0), run.add(8, 9, ttft=90.0, tbt=30.0)
    run.step()
    urgent = run.add(10, 3, ttft=1.5)
    assert run.step() == {some: 1, urgent: 10} and run.preempted == [most]


@pytest.mark.parametrize("sparing", [True, False])
def test_urgent_requests_make_nobody_late_for_it(sparing: bool) -> None:
    """A step takes 1 s lately: without its cache the other has none of its 2.5 s left."""
    run = drive(m=20, sparing=sparing)
    other = run.add(10, 9, ttft=90.0, tbt=2.5)
    run.step()
    urgent = run.add(10, 3, ttft=1.5)
    assert run.step() == ({other: 1} if sparing else {urgent: 10})
    assert run.preempted == ([] if sparing else [other])


def test_whoever_missed_a_target_loses_memory_before_others() -> None:
    """Of the two, the one whose first token came late has less time left."""
    run = drive(m=20)
    lost = run.add(8, 9, ttft=0.1, tbt=20.0)
    calm = run.add(8, 9, ttft=90.0, tbt=30.0)
    run.step(1.6)
    urgent = run.add(10, 3, arrival=1.6, ttft=1.5)
    assert run.step(1.6) == {calm: 1, urgent: 10} and run.preempted == [lost]


def test_jobs_with_time_to_spare_make_room_and_are_in_time() -> None:
    run = drive(m=16)
    job = run.add(8, 6, jct=40.0)
    run.step()
    urgent = run.add(10, 1, ttft=1.5)
    assert run.step() == {urgent: 10} and run.preempted == [job]
    assert run.step() == {job: 9}


def test_whoever_is_late_or_not_urgent_takes_no_memory() -> None:
    run = drive(m=20)
    rows = [run.add(8, 9, **LATER) for _ in range(2)]
    run.step()
    late, calm = run.add(10, 3, ttft=0.5), run.add(10, 3, ttft=50.0)
    assert run.step() == dict.fromkeys(rows, 1) and not run.preempted
    assert run.table.computed[[late, calm]].tolist() == [0, 0]


def test_nobody_is_preempted_for_urgent_ones_again_and_again() -> None:
    run = drive(m=20, pivot=20)
    low = run.add(12, 8, tier=BEST)
    for number in range(6):
        now = 10.0 * number
        run.step(now)
        run.add(15, 1, arrival=now, ttft=1.65)
        run.step(now)
    assert run.preempted == [low] * 3
    run.to_the_end()


def test_decodes_without_blocks_take_them_from_whoever_has_most_time() -> None:
    run = drive(m=15)
    rows = [run.add(5, 9, ttft=90.0, tbt=tbt) for tbt in (20.0, 30.0, 10.0)]
    run.step()
    assert run.step() == {rows[0]: 1, rows[2]: 1} and run.preempted == [rows[1]]


def test_a_long_prompt_takes_the_blocks_there_are() -> None:
    run = drive(m=30, long=20)
    first = run.add(8, 3, **LATER)
    run.step()
    long = run.add(25, 2, **LATER)
    assert run.step() == {first: 1, long: 21}
    run.to_the_end()


def test_late_ones_leave_whoever_runs_another_block() -> None:
    """Blocks hold a token: of the 12 that are free one is the other's."""
    run = drive(m=20)
    first = run.add(8, 2, **LATER)
    run.step()
    late = run.add(11, 3, ttft=0.5)
    assert run.step() == {first: 1}
    assert run.ended == [first] and run.step() == {late: 11}


def test_long_prompts_leave_the_watermark_until_they_are_alone() -> None:
    run = drive(m=40, watermark=0.25, long=20, c=16)
    first = run.add(8, 3, **LATER)
    run.step()
    long = run.add(34, 2, **LATER)
    assert run.step() == {first: 1, long: 15}
    assert run.step() == {first: 1, long: 5}, "10 of the 40 are left"
    assert run.ended == [first]
    assert run.step() == {long: 14}


def test_starts_leave_the_watermark_while_others_run() -> None:
    run = drive(m=20, watermark=0.3)
    first, second = run.add(8, 3, **LATER), run.add(7, 3, **LATER)
    assert run.step() == {first: 8}
    assert run.step() == {first: 1}
    assert run.step() == {first: 1} and run.ended == [first]
    assert run.step() == {second: 7}
