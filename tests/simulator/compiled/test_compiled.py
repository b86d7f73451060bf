"""The compiled simulation: the outcome is the same, bit for bit, as that of the Python it stands
for; and whatever it cannot do runs in Python."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import LinearCostModel
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policies.vllm import PREFILL_FIRST
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.progress import FUTILE
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns
from jaxserve.sched.unified.policy_spec import where
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy
from jaxserve.simulator import dispatch
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, fixed_lengths
from tests.simulator.grouped import simulate

SEVEN = system("llama-2-7b@a100")
PRICES = dataclasses.replace(
    SEVEN.cost_model.coefficients, sampled_row=2e-6, batch_bias=1e-4, per_expert=3e-5
)
# With code of their own.
OWN = (
    *("accelgen", "aptserve", "autellix", "bros", "continuum", "fairbatching", "fastserve"),
    *("goodput", "hexagent", "oracle", "qoserve", "round_robin", "slidingserve", "thunderagent"),
)
PLAIN = [name for name in policies() if not name.startswith(OWN)]
VARIED = [
    "sarathi+ef",
    "vllm+ef",
    "edf+ef",
    "edf:patience=0",
    "edf:patience=0.3",
    "sarathi:reserve=chunk",
    "priority:reserve=chunk",
    "fastgen+ef",
    "infermax:expect=running:enough=3",
    "infermax:enough=3",
    "infermax+ef:enough=3",
    "fastgen:probing=true",
    "infermax:longest_first=false:expect=nothing",
    "rank_i:full_prefill=true:probing=true",
    "rank_org:probing=true",
    "vllm:probing=true",
    "sarathi_nocp:probing=true:watermark=0.1",
]
HOST = HostOverhead(2e-4, 3e-6, 4e-4, 5e-6, 1e-4, 1e-5, 3e-4, 7e-6, 6e-4, 3e-5, 2e-5, 1e-3)
SLOW_HOST = HostOverhead(plan=0.03, finish=0.02, launch_row=0.004, receive_row=0.01, wake=0.05)
ENGINE = Padding(rows=(1, 4, 16, 48), tokens=(16, 128, 512), decode_group=4, decode_chunk=24)


def drawn(seed: int, count: int, rate: float) -> Workload:
    """Tiers and targets of all sorts, and limits that some outputs do not come to."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count)) * rng.choice([0, 1], p=[0.1, 0.9])
    output = rng.integers(1, 40, count)
    targets = {name: rng.choice([1e-6, 0.05, 0.4, 3.0, np.inf], count) for name in ALL_TARGETS}
    terms = dataclasses.replace(
        SloColumns.none(count),
        tier=rng.integers(0, 2, count),
        greedy=rng.random(count) < rng.choice([1, 0.8]),
        **targets,
    )
    limit = output + rng.choice([0, 0, 0, 1, 30], count)
    return Workload.create(
        arrival, Lengths(rng.integers(1, 300, count), output), limit=limit, terms=terms
    )


def assert_same(a: SimulationResult, b: SimulationResult) -> None:
    for name in ("token_times", "preemptions", "replica"):
        mine, theirs = getattr(a.requests, name), getattr(b.requests, name)
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    for name, column in vars(a.batches).items():
        np.testing.assert_array_equal(column, getattr(b.batches, name), err_msg=name)
    assert (a.kv_tokens, a.seed_read) == (b.kv_tokens, b.seed_read)


