"""Goodput: its parts by themselves, and its rules in simulations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.plan import BatchPlan, Checkpoint, Preempt, Restore
from jaxserve.sched.policies.goodput import goodput
from jaxserve.sched.policies.goodput.batch import GoodputBatch, GoodputWork
from jaxserve.sched.policies.goodput.feasibility import in_time
from jaxserve.sched.policies.goodput.goodput import Goodput
from jaxserve.sched.policies.goodput.outlook import Deadlines, Lengths, Outlook, Standard
from jaxserve.sched.policies.goodput.pausing import Memory, Returns
from jaxserve.sched.policies.goodput.tenants import Tenants
from jaxserve.sched.policy import Limits, View
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.routing.take_snapshot import Lately, constant_fields, take_snapshot
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.sched.slo.ttft_estimator import TtftEstimator
from jaxserve.sched.state.output_lengths import ENOUGH
from jaxserve.sched.state.request_table import RUNNING, WAITING, RequestTable
from jaxserve.sched.state.request_table import Outlook as GivenUp
from jaxserve.sched.unified.policy_spec import Columns
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths as WorkloadLengths
from jaxserve.simulator.workloads.workload import Workload
from tests.sched.driver import Drive
from tests.simulator.grouped import simulate

PLACE = system("llama-3-8b@a100")
STANDARD = Standard(2.0, 0.2)


@given(jobs=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=7))
@settings(max_examples=200)
def test_no_choice_has_more_jobs_in_time(jobs: list[tuple[int, int]]) -> None:
    due, cost = (np.array(column, float) for column in zip(*jobs, strict=True))
    chosen = in_time(due, cost, np.ones(len(jobs)))
    assert (np.cumsum(cost[chosen]) <= due[chosen]).all()
    best = 0
    for count in range(len(jobs), 0, -1):
        for some in itertools.combinations(np.argsort(due, kind="stable"), count):
            if (np.cumsum(cost[list(some)]) <= due[list(some)]).all():
                best = max(best, count)
    assert len(chosen) == best
    assert (np.diff(due[chosen]) >= 0).all()


def test_the_dearest_for_its_worth_is_left_out() -> None:
    due, cost = np.full(3, 5.0), np.array([3.0, 2.0, 3.0])
    assert in_time(due, cost, np.array([1.0, 1.0, 0.5])).tolist() == [0, 1]
    assert in_time(due, cost, np.array([0.1, 1.0, 1.0])).tolist() == [1, 2]
    assert in_time(due, cost, np.array([0.0, 0.0, 1.0])).tolist() == [2]


def outlook(drive: Drive, row: int, clock: float) -> tuple[float, float, float]:
    lengths, view, rows = Lengths(), drive.scheduler.view, np.array([row])
    lengths.read(view)
    deadlines = Deadlines.of_rows(view, rows, STANDARD, clock)
    found = Outlook.of_rows(view, rows, deadlines, np.ones(1), clock, lengths, pace=0.1)
    return float(found.due[0]), float(found.attains[0]), float(found.loss[0])


def written(drive: Drive, tokens: int, **slo: float) -> int:
    """A request that has written so many tokens, the last at 10 s."""
    row = drive.add(prompt=4, output=1000, arrival=9.0, **slo)
    table = drive.table
    table.generated[row] = table.received[row] = tokens
    table.first_token[row], table.last_token[row] = 9.5, 10.0
    return row


def learned(drive: Drive, length: int) -> None:
    for _ in range(ENOUGH):
        drive.table.output_lengths.add(length)


def test_what_a_late_token_costs() -> None:
    drive = Drive("goodput")
    learned(drive, 150)
    young = written(drive, 20, ttft=1.0, tbt=0.5)
    assert outlook(drive, young, 10.1) == (10.5, 1.0, 0.0), "it is sure to get to 102 tokens"
    drive.table.late_gaps[young] = 1
    assert outlook(drive, young, 10.1) == (10.5, 1.0, 1.0), "and sure not to get to 202"
    drive.table.late_gaps[young] = 2
    assert outlook(drive, young, 10.1) == (10.5, 0.0, 0.0)
    old = written(drive, 210, ttft=1.0, tbt=0.5)
    drive.table.late_gaps[old] = 1
    assert outlook(drive, old, 10.1) == (10.5, 1.0, 0.0), "it may have two"
    assert outlook(drive, old, 10.6)[2] == 0.0, "the token is late already"
    assert outlook(drive, old, 15.1)[1] == 0.0, "a gap of 5 s is longer than any may be"


def test_before_lengths_are_known_nobody_is_paused_for_free() -> None:
    drive = Drive("goodput")
    assert outlook(drive, written(drive, 20, ttft=1.0, tbt=0.5), 10.1) == (10.5, 1.0, 1.0)
    assert outlook(drive, written(drive, 110, ttft=1.0, tbt=0.5), 10.1)[2] == 0.0


def test_targets_that_are_missed_or_missing() -> None:
    drive = Drive("goodput")
    late = written(drive, 20, ttft=0.2, tbt=0.5)
    assert outlook(drive, late, 10.1)[1:] == (0.0, 0.0), "its first token was late"
    bare = written(drive, 20)
    assert outlook(drive, bare, 10.1)[0] == pytest.approx(10.0 + STANDARD.tbt)
    free = drive.add(prompt=4, output=8, arrival=9.0, tier=Tier.BEST_EFFORT)
    assert outlook(drive, free, 10.1) == (np.inf, 1.0, 0.0)
    job = drive.add(prompt=4, output=21, arrival=9.0, jct=8.0)
    assert outlook(drive, job, 10.0)[0] == pytest.approx(17.0 - 20 * 0.1), "20 more steps of 0.1 s"
    assert outlook(drive, job, 18.0)[1] == 0.0


def test_a_longest_gap_that_is_shorter_than_tbt() -> None:
    drive = Drive("goodput")
    for slo in ({"max_tbt": 0.5}, {"ttft": 1.0, "tbt": 2.0, "max_tbt": 0.5}):
        row = written(drive, 20, **slo)
        assert outlook(drive, row, 10.1) == (10.5, 1.0, 1.0)
        assert outlook(drive, row, 10.6)[1:] == (0.0, 0.0)


def test_the_queue_is_predicted_by_the_deadlines_that_plans_have() -> None:
    drive = Drive("goodput")
    known: list[dict[str, float]] = [{}, {"ttft": 1.0}, {"tbt": 1.0}, {"jct": 9.0}]
    rows = np.array([drive.add(prompt=4, output=1, **slo) for slo in known])
    view = drive.scheduler.view
    deadlines = Deadlines.of_rows(view, rows, STANDARD, 0.0)
    found = Outlook.of_rows(view, rows, deadlines, np.ones(4), 0.0, Lengths(), pace=0.0)
    priority = drive.policy.queue_priority(Columns(view, rows, 0.0), 0.0)
    assert priority.tolist() == found.due.tolist() == [2.0, 1.0, np.inf, 9.0]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("padding", [None, Padding(rows=(4, 8, 16), tokens=(16, 64, 256))])
def test_many_batches_are_priced_like_each_by_itself(padding: Padding | None, hidden: bool) -> None:
    """To the last bit: plans compare sums of these times with deadlines."""
    odd = Coefficients(*(np.sqrt(np.arange(2, 20)) / 1e3).tolist())
    drive = Drive(
        "goodput",
        c=200,
        p=200,
        rows=16,
        rho=0.0 if hidden else None,
        cost_model=LinearCostModel(odd, 3),
    )
    for i in range(24):
        drive.add(prompt=4 + i % 5, output=9, ttft=9.0, tbt=9.0)
    drive.step(0.0)
    view = dataclasses.replace(drive.scheduler.view, padding=padding)
    rows = np.concatenate([drive.table.in_state(state) for state in (RUNNING, WAITING)])
    due = Deadlines.of_rows(view, rows, STANDARD, 0.1)
    seen = Outlook.of_rows(view, rows, due, np.ones(24), 0.1, Lengths(), pace=0.1)
    work = GoodputWork.of_rows(view, rows, seen, kind=int(hidden))

    def alone(*some: int) -> float:
        return GoodputBatch(view, work, np.array(some)).seconds

    batch = GoodputBatch(view, work, np.array([0, 20]))
    alike_ends = np.array([16, 17, 18, 19, 22, 23, 21])  # the first and the last are as long
    for others in (np.arange(1, 15), np.arange(16, 20), np.arange(9, 20), alike_ends):
        found = batch.times(others).tolist()
        assert found == [alone(0, 20, *others[: i + 1]) for i in range(len(others))]
        each = batch.with_each(others).tolist()
        assert each == [alone(0, 20, one) for one in others.tolist()]
    parts = batch.with_tokens(22, np.arange(1, 5)).tolist()
    for tokens, seconds in zip(range(4, 0, -1), reversed(parts), strict=True):
        work.cut(22, tokens)
        assert alone(0, 20, 22) == seconds


def test_what_all_prompts_of_a_step_share_is_counted_once() -> None:
    """A step with any prompts takes a second longer; there is time for three of 0.1 s."""
    shared = LinearCostModel(Coefficients(0.0125, 0, 0, 0, 0, 0, 1.0, 0, 0), 1)
    drive = Drive("goodput", cost_model=shared)
    for _ in range(4):
        drive.add(prompt=8, output=1, ttft=1.35)
    assert list(drive.step(0.0).values()) == [8, 8, 8, 4], "the last one is late, and cut"


def test_of_two_that_cost_the_same_the_more_valuable_one_is_in_time() -> None:
    """A token takes an eighth of a second: there is time for one of the two."""
    slow = LinearCostModel(Coefficients(0.125, 0, 0, 0, 0, 0, 0, 0, 0), 1)
    for values in ((1.0, 3.0), (3.0, 1.0)):
        drive = Drive("goodput", cost_model=slow)
        for value in values:
            drive.add(prompt=8, output=1, ttft=1.5, value=value)
        best = values.index(3.0)
        assert drive.step(0.0) == {best: 8}


def test_the_less_valuable_one_is_paused() -> None:
    for values in ((1.0, 3.0), (3.0, 1.0)):
        drive = Drive("goodput", blocks=32)
        for value in values:
            drive.add(prompt=8, output=40, ttft=9.0, tbt=9.0, value=value)
        while not drive.preempted:
            drive.step(float(len(drive.plans)))
        assert drive.preempted == [values.index(1.0)]


def workload(columns: dict[str, Any]) -> Workload:
    count = len(columns["arrival"])
    terms = SloColumns.none(count)
    targets = {n: np.full(count, columns.get(n, np.inf)) for n in ("ttft", "tbt", "jct")}
    lengths = WorkloadLengths(
        np.broadcast_to(columns["prompt"], count), np.broadcast_to(columns["output"], count)
    )
    return Workload.create(
        np.asarray(columns["arrival"], float), lengths, terms=dataclasses.replace(terms, **targets)
    )


def run(policy: str, work: Workload, limits: Limits, **options: Any) -> Any:
    return simulate(policy, work, PLACE, limits=limits, compiled=False, **options)


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(
    "targets",
    [
        {},
        {"ttft": 0.7, "tbt": 0.05},
        # Newcomers have the first, which lose nothing, paused; those due soon lose something.
        {"ttft": np.repeat([np.inf, 0.4], [8, 16]), "jct": np.repeat([60.0, 1.5, 9.0], 8)},
    ],
)
def test_if_all_rows_are_taken_the_short_plan_is_the_long_one(
    tier: Tier, targets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {
        "arrival": np.arange(24) / 40,
        "prompt": np.repeat([8, 300], [8, 16]),
        "output": 60,
        **targets,
    }
    work = dataclasses.replace(workload(columns), tier=np.full(24, tier, np.int8))
    calm, short = Goodput._calm, 0

    def counted(policy: Goodput, view: View, *given: Any) -> BatchPlan | None:
        nonlocal short
        plan = calm(policy, view, *given)
        short += plan is not None and len(view.table.in_state(WAITING)) > 0
        return plan

    monkeypatch.setattr(Goodput, "_calm", counted)
    found = run("goodput", work, Limits(512, 512, 8))
    assert short > 10
    monkeypatch.setattr(Goodput, "_calm", lambda *_: None)
    long = run("goodput", work, Limits(512, 512, 8))
    assert found.requests.token_times.tolist() == long.requests.token_times.tolist()


def test_caches_that_take_long_to_come_back_are_not_paused_for_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long prompts in a pool for four of them, and no host memory."""
    arrival = np.arange(0, 20, 0.4)
    work = workload({"arrival": arrival, "prompt": 3000, "output": 150, "ttft": 3.0, "tbt": 0.2})

    def served() -> tuple[float, float]:
        result = run("goodput", work, Limits(4096, 4096, 64), kv_tokens=13000)
        batches = result.batches
        again = batches.num_recomputed.sum() / batches.num_tokens.sum()
        return float(again), float(result.attained.mean())

    few, met = served()
    monkeypatch.setattr(Memory, "_return_time", lambda _, some: np.zeros(len(some)))
    many, fewer_met = served()
    assert few < 0.1 < many and met > fewer_met, (few, many, met, fewer_met)


