"""AccelGen's parts by themselves: the pivot, Eq. 6, slack, what was seen, and the choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.policies.accelgen.allowance import Allowances, laxity
from jaxserve.sched.policies.accelgen.batch import AccelGenBatch, AccelGenWork
from jaxserve.sched.policies.accelgen.filling import nearest
from jaxserve.sched.policies.accelgen.history import History, Missed
from jaxserve.sched.policies.accelgen.pivot import EVERY, Gauge, Pivot
from jaxserve.sched.policies.accelgen.remaining import Targets, chunks, left
from jaxserve.sched.policy import Limits, View
from jaxserve.sched.request import Tier
from jaxserve.sched.state.output_lengths import ENOUGH
from tests.sched.driver import Drive
from tests.sched.policies.test_policy_properties import quick


def view_of(
    *, per_token: float, bias: float, most: int = 1000, padding: Padding | None = None, **more: Any
) -> View:
    """Of an empty table. more: coefficients."""
    values = {name: more.get(name, 0.0) for name in ("prefill_quad", "prefill_bias")}
    model = LinearCostModel(
        Coefficients(per_token, bias, 0, 0, 0, per_prefill=0, prefill_m=0, **values), 1
    )
    run = Drive("accelgen")
    return View(run.table, run.pool, Limits(most, most, 8), model, padding)


def rate(view: View, size: int) -> float:
    """Tokens a second of a prompt of so many."""
    pivot = Pivot.find(view, size)
    return pivot.size / pivot.seconds


@pytest.mark.parametrize("quad", [0.0, 1e-5])
def test_the_pivot_is_where_throughput_flattens(quad: float) -> None:
    """Without a quadratic part: n / (1 + n / 100) is 95% of the 90.9 at 1,000 from n = 633 on."""
    view = view_of(per_token=0.01, bias=1.0, prefill_quad=quad)
    rates = np.array([rate(view, n) for n in range(1, 1001)])
    exact = int(np.argmax(rates >= 0.95 * rates.max())) + 1
    found = Pivot.find(view)
    assert exact == (634 if not quad else exact) and exact <= found.size <= 1.03 * exact
    assert found.seconds == pytest.approx(1.0 + 0.01 * found.size + quad * found.size**2)


def test_the_pivot_fills_what_the_device_pads() -> None:
    view = view_of(per_token=0.01, bias=0.8, padding=Padding((1, 8), (256, 512, 1024)))
    assert Pivot.find(view).size == 512, "257 to 512 take the same time"


@pytest.mark.parametrize(("bias", "per_token"), [(0.0, 0.01), (1.0, 0.0), (0.0, 0.0)])
def test_models_that_never_flatten_have_a_pivot(bias: float, per_token: float) -> None:
    pivot = Pivot.find(view_of(per_token=per_token, bias=bias))
    assert 1 <= pivot.size <= 1000 and pivot.budget(np.inf) == 1000


def test_the_budget_is_as_in_equation_6() -> None:
    pivot = Pivot(768, 0.1, most=2048)
    assert pivot.budget(0.1) == 768 and pivot.budget(0.05) == 384 and pivot.budget(0.2) == 1536
    assert pivot.budget(9.0) == 2048 and pivot.budget(1e-9) == 1
    assert pivot.budget(np.array([0.1, np.inf])).tolist() == [768, 2048]


def test_the_pivot_is_looked_up_again_as_the_model_learns() -> None:
    before, after = (view_of(per_token=0.01, bias=bias) for bias in (1.0, 0.1))
    gauge = Gauge(None)
    first = gauge.read(before)
    assert all(gauge.read(after) is first for _ in range(EVERY - 1))
    assert gauge.read(after) == Pivot.find(after) != first


def test_time_left_and_chunks() -> None:
    run = Drive("accelgen")
    slo = {"ttft": 9.0, "tbt": 3.0}
    row = np.array([run.add(25, 4, arrival=1.0, **slo)])
    targets, view = Targets(1.0, 0.5), run.scheduler.view
    assert targets.token_targets(view, row).tolist() == [9.0]
    assert left(view, row, targets.token_targets(view, row), 3.0).tolist() == [7.0]
    assert chunks(run.table.pending(row), 10.0).tolist() == [3]
    assert chunks(run.table.pending(row), None).tolist() == [1]
    run.scheduler.schedule(3.0)
    assert left(view, row, targets.token_targets(view, row), 4.0).tolist() == [3.0], (
        "its token is on its way"
    )
    run.scheduler.receive(row, 4.0)
    assert left(view, row, targets.token_targets(view, row), 4.5).tolist() == [2.5]


def test_who_has_which_target() -> None:
    run = Drive("accelgen")
    best = Tier.BEST_EFFORT
    rows = [run.add(2, 4), run.add(2, 4, tbt=9.0), run.add(2, 4, tier=best)]
    rows += [run.add(2, 4, jct=9.0), run.add(2, 4, tier=best, ttft=7.0)]
    found = Targets(1.0, 0.5).token_targets(run.scheduler.view, np.array(rows))
    assert found.tolist() == [1.0, 1.0, np.inf, np.inf, 7.0]


def test_who_has_missed_a_target_for_good() -> None:
    run, missed = Drive("sarathi", c=64, p=64), Missed()
    slow, job = run.add(4, 3, ttft=1.0), run.add(4, 3, jct=9.0)
    gap, calm = run.add(4, 9, tbt=5.0), run.add(4, 9)
    rows, view = np.array([slow, job, gap, calm]), run.scheduler.view

    def read(clock: float) -> list[bool]:
        return missed.read(view, rows, clock).tolist()

    assert read(1.0) == [False] * 4
    assert read(1.5) == [True, False, False, False]
    run.step(1.5)
    assert read(2.0) == [True, False, False, False], "its first token has come, late"
    run.table.preemptions[[gap, calm]] += 1
    assert read(9.5) == [True, True, True, False]
    run.scheduler.finish(slow)
    assert run.add(4, 3, arrival=9.5, ttft=1.0) == slow
    assert read(9.5) == [False, True, True, False]


def test_what_a_job_may_wait_in_all() -> None:
    """Of 40 s 7 are over; two chunks take 2 s, three tokens 1.5 s each."""
    run = Drive("sarathi")
    rows = np.array([run.add(20, 3, arrival=3.0, jct=40.0), run.add(20, 3, ttft=9.0)])
    found = laxity(run.scheduler.view, rows, np.array([2, 2]), 10.0, 1.0, 0.5)
    assert found.tolist() == [40 - 7 - 2 - 4.5, np.inf]


class Job:
    """A request whose two chunks and three tokens take a second each, of 20 in all."""

    def __init__(self, loss: float = 0.0, **options: Any) -> None:
        self.run = Drive("sarathi", c=10, p=10, **options)
        self.row = np.array([self.run.add(20, 3, jct=20.0)])
        self.allowances, self._loss = Allowances(), loss

    def due(self, clock: float, parts: int = 2) -> float:
        view, number = self.run.scheduler.view, np.array([parts])
        return float(self.allowances.due(view, self.row, number, clock, 1.0, self._loss)[0])


def test_what_is_left_of_a_job_is_shared_by_its_iterations() -> None:
    """T_e is 5 s, so each of the five may wait for 15 / 5 s."""
    job = Job()
    assert job.due(0.0) == job.due(2.0) == 3.0
    job.allowances.ran(job.row, 1.0)  # say at 1: two seconds early
    assert job.due(2.0) == 7.0, "at 2 it may wait for 3 and the 2 that were left"
    job.allowances.ran(job.row, 1.0)  # at 9: two seconds late
    assert job.due(10.0) == 11.0, "at 10, for 3 less 2"
    job.allowances.ran(job.row, 4.0)  # at 11, and it takes 4 s
    assert job.due(15.0) == 18.0


def test_preemptions_are_expected() -> None:
    """A token takes 1.5 s with them: T_e is 6.5 s."""
    assert Job(loss=0.5).due(0.0) == pytest.approx(13.5 / 5)


def test_a_job_that_is_preempted_is_given_what_is_left() -> None:
    """At 8, 12 s are left, and T_e is 3 s for one chunk and two tokens."""
    job = Job()
    job.due(0.0)
    job.run.step(0.0), job.run.step(0.0)
    assert job.run.table.generated[job.row[0]] == 1
    job.allowances.forget(job.row.tolist())
    assert job.due(8.0, parts=1) == 8.0 + (12 - 3) / 3


def test_so_is_one_that_takes_longer_than_was_expected() -> None:
    job = Job()
    job.due(0.0)
    job.run.step(0.0)
    for _ in range(5):
        job.allowances.ran(job.row, 1.0)
    assert job.due(9.0, parts=1) == 9.0 + (11 - 4) / 4


def test_outputs_are_expected_to_get_as_long_as_others_did() -> None:
    job = Job()
    for _ in range(ENOUGH):
        job.run.table.output_lengths.add(1)
    assert job.due(0.0) == pytest.approx((20 - 3) / 3), "two chunks and a token"


def test_another_request_in_its_row_is_not_taken_for_it() -> None:
    job = Job()
    job.due(0.0)
    job.allowances.ran(job.row, 1.0)
    job.run.scheduler.finish(int(job.row[0]))
    assert job.run.add(20, 3, jct=30.0) == job.row[0]
    assert job.due(0.0) == 5.0


def test_what_was_seen_of_batches() -> None:
    run, seen = Drive("sarathi"), History()
    view = run.scheduler.view
    rows = np.array([run.add(20, 3), run.add(4, 3)])
    assert seen.longest(7.0) == 7.0 and seen.chunk(9) == 9.0 and seen.loss == 0.0
    seen.note_batch(view, rows, np.array([8, 4]), np.array([8, 4]), 2.0)
    assert seen.chunk(9) == 8.0, "the other prompt was not cut"
    seen.note_batch(view, rows[:1], np.array([12]), np.array([4]), 1.0)
    assert seen.chunk(9) == pytest.approx((64 + 16) / 12) and seen.longest(7.0) == 2.0
    seen.note_batch(view, rows[:1], np.array([20]), np.array([8]), 1.0)
    assert seen.chunk(9) == pytest.approx(80 / 12), "the last piece is what is left"
    seen.note_absences(view, [0], rows[:0], 10.0)
    assert seen.loss == 0.0
    seen.note_absences(view, [], rows, 14.0)
    assert seen.loss == 4.0 * 1 / 2, "4 s, and one preemption for two tokens"


def test_a_request_that_ends_while_it_is_out_was_not_absent() -> None:
    run, seen = Drive("sarathi"), History()
    row = np.array([run.add(4, 3)])
    seen.note_absences(run.scheduler.view, row.tolist(), row[:0], 0.0)
    run.scheduler.finish(int(row[0]))
    assert run.add(4, 3) == row[0]
    seen.note_batch(run.scheduler.view, row, np.array([4]), np.array([4]), 1.0)
    seen.note_absences(run.scheduler.view, [], row, 50.0)
    assert seen.loss == 0.0


demands = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), max_size=12)


@settings(quick, max_examples=150)
@given(demands, st.integers(1, 60), st.integers(0, 30), st.integers(1, 12))
def test_the_nearest_that_fits_is_taken_each_time(
    offers: list[tuple[int, int]], tokens: int, blocks: int, places: int
) -> None:
    demand = np.array(offers, np.int64).reshape(-1, 2)
    chosen = nearest(demand[:, 0], demand[:, 1], tokens, blocks, places).tolist()
    total = demand[chosen].sum(axis=0)
    assert (total <= (tokens, blocks)).all() and len(set(chosen)) == len(chosen) <= places
    fits = (demand <= (tokens, blocks)).all(axis=1)
    if (demand[fits].sum(axis=0) <= (tokens, blocks)).all() and fits.sum() <= places:
        assert sorted(chosen) == np.flatnonzero(fits).tolist()
        return
    room, unit, left_over = np.array([tokens, blocks]), np.array([tokens, max(blocks, 1)]), fits
    for i in chosen:
        left_over = left_over & (demand <= room).all(axis=1)
        distance = np.linalg.norm((room - demand) / unit, axis=1)
        assert left_over[i] and distance[i] <= distance[left_over].min() + 1e-9
        room, left_over[i] = room - demand[i], False
    assert len(chosen) == places or not (left_over & (demand <= room).all(axis=1)).any()


def test_tokens_and_blocks_count_by_what_there_is_of_them() -> None:
    """Half of the blocks and a fifth of the tokens is more than a third of the tokens alone."""
    found = nearest(np.array([33, 20, 60]), np.array([0, 5, 9]), 100, 10, places=1)
    assert found.tolist() == [2]
    assert nearest(np.array([33, 20]), np.array([0, 5]), 100, 10, places=1).tolist() == [1]


@settings(quick, max_examples=40)
@given(st.integers(0, 500), st.floats(0.0, 3.0), st.integers(0, 300), st.sampled_from((0.0, 1e-5)))
def test_a_chunk_is_as_long_as_the_time_allows(
    start: int, limit: float, most: int, quad: float
) -> None:
    view = view_of(per_token=0.01, bias=0.1, prefill_quad=quad, prefill_bias=0.05)
    batch = AccelGenBatch(view)
    tokens = batch.longest(start, limit, most)
    seconds = 0.15 + 0.01 * np.arange(1, most + 1)
    seconds = seconds + quad * np.arange(1, most + 1) * (np.arange(1, most + 1) + 2 * start)
    fewest, most = (np.count_nonzero(seconds <= limit + error) for error in (-1e-9, 1e-9))
    assert fewest <= tokens <= most


def test_a_batch_takes_what_its_requests_take_together() -> None:
    run = Drive("sarathi", c=10, p=10)
    rows = np.array([run.add(n, 3) for n in (4, 30)])
    run.step()
    view = run.scheduler.view
    work = AccelGenWork.of_rows(view, rows, np.zeros(2), np.zeros(2, bool))
    batch = AccelGenBatch(view)
    times = batch.times(work)
    assert times[0] == batch.with_each(work)[0]
    batch.add(work)
    assert batch.seconds == times[1] and batch.tokens == 1 + 24
    batch.drop(int(rows[1]))
    assert batch.seconds == times[0] and batch.work().rows.tolist() == [rows[0]]
