"""BROS in small cases: the order, deadlines, the size of batches, whose memory goes, who starves.

A token takes 0.1 s, and blocks hold one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.sched.cache.cache_kinds import NOBODY, Direction
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policies.bros.bros import Bros
from jaxserve.sched.policies.bros.urgency import Targets
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import RUNNING, WAITING
from tests.sched.driver import Drive
from tests.sched.policies.test_policy_properties import Case, Job, cases, quick, serve

TENTH = LinearCostModel(Coefficients(0.1, 0, 0, 0, 0, 0, 0, 0, 0), 1)
BEST = Tier.BEST_EFFORT
LATER = {"ttft": 100.0, "tbt": 100.0}  # targets that are no hindrance


def drive(*, m: int = 1000, **options: Any) -> Drive:
    options = {"cost_model": TENTH, "watermark": 0.0, "sharing": False, **options}
    return Drive("bros", blocks=2 * m, block_size=1, **options)


def flood(run: Drive, steps: int) -> None:
    """A real-time request that takes all of the time there is comes with each step."""
    for number in range(steps):
        run.add(10, 1, arrival=float(number), ttft=1.0)
        run.step(float(number))


def size(run: Drive) -> int:
    assert isinstance(run.policy, Bros)
    return run.policy.size


def test_those_that_wait_and_those_that_run_are_in_one_order() -> None:
    run = drive(c=2, p=2)
    runs = run.add(2, 9, ttft=1.0, tbt=5.0)
    assert run.step(0.0) == {runs: 2}
    waits = run.add(2, 1, ttft=4.0)
    assert run.step(0.5) == {waits: 2}, "3.5 s are left, and 4.5"
    assert run.step(0.5) == {runs: 1}


targets = st.tuples(st.sampled_from((0.0, 1.0, 2.0)), st.sampled_from((None, 1.0, 4.0)))


@settings(quick, max_examples=40)
@given(st.lists(targets, max_size=8), st.lists(targets, max_size=8))
def test_polling_two_queues_gives_what_sorting_all_would(
    first: list[tuple[float, float | None]], second: list[tuple[float, float | None]]
) -> None:
    run = drive(initial=100, c=1000, rows=100)
    for number, jobs in enumerate((first, second)):
        for gap, target in jobs:
            slo = {} if target is None else {"ttft": target, "tbt": target}
            run.add(2, 9, arrival=gap + number, **slo)
        if number == 0 and jobs:
            run.step(1.0)
    view, table = run.scheduler.view, run.table
    waiting, running = table.in_state(WAITING), table.in_state(RUNNING)
    wanted = Targets(0.4, 0.2)
    queue = wanted.poll(view, waiting, running, 3.0)
    assert sorted(queue.rows.tolist()) == sorted([*waiting.tolist(), *running.tolist()])
    assert queue.residual.tolist() == wanted.residual(view, queue.rows, 3.0).tolist()
    assert (np.diff(queue.residual) >= 0).all()


def test_whole_prompts_leave_what_is_too_short_for_them() -> None:
    run = drive(chunked=False)
    first, second = run.add(6, 2, ttft=1.0, tbt=5.0), run.add(5, 2, ttft=2.0, tbt=5.0)
    third = run.add(1, 2, ttft=9.0, tbt=5.0)
    assert run.step() == {first: 6}, "nor the third, which would have fitted"
    assert run.step() == {first: 1, second: 5, third: 1}


def test_size_bounds_best_effort_requests_after_an_early_return() -> None:
    """Real-time ones, which decode beside them, are not held back by it."""
    run = drive(initial=2, growth=1, headroom=False)
    high = [run.add(1, 20, **LATER) for _ in range(2)]
    low = [run.add(1, 20, tier=BEST) for _ in range(4)]
    assert run.step() == dict.fromkeys(high, 1) and size(run) == 3
    assert run.step() == dict.fromkeys([*high, *low[:1]], 1) and size(run) == 4
    urgent = run.add(6, 2, ttft=0.65, tbt=100.0)
    assert run.step() == {urgent: 6} and size(run) == 2, "the others are not late"
    assert run.step() == dict.fromkeys([*high, urgent], 1)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_late_prompt_that_does_not_fit_is_no_early_return(chunked: bool) -> None:
    run = drive(chunked=chunked, headroom=False, initial=1, growth=1)
    high, low = run.add(1, 99, ttft=9.0, tbt=1.0), run.add(1, 99, tier=BEST)
    run.step()
    late = run.add(15, 2, ttft=0.5)
    assert run.step() == ({high: 1, late: 9} if chunked else {high: 1, low: 1})
    assert size(run) == 3
    assert run.step() == ({high: 1, late: 6, low: 1} if chunked else {high: 1, low: 1})
    run.scheduler.finish(high)
    assert run.step()[late] == (1 if chunked else 15)


def test_late_prompts_come_last() -> None:
    run = drive(headroom=False)
    lost, early = run.add(15, 2, ttft=0.5), run.add(6, 2, ttft=2.0, tbt=5.0)
    assert run.step() == {early: 6, lost: 14}, "2.1 s with all of the other"
    assert run.step() == {early: 1, lost: 1}


def test_late_prompts_and_best_effort_ones_leave_headroom() -> None:
    """A third of a TTFT of 3 s: for the step on the device, this one, and the newcomer's own."""
    run = drive(rows=20)
    slo = {"ttft": 3.0, "tbt": 3.0}
    high = run.add(2, 99, **slo)
    lost, low = run.add(5, 99, arrival=-9.0, **slo), run.add(9, 9, tier=BEST)
    assert run.step() == {high: 2, lost: 5, low: 3}
    assert run.step() == {high: 1, lost: 1, low: 6}
    others = [run.add(1, 9, **slo) for _ in range(9)]
    more = run.add(25, 9, tier=BEST)
    alone = dict.fromkeys([high, lost, *others], 1)
    assert run.step() == {**alone, low: 1, more: 18}, "a newcomer would be late anyway"


