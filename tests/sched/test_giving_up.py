"""Policies that give requests up: what is checked, booked and seen of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.plan import BatchPlan, InvalidPlan
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Request, SamplingParams
from jaxserve.sched.routing.snapshot import Snapshot
from jaxserve.sched.routing.take_snapshot import Lately, constant_fields, take_snapshot
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.ttft_estimator import TtftEstimator
from jaxserve.sched.state.request_table import RUNNING, WAITING, Outlook
from jaxserve.sched.unified.policy_spec import Columns
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.cost_models import FLAT
from tests.sched.driver import Drive
from tests.simulator.grouped import simulate


class GivingUp(Policy):
    """Plans as Sarathi does. missed, relegated: rows that its next plan gives up."""

    def __init__(self) -> None:
        self.missed: list[int] = []
        self.relegated: list[int] = []
        self._policy = make_policy("sarathi")

    def queue_priority(self, requests: Any, now: float) -> Any:
        return requests.seq

    def plan(self, view: View, now: float) -> BatchPlan:
        rows = {name: np.array(getattr(self, name), np.int64) for name in ("missed", "relegated")}
        return dataclasses.replace(self._policy.plan(view, now), **rows)


def drive(**options: Any) -> tuple[Drive, GivingUp]:
    """Of three requests with targets, and one without, of 16 tokens each."""
    made, policy = Drive("sarathi", c=16, p=16, **options), GivingUp()
    made.scheduler.policy = policy
    for slo in ({"ttft": 1.0}, {"tbt": 1.0}, {"max_tbt": 1.0}, {}):
        made.add(16, 8, **slo)
    return made, policy


def given_up(made: Drive, policy: GivingUp, **rows: list[int]) -> list[int]:
    policy.missed, policy.relegated = rows.get("missed", []), rows.get("relegated", [])
    return made.scheduler.schedule(0.0).given_up.tolist()


@pytest.mark.parametrize("name", ["missed", "relegated"])
@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([0, 0], "given up twice"),
        ([63], "nothing to compute is given up"),
        ([3], "without targets is given up"),
    ],
)
def test_only_requests_that_are_there_and_have_targets_are_given_up(
    name: str, rows: list[int], problem: str
) -> None:
    made, policy = drive()
    with pytest.raises(InvalidPlan, match=problem):
        given_up(made, policy, **{name: rows})
    assert not made.table.outlook.any()


def test_it_is_new_once_and_does_not_get_better() -> None:
    made, policy = drive()
    assert given_up(made, policy) == []
    assert given_up(made, policy, missed=[0]) == [0]
    assert given_up(made, policy, missed=[0, 1], relegated=[2, 1]) == [2, 1]
    assert given_up(made, policy, missed=[2], relegated=[0]) == []
    outlook = [Outlook.RELEGATED] * 3 + [Outlook.OPEN]
    assert made.table.outlook[:4].tolist() == outlook
    assert Columns(made.scheduler.view, np.arange(4), 0.0).outlook.tolist() == outlook
    made.scheduler.finish(0)
    assert made.table.outlook[made.add(16, 8, ttft=1.0)] == Outlook.OPEN


def test_the_prefix_cache_knows_who_is_given_up() -> None:
    made, policy = drive(prefix_caching=True)
    cache = made.scheduler.cache
    assert cache is not None and given_up(made, policy, missed=[0], relegated=[1]) == [1, 0]
    made.scheduler.finish(0)
    assert cache.retention.hopeless == {1}


def test_nobody_waits_for_those_who_are_relegated() -> None:
    made, policy = drive()
    new = Request("new", (1,) * 16, SamplingParams(8), SLO(ttft=1.0))

    def wait() -> float:
        backlog = Backlog.from_scheduler(made.scheduler, 0.0, 0.0)
        return TtftEstimator(backlog).wait(new, 0.0).seconds

    given_up(made, policy)  # the first one's prompt is computed
    before = wait()
    given_up(made, policy, missed=[2])  # and the second one's
    missed = wait()
    made.table.give_up(np.array([2]), Outlook.RELEGATED)
    assert before > missed > wait()


def test_routers_see_who_is_given_up_and_the_work_of_the_relegated() -> None:
    made, policy = drive()
    view = made.scheduler.view
    known = constant_fields(FLAT, policy, view.limits, made.pool.num_blocks, made.pool.block_size)

    def seen() -> Snapshot:
        backlog = Backlog.from_scheduler(made.scheduler, 0.0, 0.0)
        return take_snapshot(backlog, 4, known, Lately(), draining=False)

    before = seen()
    assert (before.realtime_tokens, before.relegated_tokens, before.given_up) == (64, 0, 0)
    given_up(made, policy, missed=[2], relegated=[1])
    after = seen()
    assert (after.realtime_tokens, after.relegated_tokens) == (32, 16), "of the first none is left"
    assert (after.waiting, after.given_up, after.relegated) == (3, 2, 1)
    assert after.realtime_blocks == 2 * before.realtime_blocks / 4
    assert after.best_effort_tokens == after.best_effort_blocks == 0
    (quads,) = {before.realtime_quad / 4, after.realtime_quad / 2}
    assert quads == 16**2


class LateGivenUp(GivingUp):
    """Gives up whoever is late, or has been."""

    gave: int = 0

    def plan(self, view: View, now: float) -> BatchPlan:
        table = view.table
        rows = np.concatenate([table.in_state(RUNNING), table.in_state(WAITING)])
        first = np.minimum(table.first_token[rows], view.step_end(now))
        late = (first - table.arrival[rows] > table.ttft[rows]) | (table.late_gaps[rows] > 0)
        self.missed, self.relegated = rows[late].tolist(), rows[late][::2].tolist()
        self.gave += int(late.sum())
        return super().plan(view, now)


def test_it_changes_no_schedule_by_itself() -> None:
    rng = np.random.default_rng(0)
    lengths = Lengths(rng.integers(1, 200, 30), rng.integers(1, 40, 30))
    workload = Workload.create(np.sort(rng.uniform(0, 0.2, 30)), lengths)
    workload = with_targets(workload, SLO(ttft=0.05, tbt=0.004))
    place, policy = system("llama-2-7b@a100"), LateGivenUp()
    found = simulate(policy, workload, place, kv_tokens=2000, checked=True)
    plain = simulate("sarathi", workload, place, kv_tokens=2000, compiled=False)
    assert policy.gave > 30
    assert found.requests.token_times.tolist() == plain.requests.token_times.tolist()
