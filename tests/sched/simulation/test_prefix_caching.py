"""Simulated requests find what others have computed, as far as their tokens are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.sched.policy import Limits
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.simulator import simulate
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.workloads.shared_prefixes import reusable_tokens
from jaxserve.sched.workloads.specs import WorkloadSpec
from jaxserve.sched.workloads.workload import Workload

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
    with_it, without = served(work), simulate("sarathi", work, PLACE, block_size=BLOCK)
    assert with_it.requests.found is not None and without.requests.found is None
    saved = without.batches.num_tokens.sum() - with_it.batches.num_tokens.sum()
    assert saved == with_it.requests.found.sum()
    assert with_it.requests.ttft.mean() < 0.8 * without.requests.ttft.mean()
    assert with_it.summary()["cached_tokens"] == with_it.requests.found.sum()


# Of the others tests/sched/cache/test_policies_share.py has the same, in small.
@pytest.mark.parametrize("policy", ["sarathi", "goodput", "bros", "aptserve", "fastserve"])
def test_what_there_is_room_for_is_found(policy: str) -> None:
    """Plans are checked, and little room makes all of them preempt or evict."""
    work = drawn("conversation", 25, 4.0)
    most = int(work.lengths.total.max()) + 2000
    memory = {"kv_tokens": most, "host_tokens": 5000}
    result = served(work, policy, limits=Limits(16384, 512, 64), checked=True, **memory)
    assert result.requests.finished.all()
    assert result.requests.found is not None and result.requests.found.sum() > 0