@pytest.mark.parametrize("turn", [0, 5])
def test_late_prompts_have_their_turn(turn: int) -> None:
    """Requests that take all the time there is come with each step."""
    run = drive(late_turn=turn)
    late = run.add(20, 1, arrival=-9.0, ttft=1.0)
    flood(run, 60)
    turns = [number for number, plan in enumerate(run.plans) if late in plan]
    assert turns[:4] == ([5, 11, 17, 23] if turn else [])
    assert (late in run.ended) == bool(turn)
    run.to_the_end()


def test_late_prompts_leave_memory_for_those_in_time_but_in_their_turn() -> None:
    run = drive(m=20, late_watermark=0.5, late_turn=2)
    slo = {"ttft": 9.0, "tbt": 9.0}
    high, low = run.add(4, 9, **slo), run.add(7, 9, tier=BEST)
    assert run.step() == {high: 4, low: 7}
    late = run.add(6, 9, arrival=-9.0, **slo)
    assert late not in run.step(), "half of 20 less the 5 of the first is 5, whatever low has"
    first, second = run.add(1, 1, **slo), run.add(1, 1, **slo)
    assert {first, second} < run.step().keys() and {first, second} == set(run.ended)
    assert run.step()[late] == 6
    run.to_the_end()


def test_a_late_prompt_with_nobody_in_time_may_have_all_memory() -> None:
    run = drive(m=20, late_watermark=0.5)
    late = run.add(15, 3, arrival=-9.0, ttft=1.0)
    assert run.step() == {late: 15}


def test_a_whole_prompt_that_never_fits_keeps_nobody_waiting() -> None:
    run = drive(late_turn=2, chunked=False)
    high = run.add(1, 99, ttft=9.0, tbt=1.0)
    run.step()
    run.add(15, 1, arrival=-9.0, ttft=1.0)
    for number in range(1, 20):
        one = run.add(2, 1, arrival=float(number), ttft=1.0)
        assert run.step(float(number)) == {high: 1, one: 2}


