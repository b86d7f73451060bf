"""The compiled simulation with prefix caching: the outcome is that of the Python, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.policy import Limits
from jaxserve.sched.unified.policy_spec import where
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy
from jaxserve.simulator import dispatch
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import Fault, Routing
from jaxserve.simulator.workloads.prefixes import NO_PREFIX, Prefixes
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.simulator.compiled.test_compiled import (
    ENGINE,
    HOST,
    PLAIN,
    SEVEN,
    SLOW_HOST,
    VARIED,
    assert_same,
    drawn,
)
from tests.simulator.grouped import simulate


def shared(seed: int, count: int, rate: float, prompts: int) -> Workload:
    """Of `drawn`, most of which go on with a prefix of an earlier one, which may be all of it."""
    plain, rng = drawn(seed, count, rate), np.random.default_rng(seed)
    prefix_of = np.array([int(rng.integers(NO_PREFIX, max(i, 1))) for i in range(count)])
    prefix_of = np.where(rng.random(count) < rng.choice([0.3, 0.9]), prefix_of, NO_PREFIX)
    prefix_of[rng.random(count) < 0.3] = 0
    prefix_of[0] = NO_PREFIX
    prompt, length = rng.integers(1, prompts, count), np.zeros(count, np.int64)
    for i in np.flatnonzero(prefix_of >= 0).tolist():
        one = prefix_of[i]
        most = min(int(prompt[one] + plain.output_len[one]), 300)
        length[i] = most if rng.random() < 0.5 else rng.integers(1, most + 1)
        prompt[i] = length[i] + rng.choice([0, 1, prompt[i]])
    lengths = Lengths(prompt, plain.output_len)
    return Workload.create(
        plain.arrival,
        lengths,
        limit=plain.limit,
        terms=plain.terms,
        prefixes=Prefixes(prefix_of, length),
    )


def both(policy: Any, workload: Workload, place: Any = SEVEN, **options: Any) -> SimulationResult:
    options["prefix_caching"] = True
    slow = simulate(policy, workload, place, compiled=False, **options)
    fast = simulate(policy, workload, place, compiled=True, **options)
    assert_same(fast, slow)
    np.testing.assert_array_equal(fast.requests.found, slow.requests.found)
    return fast


def room(workload: Workload, more: int) -> int:
    """Tokens of a cache that holds the longest request, and some more."""
    return int((workload.prompt_len + workload.limit).max()) + more


def left(r: Any) -> Any:
    """A key of its own for each policy would be compiled for each."""
    return where(r.decoding, 0.0, r.prompt_len + r.generated - r.computed)


def by_what_is_found(**changes: Any) -> UnifiedPolicy:
    """Whose order changes whenever those who wait find more, or less."""
    groups = (Group(Phase.ANY, preempts=True),)
    known: dict[str, Any] = {"groups": groups, "mixed_batches": True, "chunked": True, "key": left}
    return UnifiedPolicy(**known | changes)


@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(PLAIN + VARIED),
    more=st.sampled_from([16, 100, 800, 3000]),
    prompts=st.sampled_from([5, 60, 200]),
    prefill=st.sampled_from([16, 100, 700]),
    rows=st.sampled_from([1, 5, 40]),
    max_queue=st.sampled_from([None, None, 0, 5]),
    block_size=st.sampled_from([1, 2, 8, 16]),
    rate=st.sampled_from([5.0, 50.0, 1e4]),
    rules=st.sampled_from(["jaxserve", "infermax_paper"]),
    overlap=st.booleans(),
    host=st.sampled_from([HOST, SLOW_HOST]),
    padding=st.sampled_from([None, ENGINE]),
    replicas=st.sampled_from([1, 1, 2]),
    routing=st.sampled_from(["round_robin", "least_loaded", Routing("slo", prefixes=False)]),
)
@settings(max_examples=12, deadline=None)
def test_compiled_or_not(
    seed: int,
    policy: str,
    prompts: int,
    more: int,
    prefill: int,
    rows: int,
    rate: float,
    host: Any,
    padding: Any,
    **options: Any,
) -> None:
    place = dataclasses.replace(SEVEN, host=host, padding=padding)
    workload = shared(seed, 30, rate, prompts)
    options |= {"kv_tokens": room(workload, more), "limits": Limits(700, prefill, rows)}
    both(policy, workload, place, seed=seed, **options)


@given(
    seed=st.integers(0, 1 << 30),
    more=st.sampled_from([16, 200]),
    mixed=st.booleans(),
    probing=st.booleans(),
    apart=st.booleans(),
    block_size=st.sampled_from([1, 4]),
)
@settings(max_examples=8, deadline=None)
def test_keys_and_phases_of_those_who_find_all_but_a_token(
    seed: int, more: int, mixed: bool, probing: bool, apart: bool, **options: Any
) -> None:
    """Once preempted, they wait and decode in one."""
    workload = shared(seed, 30, 1e3, 60)
    changes: dict[str, Any] = {"mixed_batches": mixed, "probing": probing}
    if apart:
        parts = Phase.PREFILL, Phase.DECODE | Phase.WAITING
        changes["groups"] = tuple(Group(phases, preempts=True) for phases in parts)
    policy = by_what_is_found(**changes)
    both(policy, workload, kv_tokens=room(workload, more), limits=Limits(700, 40, 30), **options)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_replica_knew_dies_with_it(seed: int) -> None:
    workload = shared(seed, 60, 200.0, 60)
    faults = (Fault(0, 0.1, notice=0.05), Fault(1, 0.3, 3.0))
    both(
        "edf",
        workload,
        kv_tokens=room(workload, 200),
        limits=Limits(400, 100, 8),
        replicas=3,
        routing=Routing("slo", 1, 0.05, faults=faults, prefixes=False),
    )


def test_conversations_are_preempted_and_evicted() -> None:
    workload = WorkloadSpec("conversation", 120, rate=20.0).make_workload(0)
    found = [
        both("sarathi", workload, kv_tokens=room(workload, more)).requests for more in (200, 10**6)
    ]
    assert found[0].preemptions.any() and not found[1].preemptions.any()
    assert 0 < found[0].found.sum() < found[1].found.sum()


def test_compiled_is_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "run_in_python", None)
    monkeypatch.setattr(dispatch, "_FEW", 0)
    assert simulate("edf", shared(0, 9, 9.0, 60), SEVEN, prefix_caching=True).requests.found.any()