@pytest.mark.promise(24)
@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(PLAIN + VARIED),
    kv_tokens=st.integers(400, 4000),
    prefill=st.sampled_from([16, 100, 400]),
    rows=st.integers(1, 40),
    max_queue=st.sampled_from([None, None, 0, 5]),
    block_size=st.sampled_from([1, 8, 16]),
    rate=st.sampled_from([5.0, 50.0, 1e4]),
    rules=st.sampled_from(["jaxserve", "infermax_paper"]),
    overlap=st.booleans(),
    host=st.sampled_from([HostOverhead(), HOST, SLOW_HOST]),
    padding=st.sampled_from([None, ENGINE]),
    overlapped=st.booleans(),
    experts=st.sampled_from([(0, 0), (0, 0), (16, 2), (8, 8)]),
    replicas=st.sampled_from([1, 1, 2, 3]),
    routing=st.sampled_from(["round_robin", "least_loaded"]),
)
@settings(max_examples=10, deadline=None)  # many keys to compile
def test_compiled_or_in_stretches_or_step_by_step(
    seed: int,
    policy: str,
    kv_tokens: int,
    prefill: int,
    rows: int,
    rate: float,
    host: HostOverhead,
    padding: Padding | None,
    overlapped: bool,
    experts: tuple[int, int],
    **options: Any,
) -> None:
    cost = LinearCostModel(PRICES, SEVEN.cost_model.num_layers, overlapped, *experts)
    place = dataclasses.replace(SEVEN, cost_model=cost, host=host, padding=padding)
    workload = drawn(seed, 25, rate)
    options |= {"kv_tokens": kv_tokens, "limits": Limits(400, prefill, rows), "seed": seed}
    slow = simulate(policy, workload, place, compiled=False, coast=False, **options)
    assert_same(simulate(policy, workload, place, compiled=True, **options), slow)
    assert_same(simulate(policy, workload, place, compiled=False, **options), slow)


@pytest.mark.parametrize("policy", ["infermax"])
def test_many_live_requests_and_many_batches(policy: str) -> None:
    rng = np.random.default_rng(3)
    lengths = Lengths(rng.integers(1, 60, 700), rng.integers(1, 12, 700))
    several = Workload.create(np.zeros(700), lengths)
    one_by_one = Workload.create(np.arange(700.0), lengths)
    for workload, limits in ((several, Limits(512, 64, 500)), (one_by_one, Limits(512, 64, 9))):
        found = {
            compiled: simulate(
                policy, workload, SEVEN, kv_tokens=9000, limits=limits, compiled=compiled
            )
            for compiled in (True, False)
        }
        assert_same(found[True], found[False])
    assert len(found[True].batches) > 4096


def test_which_policies_have_a_form() -> None:
    for name in PLAIN:
        dispatch.form_of(make_policy(name))
    for name in set(policies()) - set(PLAIN):
        with pytest.raises(dispatch.NotCompiled, match="more than settings"):
            dispatch.form_of(make_policy(name))


def own(**changes: Any) -> UnifiedPolicy:
    settings: dict[str, Any] = {"mixed_batches": True, "chunked": True} | changes
    return UnifiedPolicy(**({"groups": (Group(Phase.ANY, preempts=True),)} | settings))


class Backwards(UnifiedPolicy):
    def candidates(self, view: View, rows: np.ndarray) -> Any:
        return super().candidates(view, rows[::-1])


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (make_policy("aptserve"), "more than settings of the unified scheduler"),
        (Backwards(PREFILL_FIRST, mixed_batches=True, chunked=True), "more than settings"),
        (own(groups=(Group(Phase.DECODE), Group(Phase.ANY))), "more than settings"),
        (own(key=lambda r: str(r.seq)), "numba does not compile the policy's key"),
    ],
)
def test_what_is_not_compiled(policy: Policy, reason: str) -> None:
    with pytest.raises(SimulationError, match=reason) as caught:
        simulate(policy, drawn(0, 3, 9.0), SEVEN, compiled=True)
    assert "\n" not in str(caught.value)
    options: dict[str, Any] = {"record_rows": True}
    with pytest.raises(SimulationError, match="record no rows"):
        simulate("vllm", drawn(0, 3, 9.0), SEVEN, compiled=True, **options)


def test_without_numba_it_runs_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = drawn(1, 9, 9.0)
    compiled = simulate("edf", workload, SEVEN, compiled=True)
    package = "jaxserve.simulator.compiled"
    for name in ("run", "kernel"):
        monkeypatch.delitem(sys.modules, f"{package}.{name}")
    monkeypatch.delattr(sys.modules[package], "run")
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(dispatch, "_FEW", 0)
    with pytest.raises(SimulationError, match=r"pip install numba"):
        simulate("edf", workload, SEVEN, compiled=True)
    assert_same(simulate("edf", workload, SEVEN), compiled)


