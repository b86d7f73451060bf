"""AccelGen in small cases: how large a batch is, who comes first, whose memory goes, who is cut.

A token takes 0.1 s, blocks hold one, and the pivot is 10 tokens in a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import RUNNING
from tests.sched.driver import Drive
from tests.sched.policies.test_policy_properties import Case, cases, quick

TENTH = LinearCostModel(Coefficients(0.1, 0, 0, 0, 0, 0, 0, 0, 0), 1)
BIASED = LinearCostModel(Coefficients(0.1, 0.5, 0, 0, 0, 0, 0, 0, 0), 1)
BEST = Tier.BEST_EFFORT
LATER = {"ttft": 100.0, "tbt": 100.0}  # targets that are no hindrance


def drive(policy: str = "accelgen", *, m: int = 1000, **options: Any) -> Drive:
    options = {"cost_model": TENTH, "watermark": 0.0, "pivot": 10, "p": 1, **options}
    return Drive(policy, blocks=2 * m, block_size=1, **options)


def test_the_strictest_target_says_how_large_the_batch_is() -> None:
    run = drive()
    rows = [run.add(1, 9, ttft=9.0, tbt=tbt) for tbt in (1.5, 1.0)]
    run.step()
    long = run.add(30, 2, **LATER)
    assert run.step() == {rows[0]: 1, rows[1]: 1, long: 8}
    run.scheduler.finish(rows[1])
    assert run.step() == {rows[0]: 1, long: 14}


@pytest.mark.parametrize(("tbt", "tokens"), [(1.0, 5), (3.0, 20)])
def test_so_does_the_cost_model_and_the_stricter_counts(tbt: float, tokens: int) -> None:
    """10 tokens take 1.5 s: Eq. 6 has 6 and 20 of them, the model 5 and 25."""
    run = drive(cost_model=BIASED)
    first = run.add(1, 9, ttft=9.0, tbt=tbt)
    run.step()
    long = run.add(40, 2, **LATER)
    assert run.step() == {first: 1, long: tokens - 1}


def test_decodes_that_would_make_others_late_wait_a_step() -> None:
    run = drive(rows=8)
    tight = [run.add(1, 9, ttft=9.0, tbt=0.35) for _ in range(2)]
    loose = [run.add(1, 9, ttft=9.0, tbt=1.0) for _ in range(2)]
    run.step()
    assert run.step(0.3) == dict.fromkeys([*tight, loose[0]], 1)
    assert run.step(0.6) == dict.fromkeys([*tight, loose[1]], 1), "it has less time left now"


def test_a_target_that_cannot_be_met_limits_nobody() -> None:
    run = drive()
    lost = run.add(10, 2, ttft=0.5)
    other = run.add(20, 2, ttft=9.0)
    assert run.step() == {lost: 10, other: 20}


def test_remaining_time_counts_the_chunks_that_are_to_come() -> None:
    """Of T_max = 1 s each: 6 - 3 and 4.5 - 1 s are left, though the first deadline is later."""
    run = drive("accelgen_nobatch", c=10)
    large, small = run.add(30, 2, ttft=6.0), run.add(5, 2, ttft=4.5)
    assert run.step() == {large: 10}
    assert small in run.step(2.6)


def test_the_urgent_come_before_those_that_fit_better() -> None:
    run = drive(c=10)
    fits, urgent = run.add(10, 2, ttft=90.0), run.add(4, 2, ttft=1.5)
    assert run.step() == {urgent: 4, fits: 6}


def test_those_that_fit_best_are_chosen_and_the_rest_is_cut() -> None:
    run = drive(c=10)
    four, nine, six = (run.add(n, 2, **LATER) for n in (4, 9, 6))
    assert run.step() == {nine: 9, four: 1}
    assert six in run.step(), "prompts under way come first"


def test_nobatch_takes_them_in_order() -> None:
    run = drive("accelgen_nobatch", c=10)
    four, nine, _ = (run.add(n, 2, **LATER) for n in (4, 9, 6))
    assert run.step() == {four: 4, nine: 6}


def test_only_those_with_about_as_little_time_are_chosen_from() -> None:
    run = drive(c=10, gamma=0.75)
    soon, near, far = (run.add(n, 2, ttft=t) for n, t in ((4, 50.0), (5, 50.5), (10, 60.0)))
    assert run.step() == {near: 5, soon: 4, far: 1}


def test_prompts_are_whole_without_chunking() -> None:
    run = drive("accelgen_nochunk", c=64)
    first = run.add(1, 9, ttft=9.0, tbt=1.0)
    run.step()
    long, short = run.add(30, 2, **LATER), run.add(9, 2, **LATER)
    assert run.step() == {first: 1, short: 9}
    assert run.step(99.5) == {first: 1, short: 1, long: 30}, "it is urgent"


def test_noorder_serves_who_comes_first() -> None:
    run = drive("accelgen_noorder", c=4, gamma=0.0)
    first, second = run.add(4, 1, **LATER), run.add(4, 1, arrival=0.1, ttft=0.5)
    assert run.step(0.2) == {first: 4}
    assert run.step(0.2) == {second: 4}


def test_one_long_prompt_is_computed_at_a_time() -> None:
    run = drive(c=10, long=20)
    first, second = run.add(25, 2, **LATER), run.add(24, 2, ttft=200.0, tbt=9.0)
    short = run.add(19, 2, ttft=300.0, tbt=9.0)
    assert run.step() == {first: 10}
    assert run.step() == {first: 10}
    assert run.step() == {first: 5, short: 5}, "the other waits until its prompt is done"
    assert second in run.step() or second in run.step()


def test_who_waits_for_a_long_prompt_lends_it_its_urgency() -> None:
    run = drive(c=10, long=20)
    low = run.add(30, 2, tier=BEST)
    run.step()
    high, other = run.add(20, 2, ttft=2.2), run.add(19, 2, ttft=2.5)
    assert run.step() == {low: 10}, "before the other, for the sake of the first"
    assert high not in run.plans[-1] and other not in run.plans[-1]


def test_best_effort_requests_come_last_unless_they_name_targets() -> None:
    run = drive(c=4)
    low, named = run.add(4, 1, tier=BEST), run.add(4, 1, tier=BEST, ttft=50.0)
    high = run.add(4, 1)
    run.to_the_end()
    assert run.ended == [high, named, low]


@pytest.mark.parametrize("late_last", [True, False])
def test_the_late_may_come_last(late_last: bool) -> None:
    run = drive(c=10, late_last=late_last)
    lost, early = run.add(9, 1, ttft=0.2), run.add(10, 1, ttft=1.9)
    assert run.step(0.5) == ({early: 10} if late_last else {lost: 9, early: 1})


def test_the_late_come_behind_those_who_can_wait() -> None:
    run = drive(c=10)
    lost, calm = run.add(9, 1, ttft=0.2), run.add(6, 1, **LATER)
    assert run.step(0.5) == {calm: 6, lost: 4}


@pytest.mark.parametrize("turn", [0, 4])
def test_the_late_have_their_turn(turn: int) -> None:
    """A request that takes all tokens of a batch comes with each step."""
    run = drive(c=10, late_turn=turn)
    lost = run.add(9, 1, ttft=0.2)
    for number in range(1, 20):
        run.add(10, 1, arrival=float(number), ttft=1.9)
        run.step(float(number))
    assert [n for n, plan in enumerate(run.plans) if lost in plan][:1] == ([4] if turn else [])
    run.to_the_end()


def test_a_step_on_the_device_counts_as_over() -> None:
    """0.5 s of it are to come when the next is planned: the other two have 0.2 s less than it."""
    run = drive(c=5)
    run.add(5, 3, ttft=0.5, tbt=5.0)
    run.scheduler.schedule(0.0)
    step = run.scheduler.schedule(0.0)
    assert len(step) == 1
    lost = run.add(3, 2, ttft=0.7)
    calm = run.add(4, 2, ttft=50.0)
    third = run.scheduler.schedule(0.0)
    assert lost in third.rows and calm in third.rows


def jct_jobs(case: Case) -> list[dict[str, float]]:
    """Every third job has a target for the whole."""
    targets = []
    for number, job in enumerate(case.jobs):
        slo = {"ttft": job.ttft, "tbt": job.tbt, "jct": 20.0 if number % 3 == 0 else None}
        targets.append({name: value for name, value in slo.items() if value is not None})
    return targets


VARIANTS = ("accelgen", "accelgen_nochunk", "accelgen_noorder", "accelgen_nobatch")
SETTINGS = ("late_last=false", "sparing=false", "paced=true", "gamma=9", "late_turn=1")


@pytest.mark.parametrize("policy", [*VARIANTS, *(f"accelgen:{setting}" for setting in SETTINGS)])
@settings(quick, max_examples=6)
@given(case=cases, long=st.sampled_from((2, 8, 100)), tenths=st.booleans())
def test_everything_ends_and_one_long_prompt_is_under_way(
    policy: str, case: Case, long: int, tenths: bool
) -> None:
    whole = not make_policy(policy).chunked
    c = max(case.budget, 32) if whole else max(case.budget, case.rows)
    options: dict[str, Any] = {"cost_model": TENTH} if tenths else {}
    run = Drive(policy, c=c, p=c, rows=case.rows, blocks=case.blocks, long=long, **options)
    for job, slo in zip(case.jobs, jct_jobs(case), strict=True):
        for _ in range(job.gap):
            if run.live:
                checked(run, long, timely=tenths and not whole)
        arrival = float(len(run.plans))
        run.add(job.prompt, job.output, arrival=arrival, tier=job.tier, **slo)
    while run.live:
        checked(run, long, timely=tenths and not whole)
    assert len(run.ended) == len(case.jobs)


def checked(run: Drive, long: int, timely: bool) -> None:
    """One step. No step has decodes and takes longer than one of them may take."""
    table, before = run.table, run.table.decoding(np.arange(run.table.capacity))
    before &= table.state == RUNNING
    plan, gone = run.step(float(len(run.plans))), len(run.preempted)
    assert plan or gone, "nothing is planned"
    assert sum(table.prompt_len[row] >= long and not before[row] for row in plan) <= 1
    running = np.flatnonzero(table.state == RUNNING)
    under_way = running[~table.decoding(running) & (table.prompt_len[running] >= long)]
    assert len(under_way) <= 1
    rows = [row for row in plan if before[row] and table.tier[row] == Tier.REALTIME]
    tbt = [table.tbt[row] for row in rows if np.isfinite(table.tbt[row])]
    if timely and tbt:
        assert 0.1 * sum(plan.values()) <= min(tbt) + 1e-9


# Whose memory goes, and what starts leave.


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
