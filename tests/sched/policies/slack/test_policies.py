"""QoServe, FairBatching and SlidingServe in small cases: how large a chunk is, who comes first, who
waits. A token takes 0.125 s, and blocks hold one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.policies.slack.fairbatching import capacity
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import Outlook
from tests.sched.driver import Drive

EIGHTH = LinearCostModel(Coefficients(0.125, 0, 0, 0, 0, 0, 0, 0, 0), 1)
NAMES = ("qoserve", "fairbatching", "slidingserve")
BEST = Tier.BEST_EFFORT
LATER = {"ttft": 900.0, "tbt": 900.0}  # targets that are no hindrance


def drive(policy: str, *, m: int = 1000, **options: Any) -> Drive:
    options = {
        "cost_model": EIGHTH,
        "watermark": 0.0,
        "margin": 1.0,
        "share": 0.0,
        "p": 1,
        "least": 0,
        **options,
    }
    return Drive(policy, blocks=2 * m, block_size=1, **options)


# All three.


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize(("tbt", "tokens"), [(1.25, 7), (2.25, 15)])
def test_a_chunk_grows_with_the_least_slack(policy: str, tbt: float, tokens: int) -> None:
    run = drive(policy)
    rows = [run.add(1, 9, ttft=9.0, tbt=when) for when in (tbt, 9.0)]
    run.step()
    long = run.add(60, 2, **LATER)
    run.scheduler.finish(rows[1])
    assert run.step(0.25) == {rows[0]: 1, long: tokens}


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("tbt", [{}, {"tbt": 9.0}])
@pytest.mark.parametrize("pacing", ["gap", "envelope"])
def test_the_longest_gap_counts_where_it_is_less(
    policy: str, tbt: dict[str, float], pacing: str
) -> None:
    run = drive(f"{policy}:pacing={pacing}")
    row = run.add(1, 9, ttft=9.0, max_tbt=1.25, **tbt)
    run.step()
    long = run.add(60, 2, **LATER)
    assert run.step() == {row: 1, long: 9}


@pytest.mark.parametrize("policy", NAMES)
def test_the_margin_makes_chunks_smaller(policy: str) -> None:
    run = drive(policy, margin=2.0)
    first = run.add(1, 9, ttft=9.0, tbt=2.125)
    run.step()
    long = run.add(60, 2, **LATER)
    assert run.step(0.125) == {first: 1, long: 7}


@pytest.mark.parametrize("policy", NAMES)
def test_without_decodes_c_is_the_limit(policy: str) -> None:
    run = drive(policy, c=33)
    assert run.step() == {} if run.live else True
    row = run.add(50, 2, tier=BEST)
    assert run.step() == {row: 33}


@pytest.mark.parametrize("policy", NAMES)
def test_a_token_on_the_device_counts_as_there(policy: str) -> None:
    """The decode has its whole TBT from the end of the step before it on."""
    run = drive(policy)
    first = run.add(1, 9, ttft=9.0, tbt=1.0)
    run.scheduler.schedule(0.0)
    long = run.add(60, 2, **LATER)
    plan = run.scheduler.schedule(0.0, free_at=3.0).plan
    assert dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)) == {
        first: 1,
        long: 7,
    }


@pytest.mark.parametrize("policy", NAMES)
def test_who_can_no_longer_be_in_time_comes_last_and_ends(policy: str) -> None:
    run = drive(policy, c=8)
    lost, early = run.add(8, 1, ttft=1.5), run.add(8, 1, ttft=9.0)
    calm = run.add(8, 1, ttft=99.0)
    assert run.step(1.0) == {early: 8}
    assert run.step(2.0) == {calm: 8}
    run.to_the_end()
    assert run.ended == [early, calm, lost]


@pytest.mark.parametrize("policy", [f"{NAMES[0]}:relegates=false", f"{NAMES[1]}:late_last=false"])
def test_unless_it_is_not_to(policy: str) -> None:
    name, _, setting = policy.partition(":")
    key, _, value = setting.partition("=")
    run = drive(name, c=8, **{key: value == "true"})
    lost, _ = run.add(8, 1, ttft=1.5), run.add(8, 1, ttft=9.0)
    assert run.step(1.0) == {lost: 8}


@pytest.mark.parametrize("policy", NAMES)
def test_requests_without_targets_are_due_at_last(policy: str) -> None:
    run = drive(policy, c=8, ttlt=5.0)
    bare, far, near = run.add(8, 1), run.add(8, 1, ttft=19.0), run.add(8, 1, ttft=2.0)
    run.to_the_end()
    assert run.ended == [near, bare, far]


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("tbt", [0.5, 3.0])
def test_the_cache_goes_first_of_who_is_behind_its_deadlines(policy: str, tbt: float) -> None:
    run = drive(policy, m=12)
    first = run.add(4, 9, ttft=1.0, tbt=tbt)
    run.step(2.0)
    second = run.add(4, 9, arrival=8.0, ttft=9.0, tbt=99.0)
    while not run.preempted:
        run.step(9.0)
    assert run.preempted == [first if tbt < 1 else second]


@pytest.mark.parametrize("policy", NAMES)
def test_a_step_leaves_time_for_who_comes_next(policy: str) -> None:
    """Of the median TTFT, 8 s, a quarter: 16 tokens, unless a decode alone takes longer."""
    run = drive(policy, share=0.25)
    first = run.add(1, 9, ttft=8.0, tbt=900.0)
    run.step()
    long = run.add(60, 2, ttft=8.0, tbt=900.0)
    assert run.step(0.125) == {first: 1, long: 15}
    hasty = drive(policy, share=0.01)
    first = hasty.add(1, 9, ttft=8.0, tbt=900.0)
    hasty.step()
    long = hasty.add(60, 2, ttft=8.0, tbt=900.0)
    assert hasty.step(0.125) == {first: 1, long: 60}


# QoServe.


@pytest.mark.parametrize(("alpha", "short_first"), [(0.0, False), (1.0, True)])
def test_qoserve_is_edf_at_low_load_and_shortest_first_in_an_overload(
    alpha: float, short_first: bool
) -> None:
    """8 tokens take a second. One after the other, two of the three prompts are late."""
    run = drive("qoserve", c=8, alpha=alpha)
    long, short = run.add(32, 1, ttft=8.0), run.add(8, 1, ttft=8.5)
    assert run.step() == {long: 8}, "both can be in time"
    run.scheduler.finish(long)
    run.scheduler.finish(short)
    long, short = run.add(32, 1, arrival=5.0, ttft=4.5), run.add(8, 1, arrival=5.0, ttft=5.0)
    third = run.add(8, 1, arrival=5.0, ttft=5.25)
    assert run.step(5.0) == ({short: 8} if short_first else {long: 8})
    assert (third in run.step(6.0)) == short_first


def test_qoserve_pauses_a_prompt_for_a_more_urgent_one() -> None:
    run = drive("qoserve", c=8)
    long = run.add(24, 1, ttft=99.0)
    assert run.step() == {long: 8}
    urgent = run.add(8, 1, arrival=1.0, ttft=2.0)
    assert run.step(1.0) == {urgent: 8}
    assert run.step(2.0) == {long: 8}
    assert not run.preempted


def test_qoserve_relegates_best_effort_requests_first() -> None:
    """Of two that cannot both be in time, though the other's deadline is sooner."""
    run = drive("qoserve", c=8, alpha=0.0)
    low, high = run.add(16, 1, tier=BEST, ttft=3.0), run.add(16, 1, ttft=3.5)
    assert run.step() == {high: 8}
    run.to_the_end()
    assert run.ended == [high, low]
    run = drive("qoserve", c=8, alpha=0.0)
    low = run.add(16, 1, tier=BEST, ttft=3.0)
    run.add(16, 1, ttft=4.5)
    assert run.step() == {low: 8}, "both can"


