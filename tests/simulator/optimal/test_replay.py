"""Schedules as data: what is replayed is what was recorded, and what is wrong is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.simulator.optimal.replay import Replay, ReplayError, Schedule, replay, run
from jaxserve.simulator.systems.presets import PRESETS
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.simulator.grouped import simulate

COST = PRESETS["llama-2-7b@a100"].cost_model
POLICIES = ("vllm", "vllm_hy", "sarathi", "sarathi_nohy", "sarathi+ef", "rank_i", "infermax")


def workload(requests: list[tuple[int, int]], arrivals: list[float] | None = None) -> Workload:
    prompt, output = np.array(requests, np.int64).T
    return Workload.create(
        np.array(arrivals or [0.0] * len(requests)), Lengths(prompt.copy(), output.copy())
    )


def play(schedule: Schedule, load: Workload, m: int = 32, c: int = 16) -> Replay:
    return replay(schedule, load, COST, limits=Limits(c, c, len(load)), kv_tokens=m)


def schedule(*batches: list[int], preempt: tuple[tuple[int, int], ...] = ()) -> Schedule:
    tokens = np.array(batches)
    lost = np.zeros(tokens.shape, bool)
    for batch, request in preempt:
        lost[batch, request] = True
    return Schedule(tokens, lost)


@settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=8),
    spare=st.integers(0, 20),
    gap=st.sampled_from([0.0, 0.004]),
)
def test_a_recorded_schedule_replays_to_the_same(
    policy: str, requests: list[tuple[int, int]], spare: int, gap: float
) -> None:
    load = workload(requests, [gap * i for i in range(len(requests))])
    memory = int((load.prompt_len + load.output_len).max()) + spare
    limits = Limits(32, 32, len(load))
    recorded = run(make_policy(policy), load, COST, limits=limits, kv_tokens=memory)
    again = replay(recorded.schedule, load, COST, limits=limits, kv_tokens=memory)
    for name in ("start", "duration", "kv", "first_token", "finish"):
        np.testing.assert_allclose(getattr(again, name), getattr(recorded, name), atol=1e-12)
    # A policy may hold blocks ahead of need, a replay does not.
    assert (again.kv_used <= recorded.kv_used).all() and recorded.kv_used.max() <= memory


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulator_comes_to_the_same(policy: str) -> None:
    load = workload([(6, 8), (9, 5), (3, 7), (12, 2), (5, 9)])
    limits = Limits(24, 24, len(load))
    ours = run(make_policy(policy, watermark=0.0), load, COST, limits=limits, kv_tokens=24)
    result = simulate(
        make_policy(policy, watermark=0.0),
        load,
        COST,
        limits=limits,
        kv_tokens=24,
        block_size=1,
        overlap=False,
    )
    np.testing.assert_allclose(result.batches.duration, ours.duration)
    np.testing.assert_allclose(result.requests.first_token, ours.first_token)
    np.testing.assert_allclose(result.requests.finish, ours.finish)
    np.testing.assert_array_equal(result.batches.kv_used, ours.kv_used)
    assert result.summary()["latency_s"] == pytest.approx(ours.latency)
    assert result.summary()["num_preemptions"] == ours.schedule.preemptions


def test_a_batch_waits_for_its_requests() -> None:
    load = workload([(4, 1), (4, 1)], [0.0, 2.0])
    played = play(schedule([4, 0], [0, 4]), load)
    assert played.start.tolist() == [0.0, 2.0]
    assert played.makespan == 2.0 + played.duration[1]
    assert played.latency == pytest.approx(played.duration.sum())
    assert played.mean_ttft == pytest.approx(played.duration.mean())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (schedule([4, 4]), "2 requests have not ended"),
        (schedule([4, 4], [1, 1], [1, 0]), "all requests have ended after 2 of 3"),
        (schedule([4], [1]), "for 1 requests, not 2"),
    ],
)
def test_a_schedule_must_serve_its_workload(bad: Schedule, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        play(bad, workload([(4, 2), (4, 2)]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (schedule([5, 4], [1, 1]), "more tokens than are pending"),
        (schedule([4, 4], [1, 1], [1, 1], [1, 1]), "more blocks than are free"),
        (schedule([4, 4], [1, 1], preempt=((1, 1),)), "planned and preempted"),
    ],
)
def test_a_schedule_must_keep_to_the_limits(bad: Schedule, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        play(bad, workload([(4, 4), (4, 4)]), m=11)


def test_tokens_and_preemptions_must_match() -> None:
    with pytest.raises(ReplayError, match="one matrix each"):
        Schedule(np.zeros((2, 3), np.int64), np.zeros((3, 2), bool))
