"""What best-effort requests cost the real-time ones beside them, and what each tier holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.sched.cache.cache_kinds import HIDDEN, CacheKind, Direction
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.plan import BatchPlan, Checkpoint, Join, Preempt, ProjectToKV
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.request import Request, SamplingParams, Tier
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo.tiers import SHARED, blocks_used, lengthening
from jaxserve.sched.step import Step

RT, BE = Tier.REALTIME, Tier.BEST_EFFORT
_COSTS = {field.name: 1e-5 * (i + 1) for i, field in enumerate(dataclasses.fields(Coefficients))}
COST = LinearCostModel(Coefficients(**_COSTS), num_layers=3)


class Told(Policy):
    """Plans what it is told."""

    hybrid_cache = True
    moves_cache = True

    def __init__(self) -> None:
        self.next = BatchPlan()

    def plan(self, view: View, now: float) -> BatchPlan:
        return self.next


class Served:
    """A scheduler, and the tiers of the requests in it."""

    def __init__(self, *tiers: Tier, greedy: bool = True) -> None:
        self.policy = Told()
        self.scheduler = Scheduler(
            self.policy,
            Limits(64, 64, 8),
            num_blocks=64,
            block_size=4,
            max_model_len=64,
            capacity=8,
            cost_model=COST,
            host_slots=64,
            rho=1e-6,
        )
        for number, tier in enumerate(tiers):
            sampling = SamplingParams(20, temperature=0.0 if greedy or tier == RT else 1.0)
            self.scheduler.add(Request(str(number), (1,) * (number + 5), sampling, tier=tier))

    def step(
        self, *rows: int, count: int = 1, kind: CacheKind = CacheKind.KV, **more: object
    ) -> Step:
        which = np.array(rows)
        counts = np.full(len(rows), count)
        reserve = self.scheduler.table.computed[which] + counts
        kinds = np.full(len(rows), kind)
        self.policy.next = BatchPlan(which, counts, reserve, kinds, **more)  # type: ignore[arg-type]
        step = self.scheduler.schedule(0.0)
        self.scheduler.receive(step.emitting, 0.0)
        return step

    def cost(self, step: Step) -> float:
        took = float(COST.batch_time(step.features()))
        return lengthening(step, self.scheduler.view, took)


def took(step: Step) -> float:
    return float(COST.batch_time(step.features()))


@pytest.mark.parametrize("kind", CacheKind)
def test_it_is_what_the_step_takes_longer_than_the_real_time_rows_alone(kind: CacheKind) -> None:
    both, alone = Served(RT, BE, RT, greedy=False), Served(RT, BE, RT, greedy=False)
    for count in (3, 2, 1):  # chunks of the first prompts; the others' are longer
        longer, shorter = (
            both.step(0, 1, 2, count=count, kind=kind),
            alone.step(0, 2, count=count, kind=kind),
        )
        assert both.cost(longer) == pytest.approx(took(longer) - took(shorter))
        assert both.cost(longer) > 0 == alone.cost(shorter)


def test_there_is_none_without_both_tiers() -> None:
    for tier in Tier:
        served = Served(tier, tier)
        assert served.cost(served.step(0, 1, count=3)) == 0


def test_best_effort_caches_that_make_way_are_part_of_it() -> None:
    served = Served(RT, BE)
    served.step(0, 1, count=3)
    move = Checkpoint(np.array([1]), np.array([1]), np.array([3])), Preempt.whole(np.array([1]))
    longer = served.step(0, operations=move)
    assert served.cost(longer) == pytest.approx(3 * _COSTS["swapped_slot"] * 4)
    served = Served(RT, RT)
    served.step(0, 1, count=3)
    assert served.cost(served.step(0, operations=move)) == 0


def test_real_time_rows_widen_their_own_caches() -> None:
    both, alone = Served(RT, BE), Served(RT, BE)
    for served, rows in ((both, [0, 1]), (alone, [0])):
        served.step(*rows, count=3, kind=CacheKind.HIDDEN)
        assert (served.scheduler.pool.kind[rows] == HIDDEN).all()
    longer = both.step(0, 1, operations=(ProjectToKV(np.array([0, 1])),))
    shorter = alone.step(0, operations=(ProjectToKV(np.array([0])),))
    assert both.cost(longer) == pytest.approx(took(longer) - took(shorter))


def test_a_block_that_both_tiers_fill_counts_once() -> None:
    served = Served(BE, RT, BE)
    pool, tier = served.scheduler.pool, served.scheduler.table.tier
    right = np.array([Direction.RIGHT])
    served.step(0, count=1, directions=right)
    served.step(2, count=1, kind=CacheKind.HIDDEN, directions=right)
    found = blocks_used(pool, tier)
    assert {key: n for key, n in found.items() if n} == {
        ("kv", "best_effort"): 2,
        ("hidden", "best_effort"): 1,
    }
    join = Join(1, pool.blocks_of(0).T.copy())
    served.step(1, count=1, operations=(join,), directions=np.array([Direction.LEFT]))
    found = blocks_used(pool, tier)
    assert {key: n for key, n in found.items() if n} == {
        ("kv", SHARED): 2,
        ("hidden", "best_effort"): 1,
    }
    assert sum(found.values()) == pool.num_used
