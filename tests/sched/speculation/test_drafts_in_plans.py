"""Whatever the policy and the workload: drafts stay within what is offered and allowed, nothing
leaks, and who drafts nothing is planned as ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import scheduler as module
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.fairness.fair_share import DECODE_COST
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View
from jaxserve.sched.registry import deployable
from jaxserve.sched.speculation import choice
from jaxserve.sched.speculation.choice import DraftPrices
from jaxserve.sched.state.request_table import RUNNING
from tests.sched.driver import Drive
from tests.sched.policies.test_policy_properties import (
    BLOCK_SIZE,
    Case,
    cases,
    quick,
    serve,
)

POLICIES = [*deployable(), "sarathi+ef"]
chances = st.sampled_from([(1.0, 1.0), (1.0, 0.7), (0.6, 0.8), (1.0, 0.0)])


@pytest.mark.parametrize("policy", POLICIES)
@quick
@given(case=cases, chances=chances)
def test_everything_is_served_within_the_limits(
    policy: str, case: Case, chances: tuple[float, float]
) -> None:
    drive = serve(f"{policy}+spec", case, guessable=chances)
    assert len(drive.ended) == len(case.jobs)
    assert not drive.accepted if chances[1] == 0 else drive.accepted <= drive.drafted
    if chances == (1.0, 1.0):
        assert drive.accepted == drive.drafted


@pytest.mark.parametrize("policy", ["sarathi", "goodput", "aptserve"])
def test_the_cases_draft(policy: str) -> None:
    drive = Drive(f"{policy}+spec", guessable=(0.9, 0.8))
    for _ in range(3):
        drive.add(4, 40, ttft=100.0, tbt=100.0)
    drive.to_the_end()
    assert 0 < drive.accepted < drive.drafted
    assert len(drive.plans) < 41 * 0.8


@pytest.mark.parametrize("policy", ["sarathi", "vllm", "goodput", "aptserve", "accelgen", "bros"])
@quick
@given(case=cases)
def test_the_policys_plan_stays_as_it_is(policy: str, case: Case) -> None:
    drafted = False

    def watched(
        plan: BatchPlan, view: View, now: float, prices: DraftPrices, *, trial: bool
    ) -> BatchPlan:
        nonlocal drafted
        found = choice.with_drafts(plan, view, now, prices, trial=trial)
        if found.drafts is None:
            assert found is plan
            return found
        drafted = True
        assert found.drafts.any()
        assert (found.num_tokens - found.drafts).tolist() == plan.num_tokens.tolist()
        assert (found.reserve >= plan.reserve).all() and found.rows is plan.rows
        nobody = np.flatnonzero(found.drafts == 0)
        assert found.reserve[nobody].tolist() == plan.reserve[nobody].tolist()
        for name in ("kinds", "operations", "directions", "missed", "relegated"):
            assert getattr(found, name) is getattr(plan, name), name
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "with_drafts", watched)
        serve(f"{policy}+spec", case, guessable=(1.0, 0.9))
    # Where nothing is offered, all steps are those of the policy alone.
    plain, offered_nothing = (
        serve(policy, case),
        serve(f"{policy}+spec", case, guessable=(0.0, 0.0)),
    )
    assert plain.plans == offered_nothing.plans


def settled(policy: str = "sarathi+spec", **options: Any) -> Drive:
    """Two requests of different tenants that decode, of which the first can be guessed."""
    drive = Drive(policy, guessable=(1.0, 1.0), **options)
    for tenant in ("drafts", "does not"):
        drive.add(4, 40, tenant=tenant)
    drive.step()
    drive.scheduler.offer(1, 0, 0.0)
    return drive


def test_tenants_are_charged_for_drafts_right_or_wrong() -> None:
    for right in (0, 2):
        drive = settled()
        drive._texts[0][1][:] = right
        before = {name: one.counter for name, one in drive.scheduler.shares.shares().items()}
        planned = drive.step()
        drafts = planned[0] - 1
        assert drafts > 2 and planned[1] == 1
        spent = {
            name: one.counter - before[name]
            for name, one in drive.scheduler.shares.shares().items()
        }
        assert spent["does not"] == DECODE_COST
        # Each computed token counts as one of a prompt, and more for those that are written.
        assert spent["drafts"] == 1 + drafts + (DECODE_COST - 1) * (1 + right)


def test_blocks_that_accepted_drafts_fill_are_found() -> None:
    drive = Drive("sarathi+spec", prefix_caching=True, guessable=(1.0, 1.0))
    keys = tuple(b"key %d" % i for i in range(6))
    row = drive.add(2 * BLOCK_SIZE, 3 * BLOCK_SIZE, keys=keys[:2])
    drive.step()
    drive.step()
    assert drive.accepted >= 2 * BLOCK_SIZE - 2
    computed = int(drive.table.computed[row])
    assert computed // BLOCK_SIZE >= 3
    drive.scheduler.know(row, keys[2 : computed // BLOCK_SIZE])
    other = drive.add(5 * BLOCK_SIZE, 1, keys=keys[:5])
    drive.step()
    assert drive.table.cached_at_start[other] == computed // BLOCK_SIZE * BLOCK_SIZE


@settings(deadline=None, max_examples=100)
@given(
    offered=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    acceptance=st.floats(0.0, 1.0),
    slack=st.lists(
        st.sampled_from([0.0, 1.0e-3, 1.5e-3, 2e-3, 4e-3, np.inf]), min_size=8, max_size=8
    ),
    overrun=st.sampled_from([1.0, 1.3]),
)
def test_nobody_in_time_is_made_late(
    offered: list[int], acceptance: float, slack: list[float], overrun: float
) -> None:
    """slack: until each row's next token is due, seconds."""
    drive = Drive("sarathi+spec", rows=64, c=64)
    table = drive.table
    for _ in offered:
        drive.add(4, 12, tbt=1.0)
    drive.step()
    rows = table.in_state(RUNNING)
    table.tbt[rows] = slack[: len(rows)]
    for row, tokens in zip(rows.tolist(), offered, strict=True):
        drive.scheduler.offer(row, tokens, acceptance)
    plan = drive.scheduler.plan(0.0, overrun=overrun)
    plain = float(drive.scheduler.view.cost_model.batch_time(_decodes(len(rows), 0)))
    drafts = 0 if plan.drafts is None else int(plan.drafts.sum())
    takes = float(drive.scheduler.view.cost_model.batch_time(_decodes(len(rows), drafts)))
    due = table.tbt[rows]
    in_time = due >= plain * overrun
    assert (takes * overrun <= due[in_time] + 1e-12).all()
    late = ~in_time & (table.offered[rows] > 0)
    if plan.drafts is not None and late.any():  # those come first
        ahead = rows[in_time & np.isfinite(due)]
        assert not plan.drafts[np.isin(plan.rows, ahead)].any()


