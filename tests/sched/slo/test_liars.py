"""Targets that nobody could meet are worth nothing to who claims them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import BatchFeatures, CostModel, InferMaxCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.reachability import NOTHING, Alone, targets_that_count
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.sched.slo.ttft_estimator import TtftEstimator
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.sched.driver import Drive
from tests.simulator.grouped import simulate

PLACE = system("llama-3-8b@a100")
LINEAR = PLACE.cost_model
PADDING = Padding(rows=(1, 4, 16, 64), tokens=(16, 64, 512))
TTFT = 4.0  # of those who are honest; all of them can be served in less
LIARS, HONEST = 60, 24


def crowd(lies: dict[str, float]) -> tuple[Workload, np.ndarray]:
    """84 requests within two seconds, of which 60 lie: more than can be served within TTFT. Who is
    honest, bool [84]."""
    rng = np.random.default_rng(0)
    count = LIARS + HONEST
    honest = np.ones(count, bool)
    honest[rng.permutation(count)[:LIARS]] = False
    targets = {
        name: np.where(honest, TTFT if name == "ttft" else np.inf, lies.get(name, np.inf))
        for name in ("ttft", "tbt", "jct")
    }
    terms = dataclasses.replace(SloColumns.none(count), **targets)
    lengths = Lengths(np.full(count, 1500), np.full(count, 60))
    return Workload.create(np.sort(rng.uniform(0, 2, count)), lengths, terms=terms), honest


@pytest.mark.promise(14)
@pytest.mark.parametrize(
    ("lies", "refuse_late"),
    [({"ttft": 1e-6}, 0.75), ({"ttft": 1e-6, "tbt": 1e-9, "jct": 1e-6}, None)],
)
@pytest.mark.parametrize("policy", ["edf", "bros", "accelgen", "goodput"])
def test_liars_displace_nobody(
    policy: str, lies: dict[str, float], refuse_late: float | None
) -> None:
    workload, honest = crowd(lies)
    limits = Limits(4096, 4096, 16) if policy == "bros" else Limits(2048, 512, 16)
    found = simulate(
        policy, workload, PLACE, limits=limits, refuse_late=refuse_late, compiled=False
    ).requests
    assert not found.refused[honest].any()
    assert (found.ttft[honest] <= TTFT).all()
    assert found.finished[~honest & ~found.refused].all()  # they wait, but not for ever
    assert found.ttft[~honest].mean() > found.ttft[honest].mean()


def test_who_claims_a_whole_job_in_no_time_is_refused_as_others_are() -> None:
    """Its first token would come after all of it is due: without that 14 who are honest are refused
    for those who are before them by a deadline that they do not keep, and none of these."""
    refused = []
    for lie in ({"ttft": 0.6}, {"jct": 0.6}):
        workload, honest = crowd(lie)
        limits = Limits(2048, 512, 16)
        found = simulate(
            "edf", workload, PLACE, limits=limits, refuse_late=0.75, compiled=False
        ).requests
        refused.append((found.refused[honest].sum(), found.refused[~honest].sum()))
    assert refused[0] == refused[1] and refused[1][0] < 8, refused


def test_a_target_that_can_be_met_counts_as_it_is() -> None:
    alone = Alone(0.2, 0.01, 0.5)
    assert targets_that_count(SLO(0.3, 0.02, 0.6), alone) == (0.3, 0.02, 0.6, 2.0)
    lies = targets_that_count(SLO(1e-9, 1e-9, 1e-9, 1e-9), alone)
    assert lies == pytest.approx((0.2, 0.01, 0.5, 0.01), rel=1e-5)
    assert all(np.less(lies, (0.2, 0.01, 0.5, 0.01)))  # nor do they count as what can be met
    assert targets_that_count(SLO(), alone) == (math.inf,) * 4
    never = Request("r", (0,) * 9, SamplingParams(4))
    assert Alone.from_request(never, PLACE.cost_model.batch_time, 4) is NOTHING


def test_what_the_table_has_is_what_counts() -> None:
    drive = Drive("edf", c=16, p=16)
    row = drive.add(prompt=40, output=8, ttft=1e-6, tbt=1e-6, jct=1e-6)
    table, steps = drive.table, np.array([16, 16, 8])
    first = float((1e-3 + 1e-4 * steps).sum())
    assert table.alone[row] == pytest.approx(first)
    assert table.ttft[row] == table.jct[row] == pytest.approx(first, rel=1e-5)
    assert table.tbt[row] == pytest.approx(1e-3 + 1e-4, rel=1e-5)


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    limit=st.sampled_from([1, 2, 500]),
    chunk=st.sampled_from([1, 7, 512, 4096]),
    padding=st.sampled_from([None, PADDING]),
    model=st.sampled_from([LINEAR, InferMaxCostModel(LINEAR, (1e-6, 2e-8, 3e-11), 0.5)]),
)
@settings(max_examples=60, deadline=None)
def test_many_at_once_are_as_one_by_one(
    lengths: list[int], limit: int, chunk: int, padding: Padding | None, model: CostModel
) -> None:
    """Bit for bit: one is what an engine asks, the other what compiled simulations do."""

    def step_time(batch: BatchFeatures) -> Any:
        return model.batch_time(batch if padding is None else batch.padded(padding))

    prompts = np.array(lengths)
    many = Alone.from_lengths(prompts, np.full(len(prompts), limit), step_time, chunk)
    sampling, slo = SamplingParams(limit), SLO(ttft=1.0)
    each = [
        Alone.from_request(Request("r", (0,) * n, sampling, slo), step_time, chunk) for n in lengths
    ]
    for name in ("ttft", "tbt", "jct"):
        assert getattr(many, name).tolist() == [getattr(one, name) for one in each]


@given(
    patience=st.integers(3, 12),
    asked=st.lists(st.sampled_from([1e-6, 2.0, 5.0]), min_size=10, max_size=40),
    burst=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_who_is_late_lets_others_pass_but_not_for_ever(
    patience: int, asked: list[float], burst: int
) -> None:
    """A request that waits is passed only by those that came within `patience`, or its own target,
    after it, and one that can be in time by none that cannot."""
    drive = Drive(f"edf:patience={patience}", c=16, p=16, rows=4)
    began: dict[int, int] = {}
    came = [index // burst for index in range(len(asked))]
    for now in range(4 * len(asked)):
        for index, ttft in enumerate(asked):
            if came[index] == now:
                drive.add(prompt=16, output=1, arrival=float(now), ttft=ttft)
        if drive.live:
            before = set(drive._starts)
            drive.step(float(now))
            began |= {seq: now for seq in drive._starts if seq not in before}
    assert len(began) == len(asked), "somebody never began"
    for late, start in began.items():
        passed = [o for o, at in began.items() if at < start and came[o] > came[late]]
        last = came[late] + max(patience, asked[late])
        assert all(came[other] <= last for other in passed)
    hopeless = [i for i, ttft in enumerate(asked) if ttft < 1e-3]
    for liar in hopeless:
        at = began[liar]
        for other, start in began.items():
            due = came[other] + asked[other]
            waits = came[other] <= at < start and at <= due - 0.01
            assert not waits or at == came[liar] or came[liar] + patience <= due


@pytest.mark.parametrize("tier", Tier)
def test_who_has_no_targets_does_not_wait_for_the_end_of_an_overload(tier: Tier) -> None:
    """Twice as many come as can be served, for 20 s; a step of a second has one prompt. Best-effort
    requests do wait for it: nobody's target is missed for them."""
    drive = Drive("edf:patience=6", c=16, p=16, rows=4)
    bare, began = drive.add(prompt=16, output=1, tier=tier), None
    for now in range(20):
        for _ in range(2):
            drive.add(prompt=16, output=1, arrival=float(now), ttft=4.0)
        if bare in drive.step(float(now)):
            began = now
            break
    assert began is None if tier == Tier.BEST_EFFORT else began is not None and 2 <= began <= 8


@pytest.mark.parametrize("now", [0.0, 1e5, 1e7])
def test_liars_are_behind_from_the_moment_they_come(now: float) -> None:
    """Also on a host that has been up for months: its clock is that of the engine."""
    drive = Drive("edf", c=16, p=16)
    honest = Request("honest", (0,) * 16, SamplingParams(4), SLO(ttft=TTFT))
    first = TtftEstimator(Backlog.from_scheduler(drive.scheduler, now, now))
    alone = first.wait(honest, now).seconds
    for length in range(20, 60):
        first.arrived(Request("liar", (0,) * length, SamplingParams(4), SLO(ttft=1e-6)), now)
    assert first.wait(honest, now).seconds == alone


def test_whose_patience_is_none_lets_nothing_lapse() -> None:
    assert Drive("edf:patience=0").policy.lapse is None  # type: ignore[attr-defined]


def test_tier_is_not_bought_with_a_target() -> None:
    """Where tiers come first, a best-effort request stays behind whatever it claims."""
    drive = Drive("priority", c=16, p=16, rows=1)
    drive.add(prompt=16, output=1, tier=Tier.BEST_EFFORT, ttft=1e-6)
    drive.add(prompt=16, output=1)
    assert list(drive.step(0.0)) == [1]