def test_relegated_best_effort_requests_come_behind_relegated_real_time_ones() -> None:
    run = drive("qoserve", c=8)
    low, high = run.add(8, 1, tier=BEST, ttft=1.0), run.add(8, 1, ttft=1.5)
    run.step(5.0)
    assert run.table.outlook[[low, high]].tolist() == [Outlook.RELEGATED, 0], "it is served"
    run.step(6.0)
    assert run.ended == [high, low]


@pytest.mark.parametrize("relegates", [True, False])
def test_qoserve_gives_up_who_cannot_be_in_time(relegates: bool) -> None:
    """Who has no targets, or time enough, is not."""
    run = drive("qoserve", c=8, relegates=relegates, ttlt=1.0, alpha=0.0)
    rows = [run.add(8, 1), run.add(8, 1, ttft=6.5), run.add(8, 1, ttft=0.5)]
    run.step(5.0)
    lost = Outlook.RELEGATED if relegates else Outlook.OPEN
    assert run.table.outlook[rows].tolist() == [Outlook.OPEN, Outlook.OPEN, lost]


def test_qoserve_does_not_give_up_who_has_been_preempted() -> None:
    """Its next token is late; that need not miss its targets."""
    run = drive("qoserve", m=4)
    rows = [run.add(1, 9, ttft=9.0, tbt=1.0) for _ in range(2)]
    for now in (0.0, 0.25, 50.0, 50.25):
        run.step(now)
    assert len(run.preempted) == 1 and len(run.plans[-1]) == 1
    assert not run.table.outlook[rows].any()


