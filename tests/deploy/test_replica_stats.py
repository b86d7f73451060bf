"""What a replica learns from its engine, and says of itself."""

from __future__ import annotations

import pytest

from jaxserve.deploy.replica_stats import WINDOW_S, ReplicaStats
from jaxserve.engine.output import FinishReason
from jaxserve.engine.stats import RequestStats
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.slo.verdict import Verdict
from tests.deploy.engine import Engine


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def tally(engine: Engine, clock: Clock) -> ReplicaStats:
    return ReplicaStats(engine, clock=clock, wall=lambda: 1000.0 + clock.now)


def serve(tally: ReplicaStats, number: int, ttft: float, slo_class: str = "chat") -> None:
    """A request with a target of half a second, and an output of 20 tokens."""
    slo = SLO(ttft=0.5)
    tally.on_arrival(number, Request(str(number), (1,), slo=slo, slo_class=slo_class))
    verdict = Verdict(slo, slo_class, Tier.REALTIME, ttft <= 0.5, None, None)
    stats = RequestStats(
        number, FinishReason.LENGTH, Tier.REALTIME, 1, 20, 0, 0.0, ttft, 1.0, verdict
    )
    tally.on_finish(stats)


def test_attainment_is_by_class_and_of_the_last_minute(tally: ReplicaStats, clock: Clock) -> None:
    serve(tally, 0, ttft=9.0)
    clock.now += WINDOW_S / 2
    serve(tally, 1, ttft=0.1)
    serve(tally, 2, ttft=9.0, slo_class="code")
    assert tally.load().ended == {"chat": 2, "code": 1}
    assert tally.load().met == {"chat": 1, "code": 0}
    clock.now += WINDOW_S / 2 + 1
    assert tally.load().ended == {"chat": 1, "code": 1}
    clock.now += WINDOW_S
    assert tally.load().ended == {} and tally.load().wait_share == 0.0


def test_the_wait_is_told_of_the_target_that_requests_have(tally: ReplicaStats) -> None:
    assert tally.load().wait_share == 0.0
    serve(tally, 0, ttft=0.1)
    assert tally.load().wait_share == 0.5  # the engine expects 0.25 s


def test_a_snapshot_has_what_was_learned_and_is_of_now(tally: ReplicaStats) -> None:
    serve(tally, 0, ttft=0.1)
    serve(tally, 1, ttft=9.0)
    found = tally.snapshot()
    assert (found.mean_output, found.attainment) == (20.0, 0.5)
    assert found.time == 1100.0 and found.free_blocks == found.num_blocks and not found.draining


def test_one_that_takes_no_more_says_so_as_of_now(tally: ReplicaStats, clock: Clock) -> None:
    clock.now += 50.0  # no step since
    found = tally.snapshot(draining=True)
    assert found.draining and found.time == 1150.0


def test_steps_that_take_longer_than_predicted_are_told(
    tally: ReplicaStats, engine: Engine
) -> None:
    before = tally.snapshot()
    engine.step()  # 8 ms for 9
    assert before.pace == 1.0 > tally.snapshot().pace > 8 / 9