def test_late_decodes_keep_their_place() -> None:
    run = drive(c=3, p=3)
    first = run.add(2, 3, ttft=9.0, tbt=0.01)
    run.step()
    second = run.add(3, 2, ttft=2.0)
    assert run.step() == {first: 1, second: 2}, "its token is late already"
    assert run.step() == {first: 1, second: 1}


def test_one_request_is_served_however_long_it_takes() -> None:
    run = drive(late_last=False, chunked=False)
    first = run.add(3, 2, ttft=1.0, tbt=0.4)
    run.step()
    long = run.add(20, 2, arrival=-3.0, ttft=2.5)
    assert run.step() == {long: 20}, "it is late, and nobody else is served in time with it"
    assert first in run.step()


def test_a_step_on_the_device_counts_as_over() -> None:
    """0.5 s of it are to come when the next is planned."""
    run = drive(chunked=False)
    flying = run.add(5, 3, ttft=0.5, tbt=5.0)
    run.scheduler.schedule(0.0)
    first, second = run.add(4, 2, ttft=1.0, tbt=5.0), run.add(2, 2, ttft=3.0)
    step = run.scheduler.schedule(0.0)
    assert step.rows.tolist() == [first], "0.6 s for both, of 0.5"
    run.scheduler.receive(np.array([flying, first]), 0.9)
    assert set(run.scheduler.schedule(0.9).rows.tolist()) == {flying, first, second}


def test_targets_of_those_that_name_none() -> None:
    run = drive(ttft=1.0, tbt=2.0, chunked=False)
    first = run.add(6, 3)
    second = run.add(5, 3)
    assert run.step() == {first: 6}
    run.step(0.5)
    residual = Targets(1.0, 2.0).residual(run.scheduler.view, np.array([first, second]), 0.7)
    assert residual.tolist() == pytest.approx([1.3, 1.8])


def test_a_best_effort_prompt_that_lacks_memory_and_time_is_not_overtaken() -> None:
    run = drive(m=20, headroom=False)
    high = run.add(5, 4, ttft=9.0, tbt=1.0)
    run.step()
    long, short = run.add(16, 2, tier=BEST), run.add(12, 2, tier=BEST)
    assert [run.step() for _ in range(3)] == [{high: 1}] * 3, "14 blocks are left, and 0.9 s"
    assert run.step() == {long: 16}
    run.to_the_end()
    assert run.ended == [high, long, short]


def test_best_effort_prompts_that_take_too_long_are_passed_over() -> None:
    run = drive(chunked=False, headroom=False)
    first = run.add(3, 9, tbt=1.0, ttft=1.0)
    low = run.add(4, 9, tier=BEST)
    assert run.step() == {first: 3, low: 4}
    long, short = run.add(9, 9, tier=BEST), run.add(3, 9, tier=BEST)
    assert run.step() == {first: 1, low: 1, short: 3}
    assert long not in run.step()
    run.scheduler.finish(first)
    assert run.step() == {low: 1, long: 9, short: 1}, "nobody is in a hurry"


def test_real_time_requests_take_best_effort_memory() -> None:
    run = drive(m=20)
    lower, low = (run.add(8, 9, tier=BEST) for _ in range(2))
    run.step()
    high = run.add(10, 3, **LATER)
    assert run.step() == {high: 10, lower: 1} and run.preempted == [low], "the latest"


def test_real_time_requests_take_best_effort_places() -> None:
    run = drive(rows=2)
    lower, low = (run.add(4, 9, tier=BEST) for _ in range(2))
    run.step()
    high = run.add(4, 3, **LATER)
    assert run.step() == {high: 4, lower: 1} and run.preempted == [low]


def test_those_with_most_time_lose_their_memory_last_of_all() -> None:
    run = drive(m=21)
    rows = [run.add(6, 9, ttft=100.0, tbt=tbt) for tbt in (20.0, 30.0, 10.0)]
    run.step()
    low = run.add(1, 9, tier=BEST)
    assert run.step() == dict.fromkeys(rows, 1) and not run.preempted, "it finds none"
    run.scheduler.finish(rows[0])
    assert run.step() == {rows[1]: 1, rows[2]: 1, low: 1}
    another = run.add(3, 9, **LATER)
    assert run.step() == {rows[1]: 1, rows[2]: 1, another: 3} and run.preempted == [low]
    assert run.step() == {rows[2]: 1, rows[1]: 1} and run.preempted == [low, another]
    assert run.step() == {rows[2]: 1}, "it has less time left than the other, who waits for a block"