def test_qoserve_always_has_time_for_a_few_tokens() -> None:
    run = drive("qoserve", least=5)
    rows = [run.add(1, 9, ttft=9.0, tbt=0.25) for _ in range(3)]
    run.step()
    long = run.add(60, 2, **LATER)
    assert run.step(0.375) == {**dict.fromkeys(rows, 1), long: 2}


def test_qoserve_predicts_by_the_order_that_it_has() -> None:
    run = drive("qoserve", c=8, alpha=1.0)
    for length, ttft in ((16, 2.5), (8, 2.75), (8, 2.875)):
        run.add(length, 1, ttft=ttft)
    view = run.scheduler.view
    requests = _columns(view)
    assert np.argsort(run.policy.queue_priority(requests, 0.0)).tolist() == [0, 1, 2]
    run.policy.plan(view, 0.0)
    assert np.argsort(run.policy.queue_priority(requests, 0.0)).tolist() == [1, 2, 0]


# FairBatching.


def test_fairbatching_lets_a_prompt_in_while_decodes_are_ahead() -> None:
    """On the envelope its next token is due at 9.5 s, and the next but one could wait as well."""
    run = drive("fairbatching:pacing=envelope", c=8)
    ahead = run.add(1, 9, ttft=9.0, tbt=0.5)
    run.step()
    behind = run.add(1, 9, arrival=0.125, ttft=0.25, tbt=0.5)
    run.step(0.125)
    long = run.add(60, 2, arrival=0.25, **LATER)
    assert run.step(0.25) == {behind: 1, long: 4}, "0.625 s, without the one that is ahead"
    assert ahead not in run.plans[-1]


def test_fairbatching_serves_decodes_that_are_ahead_in_what_is_left() -> None:
    run = drive("fairbatching:pacing=envelope", c=8)
    ahead = run.add(1, 9, ttft=9.0, tbt=0.5)
    run.step()
    behind = run.add(1, 9, arrival=0.125, ttft=0.25, tbt=0.5)
    run.step(0.125)
    short = run.add(2, 2, arrival=0.25, **LATER)
    assert run.step(0.25) == {behind: 1, short: 2, ahead: 1}


def test_fairbatching_keeps_urgent_decodes_before_prompts() -> None:
    """In 0.5 s there is time for four of the five, whose next tokens are due then."""
    run = drive("fairbatching", rows=9)
    rows = [run.add(1, 9, ttft=9.0, tbt=0.5) for _ in range(5)]
    run.step()
    run.add(60, 2, **LATER)
    assert run.step(0.0) == dict.fromkeys(rows[:4], 1)
    assert rows[4] in run.step(0.5)


@pytest.mark.parametrize(("least", "tokens"), [(0, 1), (5, 4), (99, 9)])
def test_fairbatching_has_time_for_a_few_tokens_within_its_capacity(
    least: int, tokens: int
) -> None:
    """A thirty-second of the TTFTs is two tokens, the capacity ten."""
    run = drive("fairbatching", least=least, share=1 / 32)
    first = run.add(1, 9, ttft=8.0, tbt=1.25)
    run.step()
    long = run.add(60, 2, ttft=8.0)
    assert run.step() == {first: 1, long: tokens}