def test_who_cannot_attain_its_targets_leaves_time_for_who_can() -> None:
    """A decode takes half a second. It is late all the same, and the prompt is in time without."""
    slow = LinearCostModel(Coefficients(0.01, 0, 0, 0.5, 0, 0, 0, 0, 0), 1)
    drive = Drive("goodput", cost_model=slow)
    lost = drive.add(prompt=4, output=50, ttft=0.5, tbt=0.6)
    drive.step(1.0)
    prompt = drive.add(prompt=4, output=1, arrival=2.0, ttft=0.4)
    assert drive.step(2.0) == {prompt: 4}
    assert drive.step(3.0) == {lost: 1}, "there is time again"


def test_those_who_cannot_attain_their_targets_go_on_together() -> None:
    """A step takes longer than the third of a target that it leaves newcomers."""
    slow = LinearCostModel(Coefficients(0.01, 0.5, 0, 0, 0, 0, 0, 0, 0), 1)
    drive = Drive("goodput", cost_model=slow)
    rows = [drive.add(prompt=4, output=50, ttft=0.2, tbt=9.0) for _ in range(4)]
    for now in range(1, 5):
        drive.step(float(now))
    assert drive.step(5.0) == dict.fromkeys(rows, 1)


@pytest.mark.parametrize("ttft", [0.3, 0.01])
def test_a_backlog_of_late_requests_is_served_as_fast_as_by_others(ttft: float) -> None:
    """Nobody else is there for whom time would be kept: neither by the price of prompts, nor by
    targets too short for any prompt."""
    burst = workload({"arrival": np.zeros(100), "prompt": 400, "output": 60, "ttft": ttft})
    limits = Limits(2048, 2048, 64)
    found = [run(name, burst, limits, kv_tokens=8000) for name in ("goodput", "edf")]
    spans = [result.summary()["makespan_s"] for result in found]
    assert spans[0] < 1.2 * spans[1]