def test_a_start_takes_no_real_time_memory() -> None:
    run = drive(m=12)
    first = run.add(10, 3, tbt=90.0, ttft=90.0)
    run.step()
    urgent = run.add(3, 3, ttft=1.0)
    assert run.step() == {first: 1}
    assert run.step() == {first: 1} and run.ended == [first]
    assert run.step() == {urgent: 3}


def test_best_effort_decodes_take_memory_from_the_latest() -> None:
    run = drive(m=14)
    rows = [run.add(4, 9, tier=BEST) for _ in range(3)]
    run.step()
    assert run.step() == {rows[0]: 1, rows[1]: 1} and not run.preempted
    assert run.step() == {rows[0]: 1, rows[1]: 1} and run.preempted == [rows[2]]
    run.to_the_end()
    assert len(run.ended) == 3


def test_starts_leave_the_watermark_while_others_run() -> None:
    run = drive(m=20, watermark=0.3)
    first, second = run.add(8, 3, tier=BEST), run.add(7, 3, tier=BEST)
    assert run.step() == {first: 8}
    assert run.step() == {first: 1}
    assert run.step() == {first: 1} and run.ended == [first]
    assert run.step() == {second: 7}


def test_best_effort_requests_do_not_hold_the_watermark_against_a_real_time_one() -> None:
    run = drive(m=20, watermark=0.3)
    run.add(8, 3, tier=BEST)
    run.step()
    high = run.add(18, 3, **LATER)
    assert run.step() == {high: 18}


@pytest.mark.parametrize("sharing", [False, True])
@settings(quick, max_examples=40)
@given(case=cases, host=st.sampled_from((0, 20, 1000)))
def test_no_real_time_request_lacks_memory_that_best_effort_ones_hold(
    sharing: bool, case: Case, host: int
) -> None:
    """Where nothing else is short, whoever is not served wants more than all that they hold, or,
    where blocks are shared, than they hold alone."""
    policy = f"bros:initial=100:ttft=1e9:tbt=1e9:watermark=0:sharing={sharing}"
    run = Drive(policy, c=1000, p=1000, rows=100, blocks=case.blocks, host_slots=host)
    for job in case.jobs:
        run.add(job.prompt, job.output, tier=job.tier)
    table, pool, scheduler = run.table, run.pool, run.scheduler
    while run.live:
        step = scheduler.schedule(0.0)
        assert len(step) or step.plan.operations, "nothing is planned"
        left = np.setdiff1d(np.flatnonzero(table.tier == Tier.REALTIME), step.rows)
        runs, waits = (left[table.state[left] == state] for state in (RUNNING, WAITING))
        first = waits[np.argsort(table.seq[waits])][:1]
        theirs = np.flatnonzero((table.tier == BEST) & (table.state == RUNNING))
        lone = (pool.refs == 1) & (pool.owners[:, Direction.RIGHT] != NOBODY)
        lent = lone.sum() if sharing else pool.blocks_held(theirs).sum()
        free = (pool.num_free + lent) // 2 * 2
        for row in [*runs.tolist(), *first.tolist()]:
            one, known = np.array([row]), table.prompt_len[[row]] + table.generated[[row]]
            assert pool.needed(one, known, np.zeros(1, np.int64))[0] > free
        scheduler.receive(step.emitting, 0.0)
        for row in scheduler.release_finished(step).tolist():
            scheduler.finish(row)
            run.live -= 1