def test_how_long_a_batch_of_fairbatching_may_take() -> None:
    slack, tbt = np.array([2.0, 5.0]), np.array([1.0, 3.0])
    assert capacity(slack, tbt, strict=False) == (2.0, 1.0)
    assert capacity(slack - 1.5, tbt, strict=False) == (1.0, 1.0)
    assert capacity(slack - 1.5, tbt, strict=True) == (0.5, 1.0)
    assert capacity(slack - 4.0, tbt, strict=True) == (1.0, 1.0), "the first is late: its TBT"
    assert capacity(slack, np.full(2, np.inf), strict=False) == (2.0, 0.0)
    assert capacity(slack[:0], tbt[:0], strict=True) == (np.inf, 0.0)


# SlidingServe.


def test_slidingserve_plans_two_steps_at_once() -> None:
    """A padded token takes 1 s, and a step 4 s besides: 12 s now and 17 s more for both on the
    envelope are 7 + 7 tokens, or 3 + 15."""
    stepped = LinearCostModel(Coefficients(1.0, 4.0, 0, 0, 0, 0, 0, 0, 0), 1)
    found = {}
    for window in (False, True):
        run = drive("slidingserve:pacing=envelope", cost_model=stepped, window=window)
        first = run.add(1, 9, ttft=7.0, tbt=17.0)
        run.step()
        long = run.add(60, 2, **LATER)
        padding = Padding(rows=(1, 8), tokens=(4, 8, 16, 32))
        view = dataclasses.replace(run.scheduler.view, padding=padding)
        plan = run.policy.plan(view, 12.0)
        found[window] = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    assert found == {False: {first: 1, long: 7}, True: {first: 1, long: 3}}


def test_a_smaller_chunk_leaves_out_nobody_who_cannot_wait() -> None:
    """As before, but that 5 of the tokens are due within the step: 7 and not 3 of them."""
    stepped = LinearCostModel(Coefficients(1.0, 4.0, 0, 0, 0, 0, 0, 0, 0), 1)
    run = drive("slidingserve:pacing=envelope", cost_model=stepped)
    first = run.add(1, 9, ttft=7.0, tbt=17.0)
    run.step()
    long = run.add(60, 2, **LATER)
    soon = run.add(5, 2, arrival=12.0, ttft=10.0, tbt=900.0)
    padding = Padding(rows=(1, 8), tokens=(4, 8, 16, 32))
    plan = run.policy.plan(dataclasses.replace(run.scheduler.view, padding=padding), 12.0)
    found = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    assert found == {first: 1, soon: 5, long: 2}


def test_the_knapsack_of_slidingserve_drops_the_dearest() -> None:
    """16 tokens can be in time, which is all that the long one has, or two of the others."""
    for saves in (True, False):
        run = drive("slidingserve", c=16, saves=saves)
        dear = run.add(16, 1, ttft=2.25)
        cheap = [run.add(8, 1, ttft=2.5) for _ in range(2)]
        run.step()
        assert run.plans[0] == dict.fromkeys(cheap, 8)
        run.to_the_end()
        assert run.ended == [*cheap, dear]


def test_a_real_time_request_is_worth_more_to_the_knapsack() -> None:
    run = drive("slidingserve", c=16)
    low, high = run.add(14, 1, tier=BEST, ttft=2.5), run.add(16, 1, ttft=2.5)
    assert run.step() == {high: 16}
    assert low in run.step(2.0)


def test_slidingserve_serves_the_short_first_among_those_who_can_wait_as_long() -> None:
    run = drive("slidingserve", c=8)
    run.add(40, 1, ttft=20.0)
    short = run.add(24, 1, ttft=20.5)
    run.add(8, 1, ttft=90.0)
    assert run.step() == {short: 8}, "the first two could wait for 15 steps and a few more"


def _columns(view: Any) -> Any:
    from jaxserve.sched.unified.policy_spec import Columns

    return Columns(view, np.arange(3), 0.0)