def test_no_prompt_that_cannot_be_cut_holds_up_decodes_behind_it() -> None:
    """Both have missed their targets, and memory is short."""
    drive = Drive("goodput", c=20, p=20, blocks=64, max_model_len=128)
    lost = drive.add(prompt=4, output=50, ttft=0.01, tbt=0.01)
    drive.step(1.0)
    late = drive.add(prompt=70, output=5, arrival=0.5, ttft=0.01)
    while drive.table.computed[late] < 40:
        assert drive.step(1.0 + len(drive.plans))[lost] == 1
    drive.add(prompt=8, output=1, arrival=9.0, ttft=9.0)
    assert lost in drive.step(9.0)


@pytest.mark.parametrize("blocks", [264, 1000])
def test_no_prompt_is_cut_where_memory_is_short(blocks: int) -> None:
    """There is room for 13 more tokens in the step, and both prompts have 20."""
    drive = Drive("goodput", c=20, p=20, rows=9, blocks=blocks, max_model_len=128)
    rows = [drive.add(prompt=56, output=60, ttft=900.0, tbt=900.0) for _ in range(7)]
    for _ in range(25):
        drive.step()
    assert drive.plans[-1] == dict.fromkeys(rows, 1)
    short = drive.pool.num_used > 0.9 * blocks
    whole, cut = (drive.add(prompt=prompt, output=1, ttft=900.0) for prompt in (8, 20))
    step = drive.step()
    assert whole in step and (cut in step) == (not short) == (blocks == 1000)


