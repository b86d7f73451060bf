"""The scheduler books what is planned and refuses what does not add up."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.plan import BatchPlan, InvalidPlan, Operation, Preempt
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.scheduler import Scheduler, request_bytes
from jaxserve.sched.state.request_table import RequestTable, State
from tests.cost_models import FLAT
from tests.sched.cache.invariants import check_pool


class Scripted(Policy):
    """A policy that says what it is told to."""

    def __init__(self) -> None:
        self.next = BatchPlan()

    def plan(self, view: View, now: float) -> BatchPlan:
        return self.next


def plan(rows: list[int], tokens: list[int], **fields: Any) -> BatchPlan:
    """preempt: rows that lose all."""
    fields.setdefault("reserve", tokens)
    fields.setdefault("kinds", [0] * len(rows))
    arrays = {k: np.array(v, np.int64) for k, v in fields.items()}
    operations: list[Operation] = []
    if "preempt" in arrays:
        operations.append(Preempt.whole(arrays.pop("preempt")))
    lists = np.array(rows, np.int64), np.array(tokens, np.int64)
    return BatchPlan(*lists, **arrays, operations=tuple(operations))


def empty(policy: Policy, capacity: int = 4, max_model_len: int = 32) -> Scheduler:
    memory = {"num_blocks": 8, "block_size": 4, "max_model_len": max_model_len}
    return Scheduler(policy, Limits(16, 16, 2), **memory, capacity=capacity, cost_model=FLAT)


@pytest.fixture
def scheduler() -> Scheduler:
    made = empty(Scripted())
    for i in range(3):
        made.add(Request(str(i), (1,) * 6, SamplingParams(max_tokens=4)))
    return made


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (plan([0, 0], [1, 1]), "twice"),
        (plan([0], [7]), "more tokens than are pending"),
        (plan([0], [0]), "more tokens than are pending"),
        (plan([3], [1]), "nothing to compute"),
        (plan([0], [6], reserve=[4]), "less room"),
        (plan([0, 1, 2], [6, 6, 6]), "max_batch_tokens"),
        (plan([0, 1, 2], [2, 2, 2]), "max_rows"),
        (plan([0, 1], [6, 6], reserve=[12, 12]), "more blocks"),
        (plan([0], [6], preempt=[1]), "without cache"),
        (plan([0], [6], preempt=[1, 1]), "preempted twice"),
    ],
)
def test_refuses(scheduler: Scheduler, bad: BatchPlan, problem: str) -> None:
    scheduler.policy.next = bad  # type: ignore[attr-defined]
    with pytest.raises(InvalidPlan, match=problem):
        scheduler.schedule(0.0)
    check_pool(scheduler.pool)
    assert scheduler.pool.num_free == 8 and (scheduler.table.computed == 0).all()


def test_room_is_for_the_cached_tokens_too(scheduler: Scheduler) -> None:
    policy = scheduler.policy
    policy.next = plan([0], [4])  # type: ignore[attr-defined]
    scheduler.schedule(0.0)
    policy.next = plan([0], [2], reserve=[5])  # type: ignore[attr-defined]
    with pytest.raises(InvalidPlan, match="less room"):
        scheduler.schedule(0.0)


def test_books_chunks_tokens_and_preemptions(scheduler: Scheduler) -> None:
    policy, table = scheduler.policy, scheduler.table
    policy.next = plan([0], [4])  # type: ignore[attr-defined]
    step = scheduler.schedule(0.0)
    assert not step.emits.any() and table.computed[0] == 4 and table.generated[0] == 0
    policy.next = plan([0], [2], reserve=[6])  # type: ignore[attr-defined]
    step = scheduler.schedule(0.0)
    assert step.emits.all() and not step.decodes.any() and table.generated[0] == 1
    assert table.pending(np.array([0]))[0] == 1
    policy.next = plan([1], [6], preempt=[0])  # type: ignore[attr-defined]
    scheduler.schedule(0.0)
    assert table.state[0] == State.WAITING and table.computed[0] == 0
    assert table.pending(np.array([0]))[0] == 7, "prompt and the generated token are refilled"
    assert scheduler.preemptions == 1


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_prefill_tokens"):
        Limits(16, 32, 4)
    with pytest.raises(ValueError, match="max_rows"):
        Limits(16, 16, 0)


def test_the_order_of_the_last_batches_is_kept_over_steps(scheduler: Scheduler) -> None:
    policy, order = scheduler.policy, scheduler.table.last_batch_order
    for row, tokens, reserve in ((0, 6, 6), (1, 6, 6), (0, 1, 7)):
        policy.next = plan([row], [tokens], reserve=[reserve])  # type: ignore[attr-defined]
        scheduler.schedule(0.0)
    assert order[1] < order[0]


def test_blocks_go_back_when_the_last_token_is_launched(scheduler: Scheduler) -> None:
    policy = scheduler.policy
    for tokens, reserve in ((6, 6), (1, 7), (1, 8), (1, 9)):
        policy.next = plan([0], [tokens], reserve=[reserve])  # type: ignore[attr-defined]
        done = scheduler.release_finished(scheduler.schedule(0.0))
    assert done.tolist() == [0]
    assert scheduler.table.state[0] == State.DRAINING
    assert scheduler.pool.num_free == 8
    scheduler.finish(0)
    assert scheduler.table.state[0] == State.FREE


def test_table_columns_of_a_request() -> None:
    table = RequestTable(2)
    slo = SLO(ttft=0.5, tbt=0.1)
    row = table.add(
        Request("a", (1, 2), SamplingParams(max_tokens=3), slo, Tier.BEST_EFFORT, arrival=7.0)
    )
    assert (table.arrival[row], table.last_token[row]) == (7.0, 7.0)
    assert (table.ttft[row], table.tbt[row], table.jct[row]) == (0.5, 0.1, np.inf)
    assert table.tier[row] == Tier.BEST_EFFORT
    table.add(Request("b", (1,)))
    with pytest.raises(IndexError):
        table.add(Request("c", (1,)))
    table.remove(row)
    with pytest.raises(ValueError, match="free already"):
        table.remove(row)


class Asking(Policy):
    """Plans nothing; told: when it expected the step in flight to end."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def plan(self, view: View, now: float) -> BatchPlan:
        self.told.append(view.step_end(now))
        return BatchPlan()


def test_a_policy_is_told_when_the_step_in_flight_ends() -> None:
    policy = Asking()
    made = empty(policy)
    made.schedule(3.0)
    made.schedule(4.0, 4.5)
    made.schedule(5.0, 4.5)
    made.schedule(6.0)
    assert policy.told == [3.0, 4.5, 5.0, 6.0], "now, where nothing is in flight, or it is late"


def test_memory_grows_by_so_much_a_request() -> None:
    def kept(capacity: int) -> int:
        tracemalloc.start()
        made = empty(Scripted(), capacity, max_model_len=1000)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert made.table.num_free == capacity
        return size

    grown = (kept(5000) - kept(1000)) / 4000
    assert grown == pytest.approx(request_bytes(1000, 4), rel=0.05)
