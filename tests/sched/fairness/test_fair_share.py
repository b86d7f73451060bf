"""Tenants share a full engine by weight, whatever the policy, and nothing is left idle for it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.fairness.fair_share import KEPT, FairShares, may_have
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.request import Request, SamplingParams, Tier
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.ttft_estimator import TtftEstimator
from jaxserve.sched.state.request_table import HELD, WAITING
from tests.sched.driver import Drive

ONLINE = [name for name in policies() if not make_policy(name).hypothetical]
PROMPT, OUTPUT = 16, 4


def flooded(policy: str, first: int = 30, then: int = 10, weight: float = 1.0) -> Drive:
    """`heavy` has sent all of its requests before `light`, of that weight, sends any."""
    drive = Drive(policy, c=64, p=32, rows=4, blocks=512)
    for _ in range(first):
        drive.add(PROMPT, OUTPUT, tenant="heavy")
    for _ in range(3):
        drive.step(float(len(drive.plans)))
    for _ in range(then):
        drive.add(PROMPT, OUTPUT, arrival=3.0, tenant="light", weight=weight)
    return drive


def ends(drive: Drive, count: int) -> Counter[str]:
    """Whose the next requests are that end."""
    owners, ended = dict[int, int](), Counter[str]()
    while ended.total() < count:
        rows = np.flatnonzero(drive.table.state > 0)
        owners |= dict(zip(rows.tolist(), drive.table.tenant[rows].tolist(), strict=True))
        before = len(drive.ended)
        drive.step(float(len(drive.plans)))
        ended.update(("heavy", "light")[owners[row]] for row in drive.ended[before:])
    return ended


@pytest.mark.promise(13)
@pytest.mark.parametrize("policy", ONLINE)
def test_who_comes_behind_a_flood_has_its_share(policy: str) -> None:
    """Without shares all 26 that are left of the flood end first where order is by arrival."""
    drive = flooded(policy)
    found = ends(drive, 18)
    # fastserve has begun with many of the flood, and whoever has is not held back.
    assert found["light"] >= (4 if policy == "fastserve" else 6), found
    drive.to_the_end()


@pytest.mark.promise(13)
@pytest.mark.parametrize("policy", ["sarathi", "vllm", "edf", "priority"])
def test_shares_are_by_weight(policy: str) -> None:
    drive = flooded(policy, first=32, then=30, weight=3.0)
    ends(drive, 4)  # those that had begun
    found = ends(drive, 24)
    assert found["light"] / found["heavy"] == pytest.approx(3.0, abs=0.5)


@pytest.mark.parametrize("policy", ["sarathi", "priority", "goodput", "bros"])
def test_one_tenant_is_served_as_if_there_were_none(policy: str) -> None:
    plans = []
    for tenant in ("", "alone"):
        drive = Drive(policy, c=64, p=32, rows=4, blocks=60)
        rng = np.random.default_rng(1)
        for index in range(20):
            prompt, output = int(rng.integers(2, 30)), int(rng.integers(1, 9))
            tier = Tier(index % 2)
            drive.add(prompt, output, tier=tier, tenant=tenant, ttft=float(rng.uniform(1, 9)))
        drive.to_the_end()
        plans.append(drive.plans)
    assert plans[0] == plans[1]


def test_tiers_stay_what_the_policy_makes_of_them() -> None:
    """The best-effort requests of one do not wait for turns with another's real-time ones."""
    drive = Drive("priority", c=64, p=32, rows=4)
    for _ in range(12):
        drive.add(PROMPT, OUTPUT, tenant="heavy", tier=Tier.BEST_EFFORT)
    drive.step()
    late = [drive.add(PROMPT, OUTPUT, tenant="light") for _ in range(2)]
    assert set(late) <= set(drive.step(1.0)), "it takes their rows at once"


def test_those_who_make_room_give_all_of_their_blocks() -> None:
    """Those of K and those of V."""
    drive = Drive("priority", c=64, p=64, rows=16, blocks=16, block_size=4)
    for _ in range(2):
        drive.add(12, OUTPUT, tenant="heavy", tier=Tier.BEST_EFFORT)
    drive.step()
    assert drive.pool.num_free == 4
    late = [drive.add(4, 1, tenant=("heavy", "light")[i % 2]) for i in range(8)]
    assert set(late) == set(drive.step(1.0)), "16 blocks are for eight"


def test_who_is_held_back_can_end_and_is_counted() -> None:
    drive = flooded("sarathi")
    drive.step(4.0)
    table, scheduler = drive.table, drive.scheduler
    held = np.flatnonzero(table.state == HELD)
    queued = len(table.queued())
    assert len(held) > 20 and queued == len(held) + len(table.in_state(WAITING))
    scheduler.finish(int(held[0]), complete=False)
    drive.live -= 1
    assert len(table.queued()) == queued - 1
    drive.to_the_end()


def test_a_preempted_request_is_not_held_back() -> None:
    drive = Drive("sarathi", c=64, p=64, rows=8, blocks=40)
    for index in range(8):
        drive.add(12, 16, tenant="heavy" if index % 2 else "light")
    while drive.live:
        drive.step(float(len(drive.plans)))
        again = drive.table.preemptions > 0
        assert not (again & (drive.table.state == HELD)).any()
    assert drive.preempted, "the pool is too large"