def test_who_cannot_attain_its_targets_is_paused_before_others_who_lose_nothing() -> None:
    for lost in (0, 1):
        drive = Drive("goodput", blocks=40)
        learned(drive, 150)
        for i in range(2):
            row = drive.add(prompt=8, output=200, ttft=1e-3 if i == lost else 9.0, tbt=9.0)
            drive.step(0.1 * i)
            drive.table.received[row] = drive.table.generated[row] = 1
        for step in range(100):
            if not drive.preempted:
                drive.step(1.0 + 0.1 * step)
        assert drive.preempted == [lost]


@pytest.mark.parametrize("max_tbt", [2.0, 1e4])
def test_nobody_is_paused_for_a_prompt_who_would_not_be_back_in_time(max_tbt: float) -> None:
    """A step takes a tenth of a second, and outputs have 150 tokens: within 2 s little memory comes
    free, and within some hours enough."""
    slow = LinearCostModel(Coefficients(1e-4, 0.1, 0, 0, 0, 0, 0, 0, 0), 1)
    drive = Drive("goodput", blocks=32, host_slots=4096, cost_model=slow)
    learned(drive, 150)
    begun = drive.add(prompt=30, output=400, ttft=9.0, tbt=0.5, max_tbt=max_tbt)
    for i in range(12):
        drive.step(0.1 * i)
    prompt = drive.add(prompt=50, output=10, arrival=1.2, ttft=0.3, tbt=0.5, max_tbt=2.0)
    step = drive.step(1.2)
    assert (prompt in step) == (begun in drive.preempted) == (max_tbt > 2.0)


def test_who_is_paused_for_those_who_have_waited_is_not_planned() -> None:
    """The second finds no memory but that of the first, half of whose prompt is computed. It takes
    memory from a request with targets once it has waited for twice as long."""
    drive = Drive("goodput:patience=5", blocks=32, c=48, p=48)
    begun = drive.add(prompt=56, output=4, arrival=9.0, ttft=100.0)
    assert drive.step(9.0) == {begun: 48}
    old = drive.add(prompt=20, output=4, arrival=0.0, ttft=1.0)
    assert old not in drive.step(10.0) and not drive.preempted
    assert drive.step(12.0) == {old: 20}
    assert drive.preempted == [begun]


