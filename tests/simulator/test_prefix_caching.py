"""Simulated requests find what others have computed, as far as their tokens are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.policy import Limits
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import Routing
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.shared_prefixes import reusable_tokens
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload, WorkloadError
from tests.simulator.grouped import simulate

PLACE, BLOCK = system("llama-3-8b@a100"), 16


def served(work: Workload, policy: str = "sarathi", **options: Any) -> SimulationResult:
    return simulate(policy, work, PLACE, block_size=BLOCK, prefix_caching=True, **options)


def drawn(name: str, count: int, rate: float) -> Workload:
    return WorkloadSpec(name, count, rate=rate).make_workload(0)


@pytest.mark.parametrize("name", ["conversation", "agent"])
def test_with_room_and_time_all_is_found_that_there_is(name: str) -> None:
    work = drawn(name, 60, 0.01)  # one after the other
    found = served(work, kv_tokens=10_000_000).requests.found
    last = (work.prompt_len - 1) // BLOCK * BLOCK  # it has to say what comes next
    cached = work.lengths.total - 1  # of each stream: nobody computes the last token of an answer
    before = np.where(work.prefix_of >= 0, cached[work.prefix_of] // BLOCK * BLOCK, 0)
    there = np.minimum(reusable_tokens(work, BLOCK), before)
    assert found is not None and found.tolist() == np.minimum(there, last).tolist()
    assert found.sum() > 0.5 * work.prompt_len.sum()


def test_what_is_found_takes_no_time() -> None:
    work = drawn("conversation", 80, 6.0)
    with_it, without = (
        served(work),
        simulate("sarathi", work, PLACE, block_size=BLOCK),
    )
    assert with_it.requests.found is not None and without.requests.found is None
    saved = without.batches.num_tokens.sum() - with_it.batches.num_tokens.sum()
    assert saved == with_it.requests.found.sum()
    assert with_it.requests.ttft.mean() < 0.8 * without.requests.ttft.mean()
    assert with_it.summary()["cached_tokens"] == with_it.requests.found.sum()


# Of the others tests/sched/cache/test_policies_share.py has the same, in small.
@pytest.mark.parametrize(
    "policy",
    [
        *("sarathi", "aptserve"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bros", "goodput", "fastserve")),
    ],
)
def test_what_there_is_room_for_is_found(policy: str) -> None:
    """Plans are checked, and little room makes all of them preempt or evict."""
    work = drawn("conversation", 25, 4.0)
    most = int(work.lengths.total.max()) + 2000
    memory = {"kv_tokens": most, "host_tokens": 5000}
    result = served(work, policy, limits=Limits(16384, 512, 64), checked=True, **memory)
    assert result.requests.finished.all()
    assert result.requests.found is not None and result.requests.found.sum() > 0


@pytest.mark.parametrize("name", [pytest.param("slo", marks=pytest.mark.slow), "prefix_affinity"])
def test_routers_send_conversations_back(name: str) -> None:
    work = drawn("conversation", 120, 2.0)
    there = {"replicas": 4, "interval": 0.5, "age": 0.1, "loss": 0.2}
    replicas = there.pop("replicas")
    looks, blind = (
        served(work, replicas=replicas, routing=Routing(name, prefixes=prefixes, **there))
        for prefixes in (True, False)
    )
    assert looks.requests.found is not None and blind.requests.found is not None
    assert looks.requests.found.sum() > 1.3 * blind.requests.found.sum()
    again = work.prefix_of >= 0
    same = looks.requests.replica[again] == looks.requests.replica[work.prefix_of[again]]
    assert same.mean() > 0.6


def test_without_prefix_caching_affinity_is_least_loaded() -> None:
    work = drawn("conversation", 60, 4.0)
    ways = ("prefix_affinity", "least_loaded")
    one, other = (
        simulate("sarathi", work, PLACE, replicas=3, routing=Routing(name, interval=0.5))
        for name in ways
    )
    assert (one.requests.replica == other.requests.replica).all()


@pytest.mark.slow
def test_host_memory_keeps_what_leaves_the_pool_where_that_pays() -> None:
    work, target = drawn("conversation", 60, 1.0), 2**20

    def run(host_tokens: int, swapped: float = 8e-8) -> SimulationResult:
        model = PLACE.cost_model
        k = dataclasses.replace(model.coefficients, swapped_slot=swapped)
        place = dataclasses.replace(PLACE, cost_model=dataclasses.replace(model, coefficients=k))
        memory = {"kv_tokens": 20_000, "host_tokens": host_tokens}
        return simulate("sarathi", work, place, block_size=BLOCK, prefix_caching=True, **memory)

    def found(result: SimulationResult) -> int:
        assert result.requests.found is not None
        return int(result.requests.found.sum())

    all_of_it = served(work, kv_tokens=target).requests.found
    assert all_of_it is not None
    none, some, much = run(0), run(10_000), run(target)
    assert found(none) < found(some) < found(much) == all_of_it.sum()
    assert none.requests.ttft.mean() > some.requests.ttft.mean() > much.requests.ttft.mean()
    saved, loaded = (getattr(much.batches, name).sum() for name in ("saved_slots", "loaded_slots"))
    assert saved >= loaded >= 2 * (found(much) - found(none))
    dear = run(target, swapped=1e-3)
    assert not dear.batches.saved_slots.any() and found(dear) == found(none)
    with pytest.raises(SimulationError, match="host memory"):
        served(work, host_tokens=target, compiled=True)


def test_what_comes_along_with_a_request_is_loaded_and_not_computed() -> None:
    """If there is host memory for it; whatever is not in a full block is computed."""
    work = WorkloadSpec("fixed:1000x8x2", rate=1.0).make_workload(0)
    moved = dataclasses.replace(work, brought=np.array([0, 500]))
    plain, found = (served(one, host_tokens=9000) for one in (work, moved))
    saved = plain.batches.num_tokens.sum() - found.batches.num_tokens.sum()
    assert saved == 500 // 16 * 16
    assert found.batches.loaded_slots.sum() == 2 * saved > 0 == plain.batches.loaded_slots.sum()
    assert found.requests.found is not None and found.requests.found.tolist() == [0, saved]
    full = served(moved, host_tokens=0).batches.num_tokens.sum()
    assert full == plain.batches.num_tokens.sum()
    with pytest.raises(WorkloadError, match="no more tokens than the prompt has"):
        dataclasses.replace(work, brought=np.array([0, 1001]))
