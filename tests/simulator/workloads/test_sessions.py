"""Conversations and loops of agents: what follows what, when, and how much they share."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxserve.sched.request import SLO
from jaxserve.simulator.simulate.replay import with_slo
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.closed_loop import parse_closed_loop
from jaxserve.simulator.workloads.lengths import Uniform
from jaxserve.simulator.workloads.sessions import SESSIONS, Sessions
from jaxserve.simulator.workloads.shared_prefixes import reusable_tokens
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload, WorkloadError, poisson_arrivals
from tests.simulator.grouped import simulate

NAMES = sorted(SESSIONS)
SMALL = Sessions(
    system_prompts=(100, 50, 70),
    popularity=1.0,
    opening=Uniform(10, 20),
    follow_up=Uniform(1, 5),
    output=Uniform(1, 30),
    turns=4.0,
    pace=0.1,
    pause=2.0,
    together=1.0,
    max_context=100_000,
    source="made up",
)


def sample(sessions: Sessions, count: int, rate: float = 5.0, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    arrival, lengths, prefixes = sessions.sample(count, rate, poisson_arrivals, rng)
    return Workload.create(arrival, lengths, prefixes=prefixes)


def turns(made: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Turns after the first, and the turn before each. Others share a system prompt at most."""
    follows = (made.prefix_of >= 0) & (made.prefix_len == made.lengths.total[made.prefix_of])
    number = np.flatnonzero(follows)
    return number, made.prefix_of[number]


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_has_the_turn_before_and_something_new(name: str) -> None:
    made, sessions = sample(SESSIONS[name], 20_000), SESSIONS[name]
    after, before = turns(made)
    assert len(after) > len(made) / 2
    assert len(set(before.tolist())) == len(before), "a turn has one successor"
    assert (made.prompt_len[after] > made.lengths.total[before]).all()
    wait = made.arrival[after] - made.arrival[before]
    written = made.output_len[before] * sessions.pace
    assert (wait >= written - 1e-6).all()
    assert (wait - written).mean() == pytest.approx(sessions.pause, rel=0.1)
    assert made.lengths.total.max() <= sessions.max_context
    openings = np.setdiff1d(np.arange(len(made)), after)
    shared = made.prefix_len[openings]
    assert set(shared.tolist()) <= {0, *sessions.system_prompts}
    assert (shared > 0).sum() >= len(openings) - len(sessions.system_prompts)


def test_system_prompts_follow_zipfs_law() -> None:
    made = sample(SMALL, 40_000)
    openings = np.setdiff1d(np.arange(len(made)), turns(made)[0])
    counts = [int((made.prefix_len[openings] == tokens).sum()) for tokens in (100, 50, 70)]
    assert np.array(counts) / sum(counts) == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.02)


def test_turns_are_geometric_and_end_at_the_longest_context() -> None:
    made = sample(SMALL, 40_000)
    assert 1 - len(turns(made)[0]) / len(made) == pytest.approx(1 / 4, abs=0.01)
    short = sample(dataclasses.replace(SMALL, max_context=160), 5_000)
    assert 150 < short.lengths.total.max() <= 160
    assert 1 - len(turns(short)[0]) / len(short) > 0.35


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_requests_come_at_the_rate_from_the_start(name: str, rate: float) -> None:
    found = [
        WorkloadSpec(name, rate=rate, duration=400 / rate).make_workload(seed) for seed in range(60)
    ]
    assert np.mean([len(made) for made in found]) == pytest.approx(400, rel=0.12)
    early = np.mean([(made.arrival < 200 / rate).sum() for made in found])
    assert early == pytest.approx(200, rel=0.15)


