"""Requests that go on at another replica after their first token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.slo.classes import with_targets
from jaxserve.simulator.replica.replica import Replica
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import Fault, Routing
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from tests.sched.cache.invariants import check_pool
from tests.simulator.grouped import simulate

PLACE = system("llama-3-8b@a100")
LIMITS = Limits(8192, 512, 256)
LINK = Link(0.002, 5e-6)


def long_prompts(count: int, rate: float, seed: int = 0) -> Workload:
    spec = WorkloadSpec("longbench", count, rate=rate, max_tokens="length")
    drawn = spec.make_workload(seed)
    return drawn.with_terms(with_targets(drawn.terms, SLO(ttft=1.0, tbt=0.05)))


def served(
    workload: Workload, link: Link | None, replicas: int = 4, **more: Any
) -> SimulationResult:
    fleet = {"link": link, "faults": more.pop("faults", ()), "roles": more.pop("roles", None)}
    routing = Routing("slo", interval=0.5, age=0.1, loss=0.05, **fleet)
    place = {"limits": LIMITS, "replicas": replicas, "routing": routing}
    place |= {"prefix_caching": True, "host_tokens": 200_000, "block_size": 16}
    return simulate("sarathi", workload, PLACE, **place | more)


@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 99),
    prompts=st.integers(0, 3),
    kv_tokens=st.sampled_from([9_000, 20_000]),
    dead=st.lists(st.integers(0, 3), unique=True, max_size=3),
    host_tokens=st.sampled_from([0, 500, 99_999]),
)
def test_nobody_is_lost_and_no_token_comes_twice(
    seed: int, prompts: int, kv_tokens: int, dead: list[int], host_tokens: int
) -> None:
    workload = long_prompts(20, 12.0, seed)
    faults = tuple(Fault(one, 1.0 + one / 3, notice=0.2) for one in dead)
    result = served(
        workload,
        LINK,
        roles=(prompts, 4 - prompts) if prompts else None,
        faults=faults,
        kv_tokens=kv_tokens,
        host_tokens=host_tokens,
        watch=lambda view: check_pool(view.pool),
    )
    requests = result.requests
    assert requests.finished.all()
    assert (requests.tokens == requests.output_len).all()
    gaps, _ = requests.tbt
    assert (gaps >= 0).all() and not np.isnan(requests.token_times).any()


@pytest.mark.parametrize("host_tokens", [200_000, 20_000])
def test_a_fixed_split_keeps_prompts_and_decodes_apart(
    host_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where host memory is full of what has left the pool."""
    workload = long_prompts(80, 6.0)
    more = {"host_tokens": host_tokens, "kv_tokens": 60_000}
    known, leave = list[int](), Replica.leave

    def leaving(replica: Replica, number: int) -> list[bytes]:
        keys = leave(replica, number)
        known.append(len(replica._left))
        return keys

    monkeypatch.setattr(Replica, "leave", leaving)
    result = served(workload, LINK, roles=(2, 2), **more)
    assert 0 < max(known) < 10, "a replica knows only of those that have just left"
    longer = workload.output_len > 1
    assert (result.requests.replica[longer] >= 2).all(), "they end where decodes are"
    batches = result.batches
    prompts, decodes = batches.num_tokens - batches.num_decodes, batches.num_decodes
    first = batches.replica < 2
    assert decodes[first].sum() <= len(workload), "one that was in flight when it left"
    # What comes with its cache computes only its last block again.
    again = prompts[~first].sum() / longer.sum()
    assert again < 17, f"{again:.1f} tokens a request"


@pytest.mark.parametrize("dead", [(0, 1), (2, 3)])
def test_where_nobody_of_a_role_is_up_the_others_do_its_work(dead: tuple[int, ...]) -> None:
    workload = long_prompts(40, 6.0)
    faults = tuple(Fault(one, 0.5, notice=0.2) for one in dead)
    requests = served(workload, LINK, roles=(2, 2), faults=faults).requests
    assert requests.finished.all() and not requests.failed.any()
    assert not np.isin(requests.replica[10:], dead).any()


def test_moves_keep_tokens_in_time_that_prompts_would_delay() -> None:
    workload = long_prompts(400, 12.0)
    together, moved = (served(workload, link).attained.mean() for link in (None, LINK))
    assert moved > together + 0.2, (together, moved)


def test_a_pause_is_as_long_as_the_way() -> None:
    workload = long_prompts(1, 1.0)
    slow = Link(0.3, 1e-4)
    requests = served(workload, slow, replicas=2, roles=(1, 1)).requests
    way = slow.seconds(int(workload.prompt_len[0]) // 16 * 16)
    gap = float(np.diff(requests.token_times[:2])[0])
    assert way < gap < way + 0.1


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: Link(-1.0, 0.0), "must be 0 or more"),
        (lambda: Link(0.0, float("nan")), "must be 0 or more"),
        (lambda: Routing("least_loaded", link=LINK), "with routing slo only"),
        (lambda: Routing("slo", roles=(1, 1)), "without a link"),
        (lambda: Routing("slo", 2, link=LINK, roles=(3, 1)), "at least routers, 2"),
        (lambda: served(long_prompts(1, 1.0), LINK, roles=(2, 1)), "of all 4 replicas"),
    ],
)
def test_what_cannot_be(made: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made()


def test_moves_do_not_run_compiled() -> None:
    with pytest.raises(SimulationError, match="no moves"):
        served(long_prompts(4, 1.0), LINK, compiled=True)