# A best-effort request that has waited too long keeps filling a block into which a real-time one
# computes many tokens. (Prompt, output, gap, best-effort, TTFT.)
OLD_BESIDE_A_CHUNK = Case(
    jobs=[
        Job(prompt, output, gap, Tier.BEST_EFFORT if low else Tier.REALTIME, ttft, tbt=None)
        for prompt, output, gap, low, ttft in (
            *((1, 1, 0, 0, None), (16, 6, 0, 0, None), (16, 2, 5, 0, None), (16, 1, 1, 0, None)),
            *((20, 3, 0, 0, 2.0), (2, 1, 0, 0, None), (10, 1, 0, 1, None), (11, 3, 0, 1, None)),
            *((12, 3, 0, 1, None), (10, 3, 0, 1, None), (1, 1, 5, 0, None), (11, 1, 0, 1, None)),
            *((3, 1, 0, 1, None), (1, 2, 0, 0, 2.0)),
        )
    ],
    rows=5,
    blocks=24,
    budget=16,
    prefill=1,
)


@pytest.mark.parametrize(
    "policy",
    [
        *("max_age=2", "floor=3", "initial=1:growth=0", "late_last=false", "sharing=false"),
        *("chunked=false", "late_turn=1:headroom=false:late_watermark=0.5"),
    ],
)
@quick
@example(case=OLD_BESIDE_A_CHUNK, host=0)
@given(case=cases, host=st.sampled_from((0, 20, 1000)))
def test_it_serves_everything(policy: str, case: Case, host: int) -> None:
    assert len(serve(f"bros:{policy}", case, host_slots=host).ended) == len(case.jobs)


EIGHTH = LinearCostModel(Coefficients(0.125, 0, 0, 0, 0, 0, 0, 0, 0), 1)
eighths = st.integers(1, 24).map(lambda n: n / 8)  # seconds, which add up exactly


@st.composite
def arriving(draw: st.DrawFn) -> list[tuple[float, int, int, Tier, float, float]]:
    """Arrival, prompt, output, tier and targets."""
    one = st.tuples(
        st.sampled_from((0.0, 0.0, 0.125, 1.0)),
        st.integers(1, 20),
        st.integers(1, 6),
        st.sampled_from(Tier),
        eighths,
        eighths,
    )
    found, now = [], 0.0
    for gap, *rest in draw(st.lists(one, min_size=1, max_size=12)):
        now += gap
        found.append((now, *rest))
    return found


@settings(quick, max_examples=60)
@given(jobs=arriving(), late_last=st.booleans(), c=st.sampled_from((8, 1000)))
def test_no_time_that_deadlines_leave_is_lost(jobs: Any, late_last: bool, c: int) -> None:
    """Where memory and places are not short: a batch ends before the most urgent deadline that can
    be met; one that leaves anything behind has all tokens that a batch may have, or would miss that
    deadline with another one; best-effort requests get what real-time ones leave; and all end."""
    options = {"cost_model": EIGHTH, "headroom": False, "late_last": late_last}
    run = drive(rows=64, c=c, p=c, **options)
    scheduler, table, now, coming = run.scheduler, run.table, 0.0, deque(jobs)
    while coming or run.live:
        while coming and (coming[0][0] <= now or not run.live):
            arrival, prompt, output, tier, ttft, tbt = coming.popleft()
            now = max(now, arrival)
            run.add(prompt, output, arrival=arrival, tier=tier, ttft=ttft, tbt=tbt)
        rows = np.flatnonzero(np.isin(table.state, (WAITING, RUNNING)))
        pending, high = table.pending(rows), table.tier[rows] == Tier.REALTIME
        due = Targets(1.0, 1.0).residual(scheduler.view, rows, now)
        limit = due[high & (due >= pending / 8)].min(initial=np.inf)
        step = scheduler.schedule(now)
        given = np.zeros(table.capacity, np.int64)
        given[step.rows] = step.plan.num_tokens
        tokens, left = int(given.sum()), pending - given[rows]
        assert tokens / 8 <= limit
        assert not left.any() or tokens == c or (tokens + 1) / 8 > limit
        assert not left[high].any() or not given[rows[~high]].any()
        now += tokens / 8
        done = scheduler.release_finished(step)
        scheduler.receive(step.emitting, now)
        for row in done.tolist():
            scheduler.finish(row)
            run.live -= 1


# What best-effort requests may count on: an age limit, a floor, or nothing.


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