def test_who_was_paused_makes_room_in_the_end() -> None:
    drive = Drive("goodput:patience=5", blocks=32)
    for _ in range(2):
        drive.add(prompt=8, output=40)
    while not drive.preempted:
        drive.step(float(len(drive.plans)))
    out, steps = drive.preempted[0], len(drive.plans)
    while out not in drive.step(float(len(drive.plans))):
        assert len(drive.plans) - steps < 12, "the other one, who has all memory, is in no hurry"
    drive.to_the_end()


def test_those_who_have_waited_may_need_more_than_the_pool() -> None:
    """All three keep their caches, each of which is in the end as large as the pool."""
    drive = Drive("goodput:patience=0.5:share=1", blocks=32)
    for _ in range(3):
        drive.add(prompt=4, output=50)
    drive.to_the_end()
    assert len(drive.ended) == 3


def test_decodes_that_are_put_off_are_in_time_all_the_same() -> None:
    """A token takes a tenth of a second. Both prompts are in time only without the decodes, for
    which it would be too late then: the next step has two more."""
    drive = Drive("goodput", cost_model=LinearCostModel(Coefficients(0.1, *(0,) * 8), 1))
    scheduler, now, batches = drive.scheduler, 0.0, []
    rows = np.array([drive.add(prompt=1, output=9, ttft=9.0, tbt=1.25) for _ in range(4)])
    for count in (0, 2, 0, 0):
        for _ in range(count):
            drive.add(prompt=4, output=2, arrival=now, ttft=0.85)
        step = scheduler.schedule(now)
        now += 0.1 * step.plan.total_tokens
        scheduler.release_finished(step)
        scheduler.receive(step.emitting, now)
        batches.append(np.isin(rows, step.plan.rows).all())
    assert batches == [True, False, True, True]
    assert not drive.table.late_gaps[rows].any()


def test_who_has_waited_is_not_put_off() -> None:
    """A decode takes a second, and prompts that cannot wait for so long come without end."""
    slow = LinearCostModel(Coefficients(0.01, 0, 0, 1.0, 0, 0, 0, 0, 0), 1)
    drive = Drive("goodput:patience=5", cost_model=slow)
    row = drive.add(prompt=4, output=50, ttft=100.0)
    drive.step()
    for now in range(1, 8):
        drive.add(prompt=4, output=1, arrival=float(now), ttft=0.5)
        drive.step(float(now))
    assert [now for now, plan in enumerate(drive.plans) if row in plan] == [0, 6, 7]


def test_service_before_a_pause_does_not_count_unless_it_gave_a_token() -> None:
    drive = Drive("goodput:patience=5", blocks=32, c=48, p=48)
    begun = drive.add(prompt=56, output=4, ttft=1.0)
    assert drive.step(3.0) == {begun: 48}
    drive.add(prompt=48, output=9, arrival=4.0, ttft=2.0, tbt=9.0)
    drive.step(4.0)
    assert drive.preempted == [begun]
    assert begun not in drive.step(10.5)
    assert begun in drive.step(11.5), "twice its patience after its target"


def test_who_is_late_leaves_time_for_newcomers_without_targets() -> None:
    """A third of the 0.3 s that these have by default; a token takes 1/64 s."""
    slow = LinearCostModel(Coefficients(1 / 64, 0, 0, 0, 0, 0, 0, 0, 0), 1)
    drive = Drive("goodput:ttft=0.3", cost_model=slow)
    late = drive.add(prompt=40, output=2)
    assert drive.step(1.0) == {late: 6}


def test_best_effort_requests_start_beside_slow_decodes() -> None:
    """A step with any decode takes longer than newcomers would like to wait."""
    slow = LinearCostModel(Coefficients(1e-3, 0, 0, 0.1, 0, 0, 0, 0, 0), 1)
    drive = Drive("goodput", cost_model=slow)
    row = drive.add(prompt=4, output=50, ttft=0.2, tbt=3.0)
    drive.step(0.0)
    free = drive.add(prompt=4, output=8, arrival=0.5, tier=Tier.BEST_EFFORT)
    assert drive.step(1.0) == {row: 1, free: 4}


def test_there_is_time_for_who_has_waited_twice_as_long() -> None:
    """To go on with the long prompt takes longer than the decode may wait. It could not have its
    first token before 8.5 s."""
    reads = LinearCostModel(Coefficients(1e-3, 0.1, 0, 0, 0, 0, 0, 0, 0.1), 1)
    drive = Drive("goodput:patience=5", cost_model=reads, c=8, p=8)
    long = drive.add(prompt=40, output=2, ttft=1.0)
    while drive.table.computed[long] < 32:
        drive.step(float(len(drive.plans)))
    begin = len(drive.plans)
    other = drive.add(prompt=1, output=60, arrival=float(begin), ttft=0.2, tbt=1.5)
    for _ in range(20):
        assert other in drive.step(float(len(drive.plans)))
    served = [i for i in range(begin, len(drive.plans)) if long in drive.plans[i]]
    assert served and served[0] == 19