def test_who_has_a_token_in_flight_is_not_late_for_it() -> None:
    """The next one is due a target after that, and no draft makes its step too long for it."""
    drive = Drive("sarathi+spec", rows=64, c=64)
    for _ in range(2):
        drive.add(4, 12, tbt=1.0)
    drive.step()
    step = drive.scheduler.schedule(0.0)
    flying, here = step.rows.tolist()
    drive.scheduler.receive(np.array([here]), 1e-3)
    drive.scheduler.offer(here, 8, 1.0)
    plain = float(drive.scheduler.view.cost_model.batch_time(_decodes(2, 0)))
    drive.table.tbt[[flying, here]] = plain + 1e-5, np.inf
    assert drive.scheduler.plan(1e-3, free_at=plain).drafts is None
    drive.table.tbt[flying] = 1.0
    assert drive.scheduler.plan(1e-3, free_at=plain).drafts is not None


def _decodes(rows: int, drafts: int) -> BatchFeatures:
    return BatchFeatures(rows + drafts, rows + drafts, 0, rows, 0, 0, 0)


def test_a_request_is_never_drafted_past_its_limit() -> None:
    drive = Drive("sarathi+spec", guessable=(1.0, 1.0))
    row = drive.add(4, 4)
    drive.step()
    assert drive.step() == {row: 3}  # the newest, and all but the last that may still come
    assert drive.ended == [row]
