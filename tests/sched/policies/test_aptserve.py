"""Apt-Serve's policies: types of steps, caches, the fallback for late requests, preemptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import Coefficients, CostModel, LinearCostModel
from jaxserve.sched.policies.apt.value import ENOUGH, STEPS_AHEAD, in_flight, steps_ahead, weigh
from jaxserve.sched.registry import make_policy
from jaxserve.sched.state.request_table import State
from tests.sched.driver import Drive
from tests.sched.policies.test_policy_properties import Case, cases, quick, serve

HYBRID = ["aptserve", "aptserve_s", "aptserve_fcfs"]
ALL = [*HYBRID, "aptserve_kv"]
RHO = 1e-4


def cost(projected: float = 0.0, prefill: float = 0.0) -> CostModel:
    """A step takes 10 ms, and more for projections and for prefills."""
    terms = dict.fromkeys(Coefficients.__dataclass_fields__, 0.0)
    terms |= {"token_bias": 0.01, "projected_token": projected, "per_prefill": prefill}
    return LinearCostModel(Coefficients(**terms), 1)


def test_who_plans_hidden_caches() -> None:
    assert [make_policy(name).hybrid_cache for name in ALL] == [True, True, True, False]
    assert not make_policy("vllm").hybrid_cache


# Types of steps.


def test_the_queue_that_has_waited_longer_in_all_runs() -> None:
    drive = Drive("aptserve")
    a, b = drive.add(10, 9), drive.add(10, 9)
    assert drive.step(0.0) == {a: 10, b: 10}
    c = drive.add(4, 9, arrival=0.5)
    assert drive.step(1.0) == {a: 1, b: 1}  # 2 s against 0.5 s
    assert drive.step(2.0) == {a: 1, b: 1}  # 2 s against 1.5 s
    assert drive.step(2.5) == {c: 4}  # 1 s against 2 s
    assert drive.step(2.5) == {a: 1, b: 1, c: 1}


def test_prefills_wait_for_memory() -> None:
    drive = Drive("aptserve", blocks=16)
    a = drive.add(20, 9)
    assert drive.step(0.0) == {a: 20}
    drive.add(20, 9, arrival=0.0)
    for now in (1.0, 50.0):
        assert drive.step(now) == {a: 1}
    assert not drive.preempted


def test_a_step_of_prefills_on_the_device_counts_as_waited() -> None:
    """With overlap the tokens of a step are not there yet when the next is planned."""
    drive = Drive("aptserve", cost_model=cost(prefill=2.0))
    scheduler = drive.scheduler

    def running() -> float:
        return in_flight(scheduler.view, scheduler.table.in_state(State.RUNNING))

    a = drive.add(8, 9)
    scheduler.schedule(0.0)
    assert running() == 0.0  # nobody else waits for it
    scheduler.receive(np.array([a]), 1.0)
    b = drive.add(8, 9, arrival=0.5)
    assert scheduler.schedule(1.0).rows.tolist() == [b]
    assert running() == pytest.approx(2.01)
    drive.add(8, 9, arrival=1.0)
    # 2.01 s of a against 2.01 s and more of the one that waits, but a has had nothing by then.
    assert scheduler.schedule(1.0).rows.tolist() != [b]


def test_who_has_a_token_on_its_way_waits_for_nothing() -> None:
    drive = Drive("aptserve")
    scheduler, rows = drive.scheduler, np.array([drive.add(8, 9)])

    def pending() -> float:
        weighed = weigh(scheduler.view, rows, clock=5.0, step=0.01, delay=None, decay=0.0)
        return float(weighed.pending[0])

    assert pending() == 5.0
    scheduler.schedule(0.0)
    assert pending() == 0.0
    scheduler.receive(rows, 1.0)
    assert pending() == 4.0


# Cache kinds.


def test_hidden_caches_let_more_start_and_become_kv_in_place() -> None:
    """Four prompts of eight blocks with K and V, and sixteen blocks."""
    drive = Drive("aptserve", blocks=17, rho=RHO, headroom=0.0)
    rows = [drive.add(13, 3) for _ in range(2)] + [drive.add(13, 9) for _ in range(2)]
    assert set(drive.step(1.0)) == set(rows)
    assert drive.hidden == set(rows)
    drive.to_the_end()
    assert set(drive.projected) == set(rows[2:])
    assert not drive.preempted


def test_no_hidden_cache_where_there_is_room_and_rho_is_positive() -> None:
    for policy in HYBRID:
        drive = Drive(policy, rho=RHO)
        for _ in range(6):
            drive.add(20, 9)
        drive.to_the_end()
        assert not drive.hidden and not drive.preempted, policy


def test_everybody_keeps_a_hidden_cache_that_is_no_slower() -> None:
    for policy in HYBRID:
        for rho in (0.0, -RHO):
            drive = Drive(policy, rho=rho)
            rows = {drive.add(20, 9) for _ in range(6)}
            drive.to_the_end()
            assert drive.hidden == rows and not drive.projected and not drive.preempted


def test_a_projection_has_to_pay() -> None:
    """Eight steps ahead of the last, when the others have ended, at RHO a token and step."""
    for projected, becomes in ((7.9 * RHO, True), (8.1 * RHO, False)):
        drive = Drive("aptserve", blocks=17, rho=RHO, headroom=0.0, cost_model=cost(projected))
        for output in (3, 3, 9, 16):
            drive.add(13, output)
        drive.to_the_end()
        assert drive.hidden and bool(drive.projected) == becomes


def test_nobody_becomes_kv_in_memory_that_others_wait_for() -> None:
    """Six hidden caches fill the pool; four end, and the rest may have what nobody waits for."""
    for waits in (False, True):
        drive = Drive("aptserve", c=99, p=99, blocks=24, rho=RHO, headroom=0.0)
        for output in (2, 2, 2, 2, 9, 9):
            drive.add(13, output)
        drive.step(1.0)
        drive.step(2.0)
        assert len(drive.hidden) == 6 and len(drive.ended) == 4
        if waits:
            drive.add(20, 2, arrival=2.9)
        assert len(drive.step(3.0)) == 2
        assert len(drive.projected) == (0 if waits else 2)
        drive.to_the_end()


@pytest.mark.parametrize("policy", ALL)
@settings(quick, max_examples=15)
@given(case=cases)
def test_nobody_is_recomputed_where_memory_is_ample(policy: str, case: Case) -> None:
    ample = Case(case.jobs, len(case.jobs), 400, case.budget, case.prefill)
    drive = serve(policy, ample, RHO)
    assert not drive.preempted


@pytest.mark.parametrize("policy", HYBRID)
@settings(quick, max_examples=6)
@given(case=cases)
def test_where_there_are_no_hidden_caches_all_plan_kv_only(policy: str, case: Case) -> None:
    kv_only = serve(f"{policy}:hybrid_cache=false", case, None)
    assert serve(policy, case, None).plans == kv_only.plans


# Who is preempted.


def test_the_late_one_is_preempted_and_no_more_than_needed() -> None:
    """Three requests fill 12 blocks and all want another two: one has missed its target."""
    drive = Drive("aptserve", blocks=12, watermark=0.0)
    a = drive.add(7, 9)
    late = drive.add(7, 9, tbt=0.5)
    c = drive.add(7, 9)
    assert set(drive.step(0.0)) == {a, late, c}
    assert drive.step(1.0) == {a: 1, late: 1, c: 1}
    assert drive.step(2.0) == {a: 1, c: 1}
    assert drive.preempted == [late]
    drive.to_the_end()


def test_of_those_who_cannot_go_on_no_more_are_preempted_than_must_be() -> None:
    """Four fill 16 blocks and each wants two more: two go on, one makes room, one pauses."""
    drive = Drive("aptserve", blocks=16, watermark=0.0)
    rows = {drive.add(7, 9) for _ in range(4)}
    assert set(drive.step(0.0)) == set(drive.step(1.0)) == rows
    assert len(drive.step(2.0)) == 2
    assert len(drive.preempted) == 1
    drive.to_the_end()


def test_who_needs_no_growth_goes_on_and_who_finds_none_pauses() -> None:
    """More requests than the batch has tokens: the others pause and keep their caches."""
    drive = Drive("aptserve_s", c=4, p=4, rows=6, max_model_len=16)
    for _ in range(6):
        drive.add(3, 9)
    drive.to_the_end()
    assert not drive.preempted
    assert max(map(len, drive.plans)) == 4


# The fallback.


def test_who_is_late_starts_after_those_in_time() -> None:
    """StartBudget for one prompt of the two; first come, first served otherwise."""
    for policy, slo, first in (("aptserve", 1.0, 1), ("aptserve", 99.0, 0), ("vllm", 1.0, 0)):
        drive = Drive(policy, blocks=16)
        rows = [drive.add(20, 3, ttft=slo), drive.add(20, 3, arrival=9.5, ttft=slo)]
        assert list(drive.step(10.0)) == [rows[first]], policy
        drive.to_the_end()


def test_a_decay_leaves_it_a_share_of_its_value() -> None:
    for decay, first in ((0.0, 1), (0.01, 1), (0.4, 0)):
        drive = Drive("aptserve", blocks=16, slo_decay=decay)
        rows = [drive.add(20, 3, ttft=1.0), drive.add(20, 3, arrival=9.5, ttft=1.0)]
        assert list(drive.step(10.0)) == [rows[first]], decay  # 10 s and 0.5 s


def test_who_is_late_leaves_headroom_while_others_run() -> None:
    for headroom, starts in ((0.1, True), (0.6, False)):
        drive = Drive("aptserve", blocks=32, headroom=headroom)
        drive.add(20, 9)
        drive.step(0.0)
        late = drive.add(20, 3, ttft=1.0)
        assert (late in drive.step(5.0)) == starts
        drive.to_the_end()


# The others.


def test_on_chunks_decodes_come_first_and_prompts_fill_what_p_leaves() -> None:
    drive = Drive("aptserve_s", c=16, p=12)
    a = drive.add(8, 9)
    assert drive.step(0.0) == {a: 8}
    b, c = drive.add(20, 9, arrival=0.0), drive.add(9, 9, arrival=0.9)
    assert drive.step(1.0) == {a: 1, b: 11}
    assert drive.step(2.0) == {a: 1, b: 9, c: 2}
    assert drive.step(3.0) == {a: 1, b: 1, c: 7}
    assert drive.step(4.0) == {a: 1, b: 1, c: 1}


def test_values_decide_who_starts_and_not_the_order_of_arrival() -> None:
    """A second and 16 blocks against half a second and 4, and the batch takes one of them."""
    for policy, expected in (("aptserve", 1), ("aptserve_fcfs", 0)):
        drive = Drive(policy, blocks=32, c=32, p=32)
        rows = [drive.add(30, 2, arrival=0.0), drive.add(8, 2, arrival=0.5)]
        assert list(drive.step(1.0)) == [rows[expected]]


@settings(quick, max_examples=30)
@given(case=cases)
def test_fcfs_starts_in_order_of_arrival(case: Case) -> None:
    starts = serve("aptserve_fcfs", case, RHO).order_of_first_start()
    assert starts == sorted(starts)


def test_kinds_are_those_of_the_table() -> None:
    """What was planned hidden is hidden in the pool."""
    drive = Drive("aptserve", rho=-RHO)
    row = drive.add(20, 3)
    drive.step(0.0)
    assert drive.pool.kind[row] == CacheKind.HIDDEN
    assert drive.pool.num_free == drive.pool.num_blocks - 5


# What a hidden cache is charged (section 4.2), and kinds of cache decided on anew.

DEAR = 1e-3  # seconds a token of a hidden cache


def knows(drive: Drive, *lengths: int) -> None:
    """ENOUGH outputs of each of these lengths have ended."""
    for length in lengths * ENOUGH:
        drive.table.output_lengths.add(length)


def test_steps_ahead_are_those_of_outputs_that_got_as_far() -> None:
    drive = Drive("aptserve", c=1000, p=1000, max_model_len=4000)
    rows = np.array([drive.add(4, 2000), drive.add(4, 40), drive.add(4, 2000), drive.add(4, 2000)])
    drive.table.generated[rows] = [0, 0, 30, 900]
    view = drive.scheduler.view
    assert steps_ahead(view, rows).tolist() == [STEPS_AHEAD, 40, STEPS_AHEAD, STEPS_AHEAD]
    knows(drive, 10, 100)
    found = steps_ahead(view, rows)
    assert found == pytest.approx([55, 40, 70, STEPS_AHEAD], rel=0.01), "nobody got to 900"


def test_charged_for_every_token_that_it_will_have_read() -> None:
    """The mean of 8, 9 and 10 tokens for three steps, where one step reads 8."""
    drive = Drive("aptserve")
    rows = np.array([drive.add(8, 3)])
    options: dict[str, Any] = {"clock": 1.0, "step": 0.01, "delay": DEAR, "decay": 0.0}
    once, often = (
        weigh(drive.scheduler.view, rows, lasting=lasting, **options).penalty
        for lasting in (False, True)
    )
    assert once is not None and often is not None
    assert once == pytest.approx([8 * DEAR]) and often == pytest.approx([3 * (8 + 1.5) * DEAR])


@pytest.mark.parametrize(
    ("penalty", "projects", "hidden"),
    [
        *[("auto", False, True), ("auto", True, False)],
        *[("step", True, True), ("remaining", False, False)],
    ],
)
def test_who_projects_is_charged_for_all_steps(penalty: str, projects: bool, hidden: bool) -> None:
    """Two prompts, and K and V of one: 2 x 13 tokens x DEAR against a second, or 50 times that."""
    drive = Drive("aptserve", blocks=10, rho=DEAR, projects=projects, penalty=penalty)
    for _ in range(2):
        drive.add(13, 50)
    drive.step(1.0)
    assert bool(drive.hidden) == hidden


def test_anew_means_that_who_changes_its_kind_computes_its_cache_again() -> None:
    """Two hidden caches have the pool to themselves when the others have ended."""
    drives = {
        name: Drive("aptserve", blocks=17, rho=1e-4, headroom=0.0, penalty=name)
        for name in ("step", "redecide")
    }
    for drive in drives.values():
        rows = [drive.add(13, 3) for _ in range(2)] + [drive.add(13, 9) for _ in range(2)]
        assert set(drive.step(1.0)) == drive.hidden == set(rows)
        drive.to_the_end()
    assert set(drives["step"].projected) == set(rows[2:]) and not drives["step"].preempted
    assert set(drives["redecide"].preempted) >= set(rows[2:])
    assert not drives["redecide"].projected


def test_nobody_coasts_whose_kind_may_change() -> None:
    assert make_policy("aptserve").steady and make_policy("aptserve:penalty=step").steady
    assert not make_policy("aptserve:penalty=redecide").steady