def test_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without targets who can be in time are seen behind many who cannot, and so is who was
    paused, and is about to exceed its longest gap."""
    monkeypatch.setattr(goodput, "LOOK", 2)
    drive = Drive("goodput", c=4, p=4)
    rows = [drive.add(prompt=4, output=1, arrival=0.0 if i < 6 else 9.5) for i in range(8)]
    assert drive.step(10.0) == {rows[6]: 4}
    drive = Drive("goodput", c=24, p=24)
    learned(drive, 150)
    for _ in range(3):
        drive.add(prompt=4, output=1, arrival=0.0, ttft=1.0)
    out = written(drive, 20, ttft=1.0, tbt=0.5)
    for _ in range(3):
        drive.add(prompt=4, output=1, arrival=14.4, ttft=5.0)
    assert out in drive.step(14.5)


@pytest.mark.parametrize(
    ("above", "rho", "pays"),
    [(0.5, 0.0, True), (1.0, 0.0, False), (0.5, 1e-3 / 128, True), (0.5, 1.2e-3 / 128, False)],
)
def test_hidden_caches_are_for_where_they_pay(above: float, rho: float, pays: bool) -> None:
    """A step takes 1.1 ms with a token, and the pool holds 128 hidden vectors."""
    drive = Drive("goodput", hidden_above=above, blocks=32, rho=rho)
    for _ in range(4):
        drive.add(prompt=4, output=60)
        drive.step(float(len(drive.plans)))
    drive.to_the_end()
    assert bool(drive.hidden) == pays


def test_caches_of_the_paused_go_to_the_host_and_come_back() -> None:
    """Two fit, three are there; with no host memory they are computed again."""
    for slots in (0, 4096):
        drive = Drive("goodput", blocks=40, host_slots=slots, max_model_len=64)
        kinds: set[type] = set()
        for _ in range(3):
            drive.add(prompt=10, output=50)
        plan = drive.scheduler.plan

        def noted(*given: Any, plan: Any = plan, kinds: set[type] = kinds) -> Any:
            found = plan(*given)
            kinds |= {type(operation) for operation in found.operations}
            return found

        drive.scheduler.plan = noted  # type: ignore[method-assign]
        drive.to_the_end()
        assert sorted(drive.ended) == [0, 1, 2]
        assert Preempt in kinds
        assert ({Checkpoint, Restore} <= kinds) == bool(slots)


TIGHT = st.sampled_from([1e-4, 0.05, 1.0, np.inf])


def drawn(data: st.DataObject, targets: st.SearchStrategy[Any]) -> Workload:
    count = data.draw(st.integers(1, 12))
    many = st.lists(st.integers(1, 3000), min_size=count, max_size=count)
    times = st.lists(st.floats(0, 20), min_size=count, max_size=count)
    each = st.one_of(targets, st.lists(targets, min_size=count, max_size=count))
    return workload(
        {
            "arrival": np.sort(data.draw(times)),
            "prompt": data.draw(many),
            "output": np.minimum(data.draw(many), 40),
            **{name: data.draw(each) for name in ("ttft", "tbt", "jct")},
        }
    )


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_where_there_is_nothing_to_decide_the_plan_is_what_it_would_be(data: st.DataObject) -> None:
    """The short way to it and the long one, with targets of which some are missed."""
    work = drawn(data, st.sampled_from([0.02, 0.04, 0.1, 1.0, np.inf]))
    calm, give_up = Goodput._calm, RequestTable.give_up
    found = []
    for way in (calm, lambda *_: None):
        told: list[list[int]] = []

        def tell(self: RequestTable, rows: np.ndarray, to: int, told: Any = told) -> Any:
            new = give_up(self, rows, to)
            told.append(sorted(self.seq[new].tolist()))
            return new

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Goodput, "_calm", way)
            patch.setattr(RequestTable, "give_up", tell)
            served = run("goodput", work, Limits(4096, 512, 8), num_blocks=1500).requests
        found.append((served.times.token_times.tolist(), served.preemptions.tolist(), told))
    assert found[0] == found[1]


def test_where_there_is_nothing_to_decide_nothing_is_weighed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Drive("goodput")
    rows = [drive.add(prompt=4, output=20, tbt=1.0) for _ in range(3)]
    drive.step(0.0)
    monkeypatch.setattr(goodput, "GoodputFilling", None)
    assert isinstance(drive.policy, Goodput)
    pace = drive.policy._pace.seconds
    assert drive.step(0.1) == dict.fromkeys(rows, 1)
    assert drive.policy._pace.seconds != pace, "jobs follow the pace of steps"


def test_who_cannot_attain_its_targets_leaves_time_for_decodes() -> None:
    """A decode takes half a second. Nobody waits."""
    slow = LinearCostModel(Coefficients(0, 0, 0, 0, 0.5, 0, 0, 0, 0), 1)
    drive = Drive("goodput", cost_model=slow)
    lost = drive.add(prompt=4, output=50, ttft=0.5)
    drive.step(1.0)
    able = drive.add(prompt=4, output=50, arrival=2.0, ttft=3.0, tbt=0.8)
    drive.step(2.0)
    assert drive.step(2.1) == {able: 1}
    assert drive.step(2.2) == {able: 1}, "nor is it taken for one that is not told yet"
    assert drive.scheduler.table.outlook[lost] == GivenUp.MISSED


@pytest.mark.parametrize(("overrun", "tokens"), [(1.0, 1999), (2.0, 999)])
def test_a_step_leaves_decodes_as_much_time_as_it_may_take(overrun: float, tokens: int) -> None:
    """A token takes a millisecond, and one is due in two seconds."""
    each = LinearCostModel(Coefficients(0.001, 0, 0, 0, 0, 0, 0, 0, 0), 1)
    limits = {"c": 4096, "p": 4096, "max_model_len": 4096, "blocks": 2048}
    drive = Drive("goodput", cost_model=each, **limits)
    first = drive.add(prompt=4, output=50, tbt=2.0)
    drive.step(0.0)
    long = drive.add(prompt=4000, output=1, ttft=100.0)
    assert drive.step(0.0, overrun) == {first: 1, long: tokens}


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_everybody_ends_whatever_comes(data: st.DataObject) -> None:
    work = drawn(data, TIGHT)
    blocks = data.draw(st.sampled_from([500, 4000]))
    host = data.draw(st.sampled_from([0, 2000, 100_000]))
    # Models without hidden caches, with such that pay, and with such that do not.
    rho = data.draw(st.sampled_from([None, 1e-8, 1e-3]))
    memory: dict[str, Any] = {"num_blocks": blocks, "host_tokens": host, "rho": rho}
    found = run("goodput:hidden_above=0.1", work, Limits(4096, 512, 8), checked=True, **memory)
    assert found.requests.finished.all()


def test_the_more_of_a_tenant_have_been_in_time_the_less_the_next_is_worth() -> None:
    tenants, both, even = Tenants(10.0), np.array([0, 3]), np.ones(2)
    assert tenants.worth(both, even).tolist() == [1.0, 1.0]
    tenants.note(np.array([3, 3, 3]), 5.0)
    assert tenants.worth(both, even).tolist() == [1.0, 0.25]
    assert tenants.worth(both, np.array([1.0, 2.0])).tolist() == [1.0, 0.5]
    assert tenants.worth(np.array([3]), even[:1]).tolist() == [1.0], "there is nobody else"
    tenants.note(np.array([0]), 15.0)
    assert tenants.worth(both, even).tolist() == pytest.approx([1.0, 2 / (1 + 3 / np.e)])


def test_no_tenant_crowds_out_another_with_cheap_requests() -> None:
    """Each second there is time for either four short prompts or one long one. With one tenant it
    would be the short ones, always."""
    slow = LinearCostModel(Coefficients(1 / 32, 0, 0, 0, 0, 0, 0, 0, 0), 1)
    longs = []
    for few in ("few", "many"):
        drive = Drive("goodput:patience=1000", cost_model=slow)
        served = 0
        for now in range(12):
            for _ in range(4):
                drive.add(prompt=8, output=1, arrival=float(now), ttft=1.1, tenant="many")
            drive.add(prompt=32, output=1, arrival=float(now), ttft=1.1, tenant=few)
            served += 32 in drive.step(float(now)).values()
        longs.append(served)
    assert longs[0] >= 6 and longs[1] == 0, longs


def test_a_tenant_of_more_weight_has_more_in_time() -> None:
    """There is time for one of two."""
    slow = LinearCostModel(Coefficients(1 / 32, 0, 0, 0, 0, 0, 0, 0, 0), 1)
    drive, served = Drive("goodput:patience=1000", cost_model=slow), {"light": 0, "heavy": 0}
    whose: dict[int, str] = {}
    for now in range(16):
        for tenant, weight in (("light", 1.0), ("heavy", 3.0)):
            when = {"arrival": float(now), "ttft": 1.1}
            row = drive.add(prompt=32, output=1, tenant=tenant, weight=weight, **when)
            whose[row] = tenant
        for row in drive.step(float(now)):
            served[whose[row]] += 1
    assert served["heavy"] >= 2 * served["light"] > 0, served


def given_up(drive: Drive, now: float) -> tuple[list[int], list[int]]:
    plan = drive.scheduler.plan(now)
    drive.step(now)
    return plan.missed.tolist(), plan.relegated.tolist()


def test_who_is_late_and_waits_is_relegated_once() -> None:
    """One is in time, and two have no targets that could be missed."""
    drive = Drive("goodput", rows=1)
    rows = [drive.add(prompt=4, output=3, ttft=ttft) for ttft in (1.0, 1.5)]
    for tier in Tier:
        drive.add(prompt=4, output=3, tier=tier)
    assert given_up(drive, 0.0) == ([], [])
    assert given_up(drive, 3.0) == ([], [rows[1]])
    assert given_up(drive, 3.0) == ([], [])
    assert drive.table.outlook[rows].tolist() == [GivenUp.OPEN, GivenUp.RELEGATED]


def test_who_is_late_in_the_batch_has_missed_its_targets() -> None:
    drive = Drive("goodput", max_model_len=128)
    prompt = drive.add(prompt=64 + 16, output=2, ttft=1.0)
    drive.step(0.0)
    learned(drive, 150)
    rows = [written(drive, 20, ttft=1.0, tbt=0.5) for _ in range(2)]
    drive.table.max_tokens[rows] = 101, 102
    drive.table.late_gaps[rows] = 1
    coming = drive.add(prompt=4, output=2, arrival=9.0, ttft=1.0)
    drive.table.generated[coming] = 1
    lost, others = given_up(drive, 10.1)
    assert sorted(lost) == sorted([prompt, rows[0]]) and not others, "one may get long enough"


def test_all_of_a_long_queue_that_are_late_are_relegated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "LOOK", 1)
    drive = Drive("goodput", rows=1, c=4, p=4)
    rows = [drive.add(prompt=4, output=1, ttft=1.0) for _ in range(8)]
    assert given_up(drive, 2.0) == ([rows[0]], rows[1:])


def test_nobody_who_comes_in_an_overload_waits_for_the_relegated() -> None:
    slow = LinearCostModel(Coefficients(0.0625, 0, 0, 0, 0, 0, 0, 0, 0), 1)
    drive = Drive("goodput", rows=2, c=16, p=16, cost_model=slow)
    for _ in range(20):
        drive.add(prompt=16, output=4, ttft=3.0)
    new = Request("new", (1,) * 16, SamplingParams(max_tokens=4), SLO(ttft=3.0))
    limits = drive.scheduler.view.limits
    known = constant_fields(slow, drive.policy, limits, drive.pool.num_blocks, 4)

    def seen(now: float) -> tuple[float, int]:
        backlog = Backlog.from_scheduler(drive.scheduler, now, now)
        snapshot = take_snapshot(backlog, 20, known, Lately(), draining=False)
        return TtftEstimator(backlog).wait(new, now).seconds, snapshot.realtime_tokens

    wait, tokens = seen(0.0)
    assert wait > 3.0 and tokens == 20 * 16
    for now in range(5):
        drive.step(float(now))
    wait, tokens = seen(4.0)
    assert wait < 3.0 and tokens == 0


def test_the_paused_count_on_less_memory_the_fewer_of_them_are_back_in_time() -> None:
    drive, returns = Drive("goodput"), Returns()
    view, row = drive.scheduler.view, written(drive, 20, ttft=9.0, tbt=0.5)

    def paused(back: bool) -> float:
        drive.table.state[row] = WAITING
        returns.note(view, np.array([row]), np.array([5.0]))
        returns.read(view, 5.0)
        drive.table.state[row] = RUNNING if back else WAITING
        returns.read(view, 5.1)
        returns.read(view, 9.0)  # each counts once
        return returns.share

    assert paused(back=True) == 1.0
    assert paused(back=False) == pytest.approx(0.8)
    assert paused(back=True) == pytest.approx(0.85)
    assert min(paused(back=False) for _ in range(20)) == pytest.approx(0.1)
    drive.table.state[row] = WAITING
    returns.note(view, np.array([row]), np.array([5.0]))
    drive.table.seq[row] += 1  # it has ended, and another has its row
    returns.read(view, 9.0)
    assert returns.share == pytest.approx(0.1)


@pytest.mark.parametrize("near", [False, True])
def test_no_prompt_starts_in_the_memory_that_a_paused_request_waits_for(near: bool) -> None:
    """Its longest gap ends 4 s after its last token, at 10 s. The other one must not be paused."""
    drive = Drive("goodput", blocks=24)
    learned(drive, 150)
    drive.add(prompt=20, output=40, arrival=9.0, ttft=9.0, tbt=9.0, max_tbt=9.0)
    drive.step(9.0)
    out = written(drive, 40, ttft=9.0, tbt=0.5, max_tbt=4.0)
    now = 12.5 if near else 11.5
    chat = drive.add(prompt=4, output=4, arrival=now, ttft=2.0)
    step = drive.step(now)
    assert out not in step and (chat in step) == (not near)