def test_compiled_is_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_python(*args: Any) -> None:
        raise AssertionError("it runs in Python")

    monkeypatch.setattr(dispatch, "run_in_python", in_python)
    monkeypatch.setattr(dispatch, "_FEW", 0)
    simulate("edf", drawn(1, 9, 9.0), SEVEN)
    simulate(own(key=lambda r: -r.prompt_len), drawn(1, 9, 9.0), SEVEN)
    for options in ({"compiled": False}, {"checked": True}, {"record_rows": True}):
        with pytest.raises(AssertionError, match="in Python"):
            simulate("edf", drawn(1, 9, 9.0), SEVEN, **options)  # type: ignore[arg-type]


def test_few_requests_are_not_worth_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        function = getattr(dispatch, name)
        return lambda *args: (chosen.append(name), function(*args))[1]

    for name in ("run_in_python", "_run_compiled"):
        monkeypatch.setattr(dispatch, name, noted(name))
    monkeypatch.setattr(dispatch, "_served", 0)
    monkeypatch.setattr(dispatch, "_MODULE", "no.such.module")
    workload = drawn(1, dispatch._FEW // 2, 9.0)
    served = [simulate("edf", workload, SEVEN) for _ in range(3)]
    assert chosen == ["run_in_python", "run_in_python", "_run_compiled"]
    assert_same(served[0], served[2])
    monkeypatch.setattr(dispatch, "_served", 0)
    monkeypatch.setattr(dispatch, "_MODULE", dispatch.__name__)
    simulate("edf", drawn(1, 9, 9.0), SEVEN)
    assert chosen[3:] == ["_run_compiled"]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_policy_that_lets_nobody_start(compiled: bool) -> None:
    policy = own(groups=(Group(Phase.DECODE),))
    with pytest.raises(InvalidPlan, match="plans nothing for 3 requests"):
        simulate(policy, drawn(0, 3, 9.0), SEVEN, compiled=compiled)


def first_who_waits() -> UnifiedPolicy:
    """Those who wait preempt those who run."""
    groups = (Group(Phase.WAITING, preempts=True), Group(Phase.RUNNING, preempts=True))
    return own(groups=groups, key=lambda r: where(r.waiting, 0, 1))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_policy_that_preempts_for_ever(compiled: bool) -> None:
    """Prompts of four steps; the memory is for one of them."""
    workload = Workload.create(all_at_once(3), fixed_lengths(64, 4, 3))
    options: dict[str, Any] = {"kv_tokens": 96, "limits": Limits(16, 16, 9), "compiled": compiled}
    problem = "^policy UnifiedPolicy: by step 201 it has preempted a request 100 times, while"
    with pytest.raises(InvalidPlan, match=problem):
        simulate(first_who_waits(), workload, SEVEN, **options)


@pytest.mark.parametrize("compiled", [True, False])
def test_preemptions_that_get_somewhere_are_as_many_as_they_like(compiled: bool) -> None:
    """The same in steps of a whole prompt: each refill ends with one more token."""
    workload = Workload.create(all_at_once(2), fixed_lengths(200, 150, 2))
    options: dict[str, Any] = {"kv_tokens": 360, "limits": Limits(400, 400, 9)}
    result = simulate(first_who_waits(), workload, SEVEN, compiled=compiled, **options)
    assert result.requests.preemptions.min() > FUTILE


@pytest.mark.parametrize("compiled", [True, False])
def test_a_key_with_ties_infinities_and_a_constant(compiled: bool) -> None:
    workload = drawn(5, 20, 50.0)
    plain = simulate("rank_org", workload, SEVEN, kv_tokens=500, compiled=False)
    ties = own(key=lambda r: 7)
    assert_same(
        simulate(ties, workload, SEVEN, kv_tokens=500, compiled=compiled),
        plain,
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_progress_counts_the_arrivals(compiled: bool) -> None:
    seen: list[int] = []
    workload = drawn(0, 1000, 1e3)
    simulate("vllm", workload, SEVEN, progress=seen.append, compiled=compiled)
    assert sum(seen) == 1000 and len(seen) > 100
