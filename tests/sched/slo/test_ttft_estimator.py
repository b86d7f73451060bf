"""How long a request that comes now would wait, from what there is before it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.slo_admission import is_late, retry_s
from jaxserve.sched.slo.ttft_estimator import TtftEstimator, Wait
from tests.sched.driver import Drive

# A step takes 1 ms and 0.1 ms for each token, as `FLAT` has it.
BIAS, TOKEN = 1e-3, 1e-4


def request(prompt: int, tier: Tier = Tier.REALTIME, ttft: float | None = None) -> Request:
    return Request("new", (0,) * prompt, SamplingParams(32), SLO(ttft=ttft), tier)


def waits(drive: Drive, now: float = 0.0) -> TtftEstimator:
    return TtftEstimator(Backlog.from_scheduler(drive.scheduler, now, now))


def seconds(drive: Drive, prompt: int, tier: Tier = Tier.REALTIME) -> float:
    return waits(drive).wait(request(prompt, tier), 0.0).seconds


def test_alone_it_waits_for_its_own_prompt() -> None:
    found = waits(Drive("sarathi")).wait(request(20), 0.0)
    assert found.seconds == found.alone == pytest.approx(BIAS + 20 * TOKEN)


def test_a_prompt_in_chunks_takes_a_step_each() -> None:
    assert seconds(Drive("sarathi", c=16, p=8), 24) == pytest.approx(3 * (BIAS + 8 * TOKEN))
    assert seconds(Drive("sarathi_pc", c=16, p=8), 32) == pytest.approx(2 * (BIAS + 16 * TOKEN))


def test_prompts_before_it_are_computed_first() -> None:
    drive = Drive("sarathi", c=16, p=16)
    for _ in range(3):
        drive.add(prompt=16, output=8)
    assert seconds(drive, 16) == pytest.approx(4 * (BIAS + 16 * TOKEN))


def test_what_is_cached_is_not_waited_for() -> None:
    drive = Drive("sarathi", prefix_caching=True, block_size=4)
    keys = tuple(b"abcde"[:end] for end in range(1, 6))
    drive.add(prompt=20, output=1, keys=keys)
    came = request(20)
    asked = dataclasses.replace(came, block_keys=keys)
    assert drive.scheduler.cached(asked) == 0
    drive.to_the_end()
    assert drive.scheduler.cached(asked) == 16, "the last block is computed again"
    assert drive.scheduler.cached(dataclasses.replace(asked, block_keys=(b"x", b"xb"))) == 0
    first = waits(drive)
    assert first.wait(came, 0.0, 16).seconds == pytest.approx(BIAS + 4 * TOKEN)
    first.arrived(came, 0.0, 16)
    assert first.wait(came, 0.0).seconds == pytest.approx(BIAS + 24 * TOKEN)


def test_those_that_came_since_count_too() -> None:
    first = waits(Drive("sarathi", c=16, p=16, rows=64, blocks=1024))
    alone = first.wait(request(16), 0.0)
    for count in range(1, 41):
        first.arrived(request(16), 0.0)
        behind = first.wait(request(16), 0.0)
        assert behind.seconds == pytest.approx((count + 1) * alone.seconds)
        assert behind.alone == alone.alone


def test_a_burst_that_comes_to_an_idle_engine_waits_for_each_other() -> None:
    """However long ago it was that there was something to do."""
    first = waits(Drive("sarathi", c=16, p=16, rows=64, blocks=1024))
    alone = first.wait(request(16), 100.0)
    for _ in range(3):
        first.arrived(request(16), 100.0)
    assert first.wait(request(16), 100.0).seconds == pytest.approx(4 * alone.seconds)


def test_the_step_on_the_device_is_waited_for() -> None:
    drive = Drive("sarathi")
    first = TtftEstimator(Backlog.from_scheduler(drive.scheduler, 10.0, 10.5))
    assert first.wait(request(20), 10.2).seconds == pytest.approx(0.3 + BIAS + 20 * TOKEN)
    # What was predicted has gone by: it waits for its own prompt, whatever there was before it.
    assert first.wait(request(20), 11.0).seconds == pytest.approx(BIAS + 20 * TOKEN)


@pytest.mark.parametrize(
    ("policy", "behind"), [("sarathi", True), ("priority", False), ("bros", False)]
)
def test_who_is_behind_best_effort_requests(policy: str, behind: bool) -> None:
    drive, empty = Drive(policy, c=64, p=64), Drive(policy, c=64, p=64)
    for _ in range(6):
        drive.add(prompt=30, output=8, tier=Tier.BEST_EFFORT)
    alone = seconds(empty, 30)
    assert (seconds(drive, 30) > 1.5 * alone) is behind
    assert seconds(drive, 30, Tier.BEST_EFFORT) > 1.5 * alone


def test_a_policy_that_says_nothing_serves_the_newcomer_first() -> None:
    drive = Drive("fastserve")
    for _ in range(6):
        drive.add(prompt=30, output=8)
    assert make_policy("fastserve").queue_priority(None, 0.0) is None
    assert seconds(drive, 30) == pytest.approx(seconds(Drive("fastserve"), 30))


@pytest.mark.parametrize("scarce", [{"rows": 2}, {"blocks": 12, "block_size": 4}])
def test_and_makes_room_for_it(scarce: dict[str, Any]) -> None:
    """It preempts those that run: nobody waits until they have written all that they will."""
    drive = Drive("fastserve", **scarce)
    for _ in range(40):
        drive.table.output_lengths.add(20)
    for _ in range(2):
        drive.add(prompt=12, output=16)
    served(drive, 3)
    # Beside the tokens of the two.
    assert seconds(drive, 12) <= seconds(Drive("fastserve", **scarce), 12) + 2 * TOKEN


def test_the_earlier_deadline_comes_first() -> None:
    drive = Drive("edf", c=16, p=16)
    for _ in range(4):
        drive.add(prompt=16, output=8, ttft=5.0)
    urgent = waits(drive).wait(request(16, ttft=1.0), 0.0)
    patient = waits(drive).wait(request(16, ttft=9.0), 0.0)
    assert urgent.seconds == urgent.alone
    assert patient.seconds == pytest.approx(5 * urgent.seconds)


def served(drive: Drive, steps: int) -> None:
    for _ in range(steps):
        drive.step()


def test_a_full_batch_is_waited_for() -> None:
    """Outputs have 20 tokens, and four rows have 5 of theirs: one is free in 15 steps or so."""
    drive = Drive("sarathi", rows=4)
    for _ in range(40):
        drive.table.output_lengths.add(20)
    for _ in range(4):
        drive.add(prompt=8, output=32)
    free = seconds(Drive("sarathi", rows=4), 8)
    served(drive, 5)
    decode = BIAS + 4 * TOKEN
    assert 12 * decode < seconds(drive, 8) - free < 18 * decode


def test_those_before_it_write_no_more_than_they_may() -> None:
    """Outputs of others, which were cut at 64 tokens, say nothing of theirs."""
    found = {}
    for limit in (8, 64):
        drive = Drive("sarathi", rows=4, blocks=1024)
        for _ in range(40):
            drive.table.output_lengths.add(64, cut=True)
        for _ in range(24):
            drive.add(prompt=8, output=limit)
        served(drive, 3)
        found[limit] = seconds(drive, 8)
    assert 4 * found[8] < found[64]


def test_a_full_pool_is_waited_for() -> None:
    drive = Drive("sarathi", blocks=24, block_size=4)
    for _ in range(40):
        drive.table.output_lengths.add(20)
    for _ in range(3):
        drive.add(prompt=12, output=16)
    served(drive, 3)
    assert drive.pool.num_free < 6
    assert seconds(drive, 12) > seconds(drive, 1) > 5 * BIAS


def test_best_effort_blocks_are_free_to_those_who_may_take_them() -> None:
    found = {}
    for policy in ("priority", "sarathi"):
        drive = Drive(policy, blocks=24, block_size=4)
        for _ in range(40):
            drive.table.output_lengths.add(20)
        for _ in range(3):
            drive.add(prompt=12, output=16, tier=Tier.BEST_EFFORT)
        served(drive, 3)
        found[policy] = seconds(drive, 12)
    assert found["priority"] < 2 * seconds(Drive("priority", blocks=24, block_size=4), 12)
    assert found["sarathi"] > 2 * found["priority"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    policy=st.sampled_from([name for name in policies() if name != "oracle"]),
    jobs=st.lists(
        st.tuples(
            st.integers(1, 20),
            st.integers(1, 12),
            st.sampled_from(Tier),
            st.none() | st.floats(0.01, 10.0),
        ),
        max_size=10,
    ),
    steps=st.integers(0, 8),
    prompt=st.integers(1, 20),
    tier=st.sampled_from(Tier),
    ttft=st.none() | st.floats(0.01, 10.0),
)
def test_whatever_there_is(
    policy: str,
    jobs: list[tuple[int, int, Tier, float | None]],
    steps: int,
    prompt: int,
    tier: Tier,
    ttft: float | None,
) -> None:
    """A finite time, never less than alone, and never less for one more that came before, unless
    lots are drawn anew."""
    drive = Drive(policy, blocks=64, host_slots=64)
    for length, output, whose, target in jobs:
        drive.add(prompt=length, output=output, tier=whose, ttft=target)
    for _ in range(steps):
        if drive.live:
            drive.step()
    first, mine = waits(drive), request(prompt, tier, ttft)
    found = first.wait(mine, 0.0)
    assert math.isfinite(found.seconds) and found.seconds >= found.alone > 0
    first.arrived(mine, 0.0)
    assert policy == "random" or first.wait(mine, 0.0).seconds >= found.seconds - 1e-12


def test_who_is_late() -> None:
    long, own = Wait(2.1, 0.1), request(9, ttft=1.1)
    assert is_late(long, own, 0.75) and retry_s(long, own, 0.75) == pytest.approx(1.25)
    assert is_late(Wait(0.9, 0.1), own, 0.75) and not is_late(Wait(0.8, 0.1), own, 0.75)
    assert not is_late(Wait(0.9, 0.1), own, 1.0)
    for other in (
        request(9),
        request(9, Tier.BEST_EFFORT, ttft=1.1),
        Request("new", (0,), slo=SLO(ttft=1.1), serve_late=True),
    ):
        assert not is_late(long, other, 0.0) and retry_s(long, other, 0.0) == 0
    assert not is_late(Wait(2.0, 1.5), own, 0.0), "an idle engine, too, would miss it"
    assert not is_late(Wait(1.0, 1.0), own, 0.0), "an idle engine would not"
    assert not is_late(Wait(99.0, 0.1), own, math.inf)
