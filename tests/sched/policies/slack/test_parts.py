"""Deadlines, chunks, windows of two steps and the knapsack of the policies that spend slack."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.policies.slack.knapsack import UNITS, most_valuable
from jaxserve.sched.policies.slack.slack_batch import Prompts, SlackBatch, least_slack, pending
from jaxserve.sched.policies.slack.step_times import StepTimes
from jaxserve.sched.policies.slack.token_deadlines import FAR, Deadlines, Pacing, standing
from jaxserve.sched.policies.slack.window import Window
from jaxserve.sched.policy import View
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import RUNNING, State
from jaxserve.sched.unified.batch_builder import seconds_of
from jaxserve.sched.unified.policy_spec import Columns
from tests.sched.driver import Drive

TENTH = LinearCostModel(Coefficients(0.1, 0, 0, 0, 0, 0, 0, 0, 0), 1)
# Every feature has a price, so that no two batches cost the same.
TIERS = (Tier.BEST_EFFORT, Tier.REALTIME, Tier.REALTIME)
PRICED = LinearCostModel(Coefficients(1e-3, 1e-2, 1e-5, 2e-3, 3e-4, 1e-6, 4e-3, 5e-4, 7e-4), 1)


def drive(policy: str = "sarathi_pc", **options: object) -> Drive:
    made = {"cost_model": TENTH, "c": 64, "p": 1, "blocks": 2000, "block_size": 1, **options}
    return Drive(policy, **made)  # type: ignore[arg-type]


def due(run: Drive, pacing: Pacing, clock: float, step: float = 0.5) -> list[float]:
    rows = np.flatnonzero(run.table.state != State.FREE)
    return Deadlines(pacing, 50.0).due(run.scheduler.view, rows, clock, step).tolist()


@pytest.mark.parametrize("pacing", Pacing)
def test_the_first_token_is_due_a_ttft_after_the_arrival(pacing: Pacing) -> None:
    run = drive()
    run.add(4, 3, arrival=2.0, ttft=3.0, tbt=1.0)
    assert due(run, pacing, 2.5) == [5.0]


@pytest.mark.parametrize(("pacing", "later"), [(Pacing.ENVELOPE, 6.0), (Pacing.GAP, 1.25)])
def test_tokens_that_came_early_leave_slack_on_the_envelope_only(
    pacing: Pacing, later: float
) -> None:
    run = drive()
    run.add(4, 9, ttft=5.0, tbt=1.0)
    run.step(0.25)
    assert due(run, pacing, 0.5) == [later], "the second token: 5 + 1 x 1, or 0.25 + 1"


def test_who_is_behind_the_envelope_is_due_a_tbt_after_the_last_token() -> None:
    run = drive()
    run.add(4, 9, ttft=5.0, tbt=1.0)
    run.step(8.0)
    assert due(run, Pacing.ENVELOPE, 8.0) == [9.0]


def test_the_last_token_of_a_job_is_due_at_its_jct_and_those_before_it_earlier() -> None:
    """Until 32 outputs have ended, all 11 tokens that it may write count: ten steps of 0.5 s."""
    run = drive()
    run.add(4, 11, jct=30.0)
    run.add(4, 11)
    assert due(run, Pacing.GAP, 0.0) == [25.0, 45.0], "who names nothing has 50 s"
    for _ in range(40):
        run.table.output_lengths.add(5)
    assert due(run, Pacing.GAP, 0.0) == [28.0, 48.0]


def test_a_ttft_or_a_tbt_needs_no_default() -> None:
    run = drive()
    run.add(4, 1, ttft=3.0)
    assert due(run, Pacing.GAP, 0.0) == [3.0]


def test_jobs_do_not_ask_for_less_than_a_step_and_not_at_all_once_they_are_over() -> None:
    run = drive()
    row = np.array([run.add(4, 11, jct=3.0)])
    run.step()
    deadlines, view = Deadlines(Pacing.GAP, 50.0), run.scheduler.view

    def slack(clock: float) -> float:
        when = deadlines.due(view, row, clock, 0.5)
        return float(deadlines.slack(view, row, when, clock, 0.5)[0])

    assert slack(0.0) < 0, "4.5 s for the ten that are to come"
    for _ in range(40):
        run.table.output_lengths.add(2)
    assert [slack(when) for when in (1.0, 2.75, 3.0)] == [2.0, 0.5, np.inf]


def test_a_job_with_a_tbt_asks_for_what_its_next_token_needs() -> None:
    run = drive()
    row = np.array([run.add(4, 11, jct=99.0, tbt=0.25)])
    run.step()
    deadlines, view = Deadlines(Pacing.GAP, 50.0), run.scheduler.view
    when = deadlines.due(view, row, 0.125, 0.5)
    assert deadlines.slack(view, row, when, 0.125, 0.5).tolist() == [0.125]


def test_the_waiting_order_is_by_deadline_and_price_and_the_late_are_last() -> None:
    run = drive()
    for length, slo in ((10, {"ttft": 30.0}), (20, {"ttft": 29.0}), (4, {"ttft": 1.0}), (4, {})):
        run.add(length, 1, **slo)
    columns = Columns(run.scheduler.view, np.arange(4), 0.0)
    order = Deadlines(Pacing.GAP, 50.0).waiting_order
    assert order(columns, 0.0).tolist() == [30.0, 29.0, 1.0, 50.0]
    assert order(columns, 0.0, 0.5).tolist() == [35.0, 39.0, 3.0, 52.0]
    assert order(columns, 0.8).tolist() == [30.0, 29.0, 1.0 + FAR, 50.0], "its prompt takes 0.4 s"


def test_caches_stay_with_those_in_time_with_real_time_requests_and_with_little_slack() -> None:
    run = drive()
    ahead, behind = run.add(4, 9, ttft=5.0, tbt=1.0), run.add(4, 9, ttft=2.0, tbt=0.25)
    run.step()
    run.step()
    more = [run.add(4, 3, tier=tier, ttft=6.0, tbt=1.0) for tier in TIERS]
    rows = np.array([ahead, behind, *more])
    view = run.scheduler.view
    assert standing(view, rows, 1.0).tolist() == [1, 3, 4, 0, 2], "2.5, 6, 6 and 7 s; best-effort"
    assert standing(view, rows, 3.0).tolist() == [3, 4, 0, 2, 1]


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=5),
    data=st.data(),
)
def test_some_tokens_of_the_prompts_cost_what_their_pieces_do(
    prompts: list[tuple[int, int]], data: st.DataObject
) -> None:
    run = drive(cost_model=PRICED)
    for length, _ in prompts:
        run.add(length, 1)
    view, rows = run.scheduler.view, np.arange(len(prompts))
    run.table.computed[rows] = [min(done, length - 1) for length, done in prompts]
    made = Prompts(pending(view, rows))
    tokens = data.draw(st.integers(0, made.tokens))
    piece, batch = made.first(tokens), SlackBatch(view, 0.0)
    batch.add(piece)
    assert piece.tokens.sum() == tokens and (piece.tokens > 0).all()
    expected = batch.seconds if tokens else float(seconds_of(view, np.zeros((6, 1), np.int64))[0])
    found = SlackBatch(view, 0.0).seconds_with(made, np.array([tokens]))
    assert found.tolist() == pytest.approx([expected])


def test_a_chunk_is_what_there_is_time_for_but_no_less_than_the_least() -> None:
    run = drive(c=30)
    run.add(50, 1)
    view = run.scheduler.view
    prompts = Prompts(pending(view, np.array([0])))

    def chunk(limit: float, least: int = 0) -> int:
        return SlackBatch(view, 0.0).chunk(prompts, limit, least)

    assert [chunk(1.05), chunk(0.0), chunk(0.0, least=8)] == [10, 1, 8]
    assert [chunk(99.0), chunk(0.0, least=99)] == [30, 30], "C is 30"


def test_who_is_late_anyway_asks_for_no_more_than_its_tbt() -> None:
    run = drive()
    rows = np.array([run.add(1, 9) for _ in range(3)])
    run.step()
    batch = SlackBatch(run.scheduler.view, 0.0)
    batch.decode(pending(run.scheduler.view, rows), run.table.in_state(RUNNING))
    tbt = np.array([2.0, 3.0, 4.0])
    assert least_slack(batch, np.array([1.0, 5.0, 6.0]), tbt) == 1.0
    assert least_slack(batch, np.array([0.2, 5.0, 6.0]), tbt) == 2.0, "three tokens take 0.3 s"


def test_decodes_take_the_blocks_of_the_last_keepers() -> None:
    run = drive(blocks=2 * 12)
    rows = np.array([run.add(3, 9) for _ in range(4)])
    run.step()
    view = run.scheduler.view
    batch = SlackBatch(view, 0.0)
    kept = batch.decode(pending(view, rows), rows[[1, 3, 0, 2]])
    assert kept.tolist() == [True, True, False, True]
    assert batch.room.preempted == [2] and batch.room.free == 2 * 3 - 3 * 2


def test_who_finds_no_memory_holds_up_those_behind_it_but_for_running_ones() -> None:
    run = drive(c=4, blocks=2 * 12)
    going = run.add(6, 1)
    run.step()
    large, small = run.add(7, 1), run.add(2, 1)
    batch = SlackBatch(run.scheduler.view, 0.0)
    work = pending(run.scheduler.view, np.array([large, small, going]))
    assert batch.admissible(work).work.rows.tolist() == [going]
    assert batch.admissible(work[1:]).work.rows.tolist() == [small, going]


def test_starts_leave_the_watermark_unless_they_are_alone() -> None:
    run = drive(blocks=2 * 10)
    first = run.add(9, 2)
    alone = SlackBatch(run.scheduler.view, 0.5)
    assert alone.admissible(pending(run.scheduler.view, np.array([first]))).tokens == 9
    run.scheduler.finish(first)
    first = run.add(2, 9)
    run.step()
    second = run.add(4, 1)
    work = pending(run.scheduler.view, np.array([second]))
    assert SlackBatch(run.scheduler.view, 0.5).admissible(work).tokens == 0
    assert SlackBatch(run.scheduler.view, 0.4).admissible(work).tokens == 4


def test_the_rate_of_prompts_is_that_of_late() -> None:
    run, times = drive(c=8), StepTimes()
    run.add(90, 2)
    view = run.scheduler.view
    assert times.rate(view) == pytest.approx(10.0)
    batch = SlackBatch(view, 0.0)
    batch.compute(Prompts(pending(view, np.array([0]))), 5)
    for _ in range(200):
        times.note(batch.work(), 1.0)
    assert times.rate(view) == pytest.approx(5.0, rel=1e-3) and times.step == 0.0


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), max_size=8),
    capacity=st.integers(0, 60),
)
def test_the_knapsack_is_the_best(items: list[tuple[int, int]], capacity: int) -> None:
    weights = np.array([weight for weight, _ in items], np.int64)
    values = np.array([value for _, value in items], np.float64)
    taken = most_valuable(weights, values, capacity)
    assert weights[taken].sum() <= capacity
    subsets = itertools.product((False, True), repeat=len(items))
    masks = [np.array(mask, bool) for mask in subsets]
    best = max(values[mask].sum() for mask in masks if weights[mask].sum() <= capacity)
    assert values[taken].sum() == best


def test_a_large_knapsack_is_never_too_full() -> None:
    rng = np.random.default_rng(1)
    capacity = 37 * UNITS + 5
    weights = rng.integers(1, capacity, 40)
    taken = most_valuable(weights, np.ones(40), capacity)
    assert 0 < weights[taken].sum() <= capacity
    assert most_valuable(np.full(3, 334), np.ones(3), 1000).sum() == 2, "1002 are too many"


def window(view: View, slack: float, tbt: float, joining: float = np.inf) -> tuple[Window, int]:
    """One decode with so much slack on the envelope, and all others as prompts; also the chunk that
    the slack alone allows."""
    batch = SlackBatch(view, 0.0)
    running = view.table.in_state(RUNNING)
    batch.decode(pending(view, running), running)
    prompts = batch.admissible(pending(view, view.table.in_state(State.WAITING)))
    own = np.full(len(prompts.work), joining)
    most = batch.longest(prompts, slack)
    return Window(batch, prompts, np.array([slack + tbt]), np.array([tbt]), own), most


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4),  # fewer than C
    slack=st.floats(0.02, 0.2),
    tbt=st.floats(0.02, 0.2),
)
def test_no_first_chunk_is_better(lengths: list[int], slack: float, tbt: float) -> None:
    """By the batches themselves, built for each pair of chunks. Without padding: with it a batch of
    single tokens may take longer than a larger one, which the search passes over."""
    run = drive(cost_model=PRICED)
    run.add(3, 9)
    run.step()
    for length in lengths:
        run.add(length, 9)
    view = run.scheduler.view
    two, most = window(view, slack, tbt)
    if most < 1:
        return
    decode = pending(view, view.table.in_state(RUNNING))

    def second(one: int) -> int:
        done = two.prompts.first(one)
        whole = done.tokens == two.prompts.work.tokens[: len(done)]
        took = float(two.batch.seconds_with(two.prompts, np.array([one]))[0])
        best = 0
        for size in range(1, two.prompts.tokens - one + 1):
            batch = SlackBatch(view, 0.0)
            batch.add(dataclasses.replace(decode, start=decode.start + 1))
            for i in np.flatnonzero(whole).tolist():
                known, one_row = done[i : i + 1], np.ones(1, np.int64)
                batch.add(
                    dataclasses.replace(
                        known, start=known.start + known.tokens, tokens=one_row, decodes=one_row > 0
                    )
                )
            rest = two.prompts.first(one + size)
            before = np.zeros(len(rest), np.int64)
            before[: len(done)] = done.tokens
            rest = dataclasses.replace(rest, start=rest.start + before, tokens=rest.tokens - before)
            batch.add(rest[rest.tokens > 0])
            if batch.seconds <= max(slack + tbt - took, tbt):
                best = size
        return best

    found, ones = two.first(0, most), np.arange(most + 1)
    took = two.batch.seconds_with(two.prompts, ones)
    assert two._second(ones, took)[0].tolist() == [second(one) for one in ones.tolist()]
    whole = two.prompts.whole(ones)
    total = {one: one + second(one) + int(whole[one]) for one in range(most + 1)}
    assert total[found] == max(total.values())
