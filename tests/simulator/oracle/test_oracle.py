"""The search for the best schedule: what it finds can be done, and its bound holds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.policies.oracle import Ordered, Portfolio
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns
from jaxserve.sched.unified.unified_policy import Reserve
from jaxserve.simulator.oracle import search
from jaxserve.simulator.oracle.candidates import SHAPES
from jaxserve.simulator.oracle.goodput_bound import goodput_bound, most_met
from jaxserve.simulator.oracle.least_work import LeastWork, latest
from jaxserve.simulator.oracle.search import portfolio
from jaxserve.simulator.settings import Setting
from jaxserve.simulator.simulate import cli as command
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.closed_loop import parse_closed_loop
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, fixed_lengths
from tests.simulator.compiled.test_compiled import (
    ENGINE,
    HOST,
    SEVEN,
    SLOW_HOST,
    assert_same,
    drawn,
)
from tests.simulator.grouped import simulate

OPT = system("opt-13b@a100-40g")  # with hidden caches
LIMITS = Limits(400, 100, 12)
QUICK = "oracle:portfolio=quick"


def few_first(*names: str) -> Any:
    """Has a search begin with one policy, or these, instead of some twenty."""
    return patch.object(search, "portfolio", lambda which: names or ("sarathi",))


def goodput(result: Any) -> float:
    return float(result.summary()["goodput_per_s"] or 0.0)


def with_targets(workload: Workload, **targets: float) -> Workload:
    """All of them have these."""
    count = len(workload)
    arrays = {name: np.full(count, targets.get(name, np.inf)) for name in ALL_TARGETS}
    terms = dataclasses.replace(SloColumns.none(count), **arrays)
    lengths = workload.lengths
    return Workload.create(workload.arrival, lengths, limit=workload.limit, terms=terms)


def scaled(workload: Workload, factor: float) -> Workload:
    """With targets so many times as long."""
    targets = {name: getattr(workload, name) * factor for name in ALL_TARGETS}
    return dataclasses.replace(workload, **targets)


@pytest.mark.parametrize("place", [SEVEN, OPT], ids=["kv", "hybrid"])
@settings(max_examples=8, deadline=None)
@given(
    policy=st.sampled_from([*portfolio(Portfolio.ALL), "bros"]),
    seed=st.integers(0, 1 << 30),
    rate=st.sampled_from([3.0, 30.0, 1e4]),
    tight=st.sampled_from([0.1, 1.0, 5.0]),
    timing=st.sampled_from([(HostOverhead(), None), (HOST, ENGINE), (SLOW_HOST, None)]),
    options=st.sampled_from(
        [{}, {"overlap": False}, {"rules": "infermax_paper"}, {"until": 1.5}, {"max_queue": 3}]
    ),
)
@example("vllm", 0, 1e4, 1.0, (HostOverhead(), Padding((1, 8), (16, 256))), {})
def test_no_policy_exceeds_the_bound(
    place: Any,
    policy: str,
    seed: int,
    rate: float,
    tight: float,
    timing: Any,
    options: dict[str, Any],
) -> None:
    host, padding = timing
    place = dataclasses.replace(place, host=host, padding=padding)
    workload = scaled(drawn(seed, 20, rate), tight)
    shared: dict[str, Any] = {"kv_tokens": 900, "limits": LIMITS, "compiled": False} | options
    if not make_policy(policy).chunked:
        shared["limits"] = Limits(400, 400, 12)
    with few_first():
        bound = simulate(f"{QUICK}:runs=0", workload, place, **shared).goodput_bound
    assert bound is not None
    assert goodput(simulate(policy, workload, place, **shared)) <= bound * (1 + 1e-9)


def test_it_finds_no_less_than_any_policy() -> None:
    workload = drawn(2, 8, 1e4)
    options: dict[str, Any] = {"kv_tokens": 600, "compiled": False}
    found = simulate("oracle:runs=3", workload, SEVEN, limits=LIMITS, **options)
    assert found.goodput_bound is not None and found.search_runs is not None
    assert goodput(found) <= found.goodput_bound
    names = portfolio(Portfolio.ALL)
    assert found.search_runs <= len(names) + 3
    for name in names:
        limits = LIMITS if make_policy(name).chunked else Limits(400, 400, 12)
        one = simulate(name, workload, SEVEN, limits=limits, **options)
        assert goodput(one) <= goodput(found), name


def test_the_portfolio_has_every_other_policy() -> None:
    every, quick = portfolio(Portfolio.ALL), portfolio(Portfolio.QUICK)
    assert {"accelgen", "bros", "edf", "edf+ef", "rank_o", "vllm"} < set(every)
    assert "oracle" not in every and set(quick) < set(every)
    assert {"edf", "sarathi+ef"} < set(quick) and not {"bros", "accelgen"} & set(quick)


@pytest.mark.parametrize("seed", range(2))
def test_tiny_cases_are_solved(seed: int) -> None:
    """No order of four requests, in any of the shapes, has more."""
    rng = np.random.default_rng(seed)
    lengths = Lengths(rng.integers(50, 400, 4), rng.integers(1, 30, 4))
    workload = with_targets(Workload.create(all_at_once(4), lengths), ttft=0.09, jct=0.45)
    options: dict[str, Any] = {"kv_tokens": 700, "limits": Limits(400, 400, 3)}
    best = 0.0
    for groups, mixed in SHAPES:
        for order in itertools.permutations(range(4)):
            policy = Ordered(groups, mixed, True, reserve=Reserve.WHOLE, given=np.array(order))
            best = max(best, goodput(simulate(policy, workload, SEVEN, **options)))
    with few_first():
        found = simulate(f"{QUICK}:runs=600", workload, SEVEN, **options)
    assert 0 < best <= goodput(found)


def test_a_search_finds_more_than_the_policies() -> None:
    """Under more load than can be served, who is served is chosen."""
    workload = scaled(drawn(4, 40, 200.0), 0.4)
    options: dict[str, Any] = {"kv_tokens": 1500, "limits": LIMITS}
    names = ("edf+ef", "infermax", "sarathi", "sarathi+ef", "vllm", "vllm+ef")
    with few_first(*names):
        none, some, more = (
            simulate(f"{QUICK}:runs={runs}", workload, SEVEN, **options) for runs in (0, 60, 120)
        )
    assert goodput(none) < goodput(some) <= goodput(more)
    assert none.found_by in names and more.found_by == "ordered"
    assert none.search_runs == len(names)
    assert more.search_runs == none.search_runs + 120


def test_so_many_runs_find_the_same_each_time_and_it_can_be_booked() -> None:
    workload, options = scaled(drawn(4, 20, 200.0), 0.4), {"kv_tokens": 900, "limits": LIMITS}
    with few_first():
        one, same, rows, checked = (
            simulate(f"{QUICK}:runs=20", workload, SEVEN, **how, **options)
            for how in ({}, {}, {"record_rows": True}, {"checked": True})
        )
    for other in (same, rows, checked):
        assert_same(one, other)
    assert one.rows is None and rows.rows is not None
    assert len(rows.rows[0]) == len(rows.batches)
    assert one.seed_read


def test_time_may_end_the_search() -> None:
    workload = drawn(4, 20, 200.0)
    with few_first():
        found = simulate(f"{QUICK}:seconds=0", workload, SEVEN, kv_tokens=900, limits=LIMITS)
    assert found.search_runs == 1


@pytest.mark.parametrize(
    ("shape", "probing"), [(shape, i % 2 > 0) for i, shape in enumerate(SHAPES)]
)
def test_a_given_order_is_the_same_compiled(shape: Any, probing: bool) -> None:
    workload, groups_mixed = drawn(9, 60, 300.0), shape
    given_order = np.random.default_rng(1).permutation(60).astype(float)
    policy = Ordered(*groups_mixed, chunked=True, probing=probing, given=given_order)
    found = [
        simulate(policy, workload, SEVEN, kv_tokens=900, limits=LIMITS, compiled=compiled)
        for compiled in (True, False)
    ]
    assert_same(*found)


def test_whoever_is_first_in_the_order_is_first() -> None:
    lengths = fixed_lengths(100, 2, 4)
    workload = Workload.create(all_at_once(4), lengths)
    policy = Ordered(*SHAPES[0], chunked=True, given=np.array([2.0, 0.0, 3.0, 1.0]))
    result = simulate(policy, workload, SEVEN, limits=Limits(100, 100, 4))
    assert np.argsort(result.requests.first_token).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"replicas": 2}, "policy oracle: schedules are searched for one replica"),
        (
            {
                "best_effort": parse_closed_loop(
                    "closed:batch=2,input=uniform:5:9,output=uniform:2:4"
                ),
                "until": 1.0,
            },
            "policy oracle: best_effort requests come when others have ended",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        simulate(f"{QUICK}:runs=1", drawn(1, 5, 10.0), SEVEN, **options)


def test_drafts_are_not_searched_for() -> None:
    """Rather than left out unnoticed."""
    with pytest.raises(ValueError, match=r"policy oracle\+spec: the search plans without drafts"):
        simulate("oracle+spec:portfolio=quick:runs=1", drawn(1, 5, 10.0), SEVEN)


def test_a_search_is_not_compiled_as_such() -> None:
    with pytest.raises(SimulationError, match="cannot run compiled"):
        simulate(f"{QUICK}:runs=1", drawn(1, 5, 10.0), SEVEN, compiled=True)


def test_the_command_says_the_bound_and_the_tries(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=sarathi,oracle:portfolio=quick:runs=3", "--workload=fixed:64x8x12"]
    argv += ["--kv_tokens=400", "--slo_jct_ms=150", "--seeds=1", "--json"]
    with few_first():
        assert command.main(argv) == 0
    said = capsys.readouterr()
    sarathi, oracle = json.loads(said.out.splitlines()[-1])["points"]
    assert oracle["mean"]["search_runs"] > 3 and "search_runs" not in sarathi["mean"]
    bound = oracle["mean"]["goodput_bound_per_s"]
    assert sarathi["mean"]["goodput_per_s"] <= oracle["mean"]["goodput_per_s"] <= bound
    header, first, second, *_ = said.err.splitlines()
    assert header.split()[-3:] == ["at", "most", "tried"] and first.split()[-2:] == ["-", "-"]
    assert second.split()[-2:] == [f"{bound:.2f}", str(oracle["mean"]["search_runs"])]


# The bound's parts.


def setting(**changes: Any) -> Setting:
    base = Setting(Limits(4096, 4096, 64), 2 * 1000, 16, SEVEN.cost_model, overlap=False)
    return dataclasses.replace(base, **changes)


def test_a_request_alone_takes_what_the_bound_says() -> None:
    """The bound is tight there."""
    workload = Workload.create(all_at_once(1), fixed_lengths(300, 20, 1))
    work = LeastWork.of_workload(workload, setting(), hidden=False)
    result = simulate("sarathi_pc", workload, SEVEN, limits=setting().limits, overlap=False)
    assert work.ttft[0] == pytest.approx(result.requests.ttft[0], rel=0.2)
    assert work.ttft[0] <= result.requests.ttft[0]
    assert work.jct[0] == pytest.approx(result.requests.latency[0], rel=0.05)
    assert work.jct[0] <= result.requests.latency[0]


def test_who_cannot_be_in_time_alone_is_not_counted() -> None:
    arrival = np.array([0.0, 1.0])
    plain = Workload.create(arrival, fixed_lengths(300, 20, 2))
    work = LeastWork.of_workload(plain, setting(), hidden=False)
    for name, least in (("ttft", work.ttft[0]), ("jct", work.jct[0])):
        for factor, met in ((0.99, False), (1.01, True)):
            workload = with_targets(plain, **{name: float(least) * factor})
            assert LeastWork.of_workload(workload, setting(), False).met.tolist() == [met] * 2
            bound = goodput_bound(workload, setting(), False, math.inf)
            assert (bound > 0) == met


def test_a_window_holds_so_many_at_most() -> None:
    """Twenty come at once, and there is time for a few until their target."""
    plain = Workload.create(all_at_once(20), fixed_lengths(2000, 2, 20))
    alone = float(LeastWork.of_workload(plain, setting(), False).jct[0])
    workload = with_targets(plain, jct=3.5 * alone)
    bound = goodput_bound(workload, setting(), False, math.inf)
    with few_first():
        found = simulate(f"{QUICK}:runs=150", workload, SEVEN, kv_tokens=16000, overlap=False)
    assert 0 < goodput(found) <= bound <= 1.35 * goodput(found)


def in_time_together(workload: Workload, first: np.ndarray, rest: np.ndarray) -> int:
    """The largest set of requests of which no window between any two times has too much."""
    begin, early = workload.arrival, workload.arrival + workload.ttft
    late = np.maximum(begin + workload.jct, early)
    times = np.unique(np.concatenate([begin, early, late]))
    windows = [(s, t) for s, t in itertools.combinations(times.tolist(), 2)]
    works = [
        ((begin >= s) & (early <= t)) * first + ((begin >= s) & (late <= t)) * rest
        for s, t in windows
    ]
    found = 0
    for chosen in itertools.product((False, True), repeat=len(workload)):
        fits = (
            work[list(chosen)].sum() <= t - s for (s, t), work in zip(windows, works, strict=True)
        )
        if sum(chosen) > found and all(fits):
            found = sum(chosen)
    return found


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
@example(0)
def test_windows_exclude_no_more_than_has_to_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 6
    workload = Workload.create(rng.integers(0, 9, count).cumsum() / 2.0, fixed_lengths(5, 3, count))
    ttft = rng.integers(1, 8, count).astype(float)
    workload = dataclasses.replace(workload, ttft=ttft, jct=ttft + rng.integers(0, 6, count))
    first, rest = (rng.integers(0, 9, count) / 2.0 for _ in range(2))
    bound = most_met(workload, np.ones(count, bool), first, rest, math.inf)
    assert bound >= in_time_together(workload, first, rest)


def test_windows_exclude_what_has_to_be() -> None:
    """Two bursts of three requests of a second each, with time for two of each."""
    arrival = np.array([0.0, 0.0, 0.0, 5.0, 5.0, 5.0])
    workload = with_targets(Workload.create(arrival, fixed_lengths(5, 3, 6)), jct=2.5)
    half, everybody = np.full(6, 0.5), np.ones(6, bool)
    assert most_met(workload, everybody, half, half, math.inf) == 4
    assert most_met(workload, everybody, half, half, 6.0) == 3
    assert most_met(workload, arrival > 0, half, half, math.inf) == 2


@pytest.mark.parametrize(
    ("output", "seconds"),
    [
        (1, 2.0),  # nothing but the first token
        (2, 2.5),
        (3, 2 + 0.5 * (1 + 1 / 0.99)),  # of two gaps one is within, the other within 1 / 0.99
        (101, 2 + 0.5 * (99 + 1 / 0.01)),
        (102, np.inf),  # the largest gap may be of any length
    ],
)
def test_the_targets_say_when_a_request_has_ended(output: int, seconds: float) -> None:
    plain = Workload.create(all_at_once(1), fixed_lengths(5, output, 1))
    assert latest(with_targets(plain, ttft=2.0, tbt=0.5))[0] == pytest.approx(seconds)
    assert latest(with_targets(plain, ttft=2.0, tbt=0.5, jct=2.2))[0] == min(seconds, 2.2)


def test_a_cost_model_of_somebody_elses_says_nothing() -> None:
    class Own:
        def batch_time(self, features: Any) -> Any:
            return 1e-3 + 0 * features.num_tokens

    workload = Workload.create(all_at_once(4), fixed_lengths(10, 3, 4))
    found = simulate(f"{QUICK}:runs=2", workload, Own(), kv_tokens=400)
    assert found.goodput_bound == math.inf
    assert found.summary()["goodput_bound_per_s"] is found.summary()["goodput_per_s"] is None
    assert found.summary()["finished_per_s"] > 0