def test_loops_start_in_bursts() -> None:
    made = sample(dataclasses.replace(SMALL, together=3.0, pause=1e4, turns=2.0), 4_000, 1.0)
    openings = np.setdiff1d(np.arange(len(made)), turns(made)[0])
    at_once = np.diff(made.arrival[openings]) == 0
    assert 0.3 < at_once.mean() < 2 / 3, "others are turns whose sessions are older"
    # They have the same system prompt.
    again = openings[1:][at_once]
    assert (made.prefix_of[again] == openings[:-1][at_once]).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_says_it_all(name: str) -> None:
    def made(count: int, seed: int = 3, **more: float) -> Workload:
        return WorkloadSpec(name, count, rate=4.0, **more).make_workload(seed)  # type: ignore[arg-type]

    columns = ("arrival", "prompt_len", "output_len", "prefix_of", "prefix_len")
    one, few, other = made(3000), made(100), made(100, 4)
    for column in columns:
        np.testing.assert_array_equal(getattr(one, column)[:100], getattr(few, column))
    np.testing.assert_array_equal(made(100).arrival, few.arrival)
    assert (other.arrival != few.arrival).any() and (other.prompt_len != few.prompt_len).any()
    assert WorkloadSpec(name, 10, rate=4.0).drawn()


def test_words_say_how_sessions_start() -> None:
    assert len(WorkloadSpec("Conversation").make_workload()) == 1000
    bursty = WorkloadSpec("agent", 5000, "gamma", rate=9.0, cv=5.0).make_workload()
    plain = WorkloadSpec("agent", 5000, rate=9.0).make_workload()
    assert len(turns(bursty)[0]) > 4000 and len(turns(plain)[0]) > 4000
    named = WorkloadSpec("agent", 5000, "poisson", rate=9.0).make_workload()
    np.testing.assert_array_equal(named.arrival, plain.arrival)
    on_off = WorkloadSpec("agent", 500, "on_off", rate=9.0, on_s=1.0, off_s=9.0).make_workload()
    assert len(on_off) == 500
    for arrivals in ("all", None):
        at_once = WorkloadSpec("conversation", 500, arrivals).make_workload()
        assert at_once.arrival.max() == 0 and at_once.prefix_len.max() > 1600
    assert reusable_tokens(at_once, 16).sum() > at_once.prompt_len.sum() / 2


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"arrivals": "replay", "rate": 2.0}, "no arrivals to replay"),
        ({"arrivals": "replay"}, "no arrivals to replay"),
        ({"rate": 0.0}, "rate must be a positive number, got 0"),
        ({"rate": -1.0}, "rate must be a positive number"),
        ({"rate": math.inf}, "rate must be a positive number"),
        ({"rate": 1e9}, "GB of memory"),
        ({"num_requests": 10**12, "rate": 2.0}, "GB of memory"),
    ],
)
def test_what_cannot_be_drawn_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        WorkloadSpec("conversation", **fields).make_workload()  # type: ignore[arg-type]


def test_a_first_turn_must_fit() -> None:
    with pytest.raises(WorkloadError, match="may have 150 tokens, more than max_context, 149"):
        dataclasses.replace(SMALL, max_context=149)
    assert SESSIONS["agent"].source


@pytest.mark.parametrize(
    "best_effort", [None, "closed:batch=3,input=uniform:9:9,output=uniform:2:4"]
)
def test_nothing_on_the_way_through_a_simulation_loses_what_is_shared(
    best_effort: str | None,
) -> None:
    made = sample(SMALL, 60)
    loop = None if best_effort is None else parse_closed_loop(best_effort)
    until = math.inf if loop is None else 8.0
    found = simulate(
        "sarathi",
        with_slo(made, SLO(ttft=1.0)),
        system("llama-2-7b@a100"),
        best_effort=loop,
        until=until,
    )
    workload = found.requests.workload
    own = np.flatnonzero(workload.tier == 0)
    assert len(own) > 20 and (workload.ttft[own] == 1.0).all()
    among = workload.select(own)
    np.testing.assert_array_equal(among.prefix_of, made.prefix_of[: len(own)])
    np.testing.assert_array_equal(among.prefix_len, made.prefix_len[: len(own)])
    assert among.prefix_len.any() and not workload.prefix_len[workload.tier != 0].any()
