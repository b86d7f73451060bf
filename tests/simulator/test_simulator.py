"""The simulator: timelines worked out by hand, invariants, and shortcuts that change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.registry import policies
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, fixed_lengths
from tests.simulator.grouped import simulate

SECOND = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)  # every batch takes 1 s
PER_TOKEN = LinearCostModel(Coefficients(1.0, 0, 0, 0, 0, 0, 0, 0, 0), 1)
SEVEN = system("llama-2-7b@a100")


def of(arrival: list[float], prompt: list[int], output: list[int]) -> Workload:
    return Workload.create(np.array(arrival), Lengths(np.array(prompt), np.array(output)))


def times(result: SimulationResult, request: int) -> list[float]:
    r = result.requests
    first = int(r.offsets[request])
    return r.token_times[first : first + int(r.output_len[request])].tolist()


def test_one_request_alone() -> None:
    result = simulate("vllm", of([2.0], [5], [3]), PER_TOKEN, kv_tokens=100, block_size=1)
    assert times(result, 0) == [7.0, 8.0, 9.0]
    summary = result.summary()
    assert summary["latency_s"] == 7.0
    assert summary["makespan_s"] == 7.0
    assert summary["mean_ttft_s"] == 5.0
    assert summary["mean_tpot_s"] == 1.0
    assert summary["tps"] == 3 / 7
    assert (summary["num_batches"], summary["num_preemptions"]) == (3, 0)


def test_with_overlap_an_arrival_waits_for_the_plan_after_next() -> None:
    # Step k is planned when step k - 2 ends: who comes at 1.5 s is in the plan that is made at 2 s,
    # for the step that starts at 3 s.
    workload = of([0.0, 1.5], [4, 4], [9, 1])
    overlapped = simulate("sarathi", workload, SECOND, kv_tokens=99, block_size=1)
    assert times(overlapped, 0) == [float(t) for t in range(1, 10)]
    assert times(overlapped, 1) == [4.0]
    direct = simulate("sarathi", workload, SECOND, kv_tokens=99, block_size=1, overlap=False)
    assert times(direct, 1) == [3.0]


def test_a_host_that_slept_wakes_up_and_takes_in_who_has_come_by_then() -> None:
    # Asleep at 0 s, it goes on at 2 s, and takes in both at a second each; each later round of its
    # loop takes half a second, which the device hides.
    host = HostOverhead(receive=0.5, receive_row=1.0, wake=2.0)
    place = dataclasses.replace(SEVEN, cost_model=SECOND, host=host, padding=None)
    found = simulate("sarathi", of([0.0, 1.5], [4, 4], [3, 3]), place, compiled=False)
    assert times(found, 0) == times(found, 1) == [5.5, 6.5, 7.5]
    # Who comes while it is awake, at 6 s, is taken in when it plans next, at 6.5 s.
    found = simulate("sarathi", of([0.0, 6.0], [4, 4], [9, 1]), place, compiled=False)
    assert times(found, 0)[:4] == [4.5, 5.5, 6.5, 8.0] and times(found, 1)[0] == 9.0
    # Who comes long after all are over wakes it again.
    found = simulate("sarathi", of([0.0, 60.0], [4, 4], [2, 1]), place, compiled=False)
    assert times(found, 1) == [64.5]


def test_who_submits_several_in_a_row_has_as_long_before_the_host_wakes() -> None:
    host = HostOverhead(wake=0.001)
    place = dataclasses.replace(SEVEN, cost_model=SECOND, host=host, padding=None)
    for gap, together in ((0.0008, 8), (0.002, 1)):
        arrival = [gap * i for i in range(12)]
        for compiled in (False, True):
            found = simulate("sarathi", of(arrival, [4] * 12, [1] * 12), place, compiled=compiled)
            first = [i for i in range(12) if times(found, i)[0] < 1.5]
            assert first == list(range(together)), "as arrive within 5 ms, and in the last wake"


def test_the_papers_preemption_example() -> None:
    """M = 8 holds two prompts of 4 but not their second tokens: the second request is preempted,
    waits for the first to end, and is refilled (InferMax Figure 1)."""
    workload = of([0.0, 0.0], [4, 4], [3, 3])
    result = simulate(
        "vllm", workload, SECOND, kv_tokens=8, rules="infermax_paper", record_rows=True
    )
    assert times(result, 0) == [1.0, 2.0, 3.0]
    assert times(result, 1) == [1.0, 4.0, 5.0]
    assert result.summary()["num_preemptions"] == 1
    assert result.requests.preemptions.tolist() == [0, 1]
    assert result.rows is not None
    who = [(b.requests.tolist(), b.tokens.tolist(), b.preempted.tolist()) for b in result.rows[0]]
    assert who == [
        ([0, 1], [4, 4], []),
        ([0], [1], [1]),
        ([0], [1], []),
        ([1], [5], []),
        ([1], [1], []),
    ]
    assert result.batches.kv_used.tolist() == [8, 5, 6, 5, 6]
    assert result.batches.num_prefills.tolist() == [2, 0, 0, 1, 0]


def test_chunks_beside_decodes_under_the_papers_rules() -> None:
    workload = of([0.0, 0.0], [4, 10], [9, 1])
    result = simulate(
        "sarathi",
        workload,
        SEVEN,
        limits=Limits(64, 6, 8),
        rules="infermax_paper",
        record_rows=True,
    )
    assert result.rows is not None
    first = [(b.requests.tolist(), b.tokens.tolist()) for b in result.rows[0][:4]]
    assert first == [([0, 1], [4, 2]), ([0, 1], [1, 5]), ([0, 1], [1, 3]), ([0], [1])]
    assert SEVEN.paper is not None
    chunk = BatchFeatures(6, 6, 5, 1, 25 + 2 * 5 * 2, 1, 2)
    assert result.batches.duration[1] == pytest.approx(SEVEN.paper.batch_time(chunk), rel=1e-12)


def test_the_low_contention_run_of_the_issue() -> None:
    """32 requests of 1024 + 128 tokens with C = 4096: 8 batches of 4 prompts, then 127 decodes."""
    workload = Workload.create(all_at_once(32), fixed_lengths(1024, 128, 32))
    result = simulate("vllm", workload, SEVEN, kv_tokens=100_000, rules="infermax_paper")
    assert len(result.batches) == 8 + 127
    model = SEVEN.paper
    assert model is not None
    prefill = model.batch_time(BatchFeatures(4096, 4096, 0, 0, 4 * 1024**2, 4, 0))
    decodes = sum(
        model.batch_time(BatchFeatures(32, 32, 32 * (1024 + i), 32, 0, 0, 0)) for i in range(1, 128)
    )
    assert result.summary()["latency_s"] == pytest.approx(8 * prefill + decodes, rel=1e-9)


def test_requests_that_never_fit_are_refused() -> None:
    with pytest.raises(SimulationError, match=r"request 1 has 90 tokens in and 20 out"):
        simulate("sarathi", of([0, 0], [5, 90], [5, 20]), SECOND, kv_tokens=100)
    with pytest.raises(SimulationError, match="max_batch_tokens is 64"):
        simulate("vllm", of([0], [60], [9]), SECOND, kv_tokens=100, limits=Limits(64, 64, 4))
    with pytest.raises(SimulationError, match="kv_tokens or num_blocks is needed"):
        simulate("vllm", of([0], [6], [9]), SECOND)
    with pytest.raises(SimulationError, match="no rules 'theirs'"):
        simulate("vllm", of([0], [6], [9]), SECOND, kv_tokens=64, rules="theirs")
    with pytest.raises(SimulationError, match="no routing 'nowhere'"):
        simulate("vllm", of([0], [6], [9]), SECOND, kv_tokens=64, routing="nowhere")


def test_two_replicas_are_two_simulations() -> None:
    workload = random_workload(5, 60, 20.0)
    both = simulate("sarathi", workload, SEVEN, kv_tokens=2000, replicas=2)
    for one in (0, 1):
        mine = np.flatnonzero(both.requests.replica == one)
        alone = simulate("sarathi", workload.select(mine), SEVEN, kv_tokens=2000)
        np.testing.assert_allclose(both.requests.finish[mine], alone.requests.finish, rtol=1e-12)


def random_workload(seed: int, count: int, rate: float) -> Workload:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    return Workload.create(
        arrival, Lengths(rng.integers(1, 300, count), rng.integers(1, 40, count))
    )


def compare(a: SimulationResult, b: SimulationResult) -> None:
    np.testing.assert_allclose(a.requests.token_times, b.requests.token_times, rtol=1e-9)
    assert a.requests.preemptions.tolist() == b.requests.preemptions.tolist()
    for name, column in vars(a.batches).items():
        np.testing.assert_allclose(column, getattr(b.batches, name), rtol=1e-9, err_msg=name)
    assert a.rows is not None and b.rows is not None
    for one, other in zip(a.rows[0], b.rows[0], strict=True):
        for mine, theirs in ((one.requests, other.requests), (one.preempted, other.preempted)):
            assert sorted(mine.tolist()) == sorted(theirs.tolist())
        assert sorted(one.tokens.tolist()) == sorted(other.tokens.tolist())


# What a search finds is one of these, or in `test_oracle.py`.
FIXED = [name for name in policies() if name != "oracle"]


# Tokens of the pool, prefill tokens of a batch, rows, requests/s, rules.
TRIALS = (
    (600, 64, 8, 200.0, "jaxserve"),
    (2000, 256, 100, 9.0, "infermax_paper"),
    (9000, 512, 16, 6.0, "jaxserve"),
)


@pytest.mark.parametrize(
    ("name", "trial"),
    [
        pytest.param(name, trial, marks=[] if i % len(TRIALS) == trial else [pytest.mark.slow])
        for i, name in enumerate([*FIXED, "sarathi+ef", "vllm+ef", "sarathi_pc+ef"])
        for trial in range(len(TRIALS))
    ],
)
def test_taking_steps_together_changes_nothing(name: str, trial: int) -> None:
    kv_tokens, prefill, rows, rate, rules = TRIALS[trial]
    options: dict[str, Any] = {
        "kv_tokens": kv_tokens,
        "limits": Limits(512, prefill, rows),
        "rules": rules,
        "record_rows": True,
        "checked": True,
    }
    workload = random_workload(trial, 14, rate)
    compare(
        simulate(name, workload, SEVEN, coast=True, **options),
        simulate(name, workload, SEVEN, coast=False, **options),
    )


class Watching(Policy):
    """Serves everybody. seen: what it was told when it planned, by the time. late: late gaps."""

    steady = True

    def __init__(self) -> None:
        self.seen: dict[float, list[float]] = {}
        self.late = 0

    def plan(self, view: View, now: float) -> BatchPlan:
        table = view.table
        rows = np.concatenate([table.in_state(RUNNING), table.in_state(WAITING)])
        columns = (table.received, table.first_token, table.late_gaps, table.longest_gap)
        told = [value for column in columns for value in column[rows].tolist()]
        self.seen[round(now, 9)] = [view.step_end(now), *told]
        self.late += int(table.late_gaps[rows].sum())
        tokens = table.pending(rows)
        return BatchPlan(rows, tokens, table.computed[rows] + tokens, 0 * rows)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_policy_is_told_the_same_when_steps_are_taken_together(overlap: bool) -> None:
    workload = of([0.0, 0.0, 0.5, 2.0, 2.0], [40, 30, 90, 20, 70], [60, 33, 20, 70, 40])
    workload = with_targets(workload, SLO(tbt=0.00285 if overlap else 0.00415))  # of some gaps
    together, single = Watching(), Watching()
    for policy, coast in ((together, True), (single, False)):
        place = dataclasses.replace(SEVEN, host=HostOverhead(plan=1e-4, launch=2e-4, finish=1e-3))
        simulate(policy, workload, place, kv_tokens=4000, overlap=overlap, coast=coast)
    assert len(together.seen) < len(single.seen) / 2
    for now, told in together.seen.items():
        assert told == pytest.approx(single.seen[now], rel=1e-9)
    assert all((told[0] > now + 1e-6) == overlap for now, told in list(single.seen.items())[1:20])
    assert single.late > 0


@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(["vllm", "sarathi", "edf", "infermax", "fastserve", "orca"]),
    kv_tokens=st.integers(350, 3000),
    rules=st.sampled_from(["jaxserve", "infermax_paper"]),
)
@settings(max_examples=20, deadline=None)
def test_every_request_gets_its_tokens_within_the_limits(
    seed: int, policy: str, kv_tokens: int, rules: str
) -> None:
    workload = random_workload(seed, 20, 100.0)
    limits = Limits(400, 128, 12)
    result = simulate(
        policy,
        workload,
        SEVEN,
        kv_tokens=kv_tokens,
        limits=limits,
        rules=rules,
        checked=True,
        record_rows=True,
    )
    requests, batches = result.requests, result.batches
    assert np.isfinite(requests.token_times).all()
    within = np.ones(len(requests.token_times), bool)
    within[requests.offsets] = False
    assert (np.diff(requests.token_times, prepend=0.0)[within] > 0).all()
    assert (requests.first_token > requests.arrival).all()
    assert batches.num_tokens.max() <= limits.max_batch_tokens
    assert (batches.num_decodes + batches.num_prefills).max() <= limits.max_rows
    assert batches.kv_used.max() <= result.kv_tokens <= kv_tokens
    assert batches.preemptions.sum() == requests.preemptions.sum()
    assert (batches.start[1:] >= (batches.start + batches.duration)[:-1] - 1e-9).all()
    # What was computed is every prompt and output but the last token; that too where the next step
    # had begun before it was known to be the last; and what preemptions redid.
    needed = int((requests.prompt_len + requests.output_len - 1).sum())
    late = np.count_nonzero(workload.limit > workload.output_len) * (rules == "jaxserve")
    assert batches.num_tokens.sum() >= needed
    if not batches.preemptions.sum():
        assert batches.num_tokens.sum() <= needed + late


@pytest.mark.parametrize("coast", [True, False])
def test_best_effort_rows_cost_real_time_ones_their_part_of_a_step(coast: bool) -> None:
    tiers = np.array([Tier.REALTIME, Tier.BEST_EFFORT, Tier.BEST_EFFORT], np.int8)
    workload = of([0.0] * 3, [4, 5, 6], [7, 9, 6])
    workload = dataclasses.replace(workload, tier=tiers, limit=workload.output_len)
    options: dict[str, Any] = {"kv_tokens": 99, "block_size": 1, "coast": coast}
    result = simulate("vllm", workload, PER_TOKEN, record_rows=True, **options)
    assert result.lengthening is not None
    assert result.lengthening.tolist() == [11.0] + [2.0] * 5 + [1.0] + [0.0] * 2
    assert simulate("vllm", workload, PER_TOKEN, **options).lengthening is None


class AllHidden(Policy):
    """Prefills whoever comes into hidden caches, where they can be had."""

    chunked = False

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def plan(self, view: View, now: float) -> BatchPlan:
        self.seen.append(view.rho)
        table = view.table
        rows = np.concatenate([table.in_state(RUNNING), table.in_state(WAITING)])
        kind = CacheKind.KV if view.rho is None else CacheKind.HIDDEN
        counts = table.pending(rows)
        kinds = np.full(len(rows), int(kind))
        return BatchPlan(rows, counts, table.computed[rows] + counts, kinds)


def test_hidden_caches_take_half_the_room_and_rho_longer() -> None:
    place = system("opt-13b@a100-40g", "projected")
    workload = of([0.0], [32], [17])
    found = {}
    for rho in ("system", None):
        policy = AllHidden()
        options: dict[str, Any] = {} if rho == "system" else {"rho": rho}
        found[rho] = simulate(policy, workload, place, kv_tokens=4096, **options)
        assert set(policy.seen) == {place.rho if rho == "system" else None}
    hidden, kv = found["system"].batches, found[None].batches
    assert kv.kv_used.max() == 48 and hidden.kv_used.max() == 24
    assert place.rho is not None
    read = np.arange(33, 49)  # by the decodes, the token itself included
    np.testing.assert_allclose((hidden.duration - kv.duration)[1:], place.rho * read)


def test_the_papers_batch_times_know_no_hidden_caches() -> None:
    policy = AllHidden()
    simulate(policy, of([0.0], [4], [2]), SEVEN, kv_tokens=99, rules="infermax_paper")
    assert set(policy.seen) == {None}