def test_whoever_was_idle_has_saved_up_nothing() -> None:
    shares = FairShares()
    heavy, light = (shares.join(name, None, _nobody) for name in ("heavy", "light"))
    shares.charge(np.array([heavy]), np.array([1000.0]))
    shares.left(heavy)
    assert shares.join("light", None, _nobody) == light
    assert shares.shares()["light"].counter == 1000.0
    # Nor has whoever comes to others that wait.
    shares.charge(np.array([heavy]), np.array([500.0]))
    shares.join("new", None, lambda: np.array([heavy, light]))
    assert shares.shares()["new"].counter == 1000.0


def _nobody() -> np.ndarray:
    return np.zeros(0, np.int64)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=4),
    costs=st.lists(st.integers(1, 50), min_size=200, max_size=200),
    count=st.integers(1, 120),
)
@settings(max_examples=60, deadline=None)
def test_counters_stay_within_one_request(
    weights: list[float], costs: list[int], count: int
) -> None:
    """While all wait, what two tenants got, over their weights, differs by a request of theirs at
    most: the bound of fair queueing."""
    shares = FairShares()
    numbers = [shares.join(str(i), weight, _nobody) for i, weight in enumerate(weights)]
    tenants, cost = np.repeat(numbers, 200 // len(weights) + 1)[:200], np.array(costs)
    order = list(shares.in_turn(tenants, cost))
    assert sorted(order) == list(range(200)), "nobody is left out"
    got = np.zeros(len(weights))
    left = Counter(tenants.tolist())
    for index in order[:count]:
        owner = tenants[index]
        got[owner] += cost[index] / weights[owner]
        left[owner] -= 1
        if min(left.values()) == 0:
            break
        assert got.max() - got.min() <= cost.max() / min(weights) + 1e-9


@pytest.mark.promise(13)
@given(seed=st.integers(0, 1000), policy=st.sampled_from(ONLINE), tenants=st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_everybody_is_served(seed: int, policy: str, tenants: int) -> None:
    """And the engine is never idle while somebody waits: `Drive` finds that nothing is planned."""
    rng = np.random.default_rng(seed)
    drive = Drive(
        policy, c=64, p=int(rng.choice([16, 64])), rows=int(rng.integers(1, 6)), blocks=80
    )
    for _ in range(25):
        drive.add(
            int(rng.integers(1, 40)),
            int(rng.integers(1, 8)),
            tier=Tier(int(rng.integers(0, 2))),
            tenant=str(rng.integers(0, tenants)),
            weight=float(rng.choice([1, 4])),
        )
    drive.to_the_end()


def test_a_newcomer_is_told_of_its_own_share_alone() -> None:
    drive = flooded("sarathi", first=40, then=0)
    first = TtftEstimator(Backlog.from_scheduler(drive.scheduler, 3.0, 3.0))
    ask = {"prompt": (0,) * PROMPT, "sampling": SamplingParams(OUTPUT)}
    own = first.wait(Request("a", tenant="heavy", **ask), 3.0).seconds
    other = first.wait(Request("b", tenant="light", **ask), 3.0).seconds
    assert other < own / 3
    for _ in range(5):
        first.arrived(Request("b", tenant="light", **ask), 3.0)
    assert other < first.wait(Request("b", tenant="light", **ask), 3.0).seconds < own


def test_a_burst_of_a_newcomer_is_not_all_before_who_comes_then() -> None:
    """However much was computed for the others before it came: it has saved up nothing."""
    drive = flooded("sarathi", first=40, then=10)
    drive.scheduler.shares.charge(np.array([0, 1]), np.array([1e6, 1e6]))
    ask = {"prompt": (0,) * PROMPT, "sampling": SamplingParams(OUTPUT)}
    waits = []
    for tenant in ("heavy", "light", "idle"):
        first = TtftEstimator(Backlog.from_scheduler(drive.scheduler, 3.0, 3.0))
        alone = first.wait(Request("b", tenant=tenant, **ask), 3.0).seconds
        for _ in range(100):
            first.arrived(Request("n", tenant="new", **ask), 3.0)
        waits.append((alone, first.wait(Request("b", tenant=tenant, **ask), 3.0).seconds))
    (heavy, slower), (light, later), (idle, last) = waits
    assert slower < 2.2 * heavy and later < 2.2 * light and last < 2.2 * idle, waits


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [1.0, 3.0], [2.0, 1.0, 1.0]])
def test_places_come_to_be_shared_by_weight(weights: list[float]) -> None:
    capacity, mine, rng = 1000, [0] * len(weights), np.random.default_rng(0)
    for _ in range(4000):
        for index, weight in enumerate(weights):
            while mine[index] + 1 <= may_have(sum(mine), capacity, weight):
                mine[index] += 1
        assert sum(mine) <= capacity
        mine[int(rng.choice(len(mine), p=np.array(mine) / sum(mine)))] -= 1  # one has ended
    for have, weight in zip(mine, weights, strict=True):
        fair = capacity * KEPT * weight / (1 + KEPT * sum(weights))
        assert have == pytest.approx(fair, rel=0.1, abs=2 * KEPT)
