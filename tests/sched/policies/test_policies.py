"""Every policy serves everything it is given, within the limits; vllm and sarathi as published."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import State
from tests.cost_models import FLAT
from tests.sched.cache.invariants import check_pool


def make(policy: str, *, c: int = 64, p: int = 64, rows: int = 8, blocks: int = 64) -> Scheduler:
    return Scheduler(
        make_policy(policy),
        Limits(c, p, rows),
        num_blocks=blocks,
        block_size=4,
        max_model_len=48,
        capacity=64,
        cost_model=FLAT,
    )


def add(scheduler: Scheduler, prompt: int, output: int) -> int:
    name = f"r{scheduler.table.num_free}"
    return scheduler.add(Request(name, (1,) * prompt, SamplingParams(max_tokens=output)))


def step(scheduler: Scheduler, now: float = 0.0) -> tuple[BatchPlan, list[int]]:
    """One iteration as the engine runs it; returns the plan and the rows that ended."""
    booked = scheduler.schedule(now)
    done = scheduler.release_finished(booked).tolist()
    scheduler.receive(booked.emitting, now)
    for row in done:
        scheduler.finish(row)
    check_pool(scheduler.pool)
    return booked.plan, done


def as_dict(plan: BatchPlan) -> dict[int, int]:
    return dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))


def test_vllm_runs_prefills_alone_and_first() -> None:
    scheduler = make("vllm")
    a, b = add(scheduler, 10, 5), add(scheduler, 12, 5)
    assert as_dict(step(scheduler)[0]) == {a: 10, b: 12}
    assert as_dict(step(scheduler)[0]) == {a: 1, b: 1}
    c = add(scheduler, 7, 5)
    assert as_dict(step(scheduler)[0]) == {c: 7}
    assert as_dict(step(scheduler)[0]) == {a: 1, b: 1, c: 1}


def test_vllm_waits_behind_a_prompt_that_does_not_fit() -> None:
    scheduler = make("vllm", c=32, p=32)
    a, big, small = add(scheduler, 20, 5), add(scheduler, 30, 5), add(scheduler, 4, 5)
    assert as_dict(step(scheduler)[0]) == {a: 20}
    assert as_dict(step(scheduler)[0]) == {big: 30}
    assert as_dict(step(scheduler)[0]) == {small: 4}


def test_vllm_preempts_the_last_to_arrive_and_recomputes_it() -> None:
    scheduler = make("vllm", blocks=8)  # 16 tokens of K and V
    a, b = add(scheduler, 8, 8), add(scheduler, 7, 8)
    assert as_dict(step(scheduler)[0]) == {a: 8, b: 7}
    plan, _ = step(scheduler)  # a needs a third block pair: b goes
    assert as_dict(plan) == {a: 1}
    assert plan.preempted.tolist() == [b]
    assert scheduler.table.state[b] == State.WAITING
    assert scheduler.table.preemptions[b] == 1
    while scheduler.table.state[a] != State.FREE:
        step(scheduler)
    assert as_dict(step(scheduler)[0]) == {b: 8}  # prompt and the token it had


def test_sarathi_fills_the_budget_with_chunks_beside_decodes() -> None:
    scheduler = make("sarathi", c=16, p=16)
    a = add(scheduler, 10, 9)
    assert as_dict(step(scheduler)[0]) == {a: 10}
    b, c = add(scheduler, 20, 9), add(scheduler, 9, 9)
    plan, _ = step(scheduler)
    assert as_dict(plan) == {a: 1, b: 15}
    assert plan.rows.tolist() == [a, b]
    assert scheduler.pool.held[b] == 5  # room for its whole prompt from the start
    assert as_dict(step(scheduler)[0]) == {a: 1, b: 5, c: 9}
    assert as_dict(step(scheduler)[0]) == {a: 1, b: 1, c: 1}


def test_sarathi_preempts_for_decodes_only() -> None:
    scheduler = make("sarathi", blocks=8)
    a, b = add(scheduler, 8, 8), add(scheduler, 7, 8)
    step(scheduler)
    plan, _ = step(scheduler)
    assert as_dict(plan) == {a: 1} and plan.preempted.tolist() == [b]
    assert as_dict(step(scheduler)[0]) == {a: 1}, "no memory for b: it waits, nobody is preempted"


def test_rows_limit_counts_those_that_hold_cache() -> None:
    scheduler = make("sarathi", rows=2)
    names = [add(scheduler, 3, 4) for _ in range(3)]
    assert set(as_dict(step(scheduler)[0])) == set(names[:2])
    for _ in range(3):
        step(scheduler)
    assert set(as_dict(step(scheduler)[0])) == {names[2]}


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'sarathi'"):
        make_policy("sarati")


def test_every_policy_says_what_it_is() -> None:
    for name, entry in policies().items():
        assert entry.summary and entry.source, name


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_prefill_tokens"):
        Limits(16, 32, 4)
    with pytest.raises(ValueError, match="max_rows"):
        Limits(16, 16, 0)


def test_priority_order_survives_many_preemptions() -> None:
    """First come, first served also after refills: requests end in order of arrival if all are
    alike."""
    scheduler = make("vllm", blocks=24, rows=6)
    order = [add(scheduler, 6, 12) for _ in range(10)]
    ends: list[int] = []
    while len(ends) < 10:
        ends += step(scheduler)[1]
    assert scheduler.preemptions > 0
    assert ends == order
    assert np.all(scheduler.table.state == State.FREE)
