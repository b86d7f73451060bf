"""Requests that go on at another replica after their first token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO
from jaxserve.sched.routing.behind import Sent
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.routing.routers import Router
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
    fleet: dict[str, Any] = {
        "link": link,
        "faults": more.pop("faults", ()),
        "roles": more.pop("roles", None),
    }
    if interval := more.pop("interval", 0.5):
        fleet |= {"interval": interval, "age": 0.1, "loss": 0.05}
    routing = Routing("slo", **fleet)
    place = {"limits": LIMITS, "replicas": replicas, "routing": routing}
    place |= {"prefix_caching": True, "host_tokens": 200_000, "block_size": 16}
    return simulate("sarathi", workload, PLACE, **place | more)


@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 99),
    prompts=st.integers(0, 3),
    kv_tokens=st.sampled_from([9_000, 20_000]),
    dead=st.lists(st.integers(0, 3), unique=True, max_size=2),
    slow=st.integers(0, 3),
    interval=st.sampled_from([0.0, 0.5]),
    host_tokens=st.sampled_from([0, 500, 99_999]),
    per_token=st.sampled_from([5e-6, 5e-5, 1e-3]),
)
def test_nobody_is_lost_and_no_token_comes_twice(
    seed: int,
    prompts: int,
    kv_tokens: int,
    dead: list[int],
    slow: int,
    interval: float,
    host_tokens: int,
    per_token: float,
) -> None:
    workload = long_prompts(20, 12.0, seed)
    faults = [Fault(one, 1.0 + one / 3, notice=0.2) for one in dead]
    if slow not in dead:
        faults.append(Fault(slow, 0.5, slowdown=20.0))
    result = served(
        workload,
        Link(0.002, per_token),
        roles=(prompts, 4 - prompts) if prompts else None,
        faults=tuple(faults),
        interval=interval,
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
    assert (result.requests.moves == longer).all()
    assert result.summary()["num_moves"] == longer.sum()
    batches = result.batches
    prompts, decodes = batches.num_tokens - batches.num_decodes, batches.num_decodes
    first = batches.replica < 2
    assert decodes[first].sum() <= len(workload), "one that was in flight when it left"
    # What comes with its cache computes only its last block again.
    again = prompts[~first].sum() / longer.sum()
    assert again < 17, f"{again:.1f} tokens a request"


def test_tokens_come_while_a_cache_is_on_a_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent ahead; what would take longer than to be computed again is not waited for."""
    monkeypatch.setattr(Router, "goes_on_at", lambda router, here, *given: 1 - here)
    workload = long_prompts(12, 0.5)  # alone, so that nothing else delays it
    longest, again = [], []
    for per_token in (1e-6, 5e-5, 1e-3):
        result = served(workload, Link(0.002, per_token), replicas=2)
        gaps, _ = result.requests.tbt
        longest.append(float(np.max(gaps)))
        moved = result.requests.moves == 1
        assert (moved == (workload.output_len > (1 if per_token < 1e-5 else 12))).mean() > 0.8
        again.append(int(result.batches.num_tokens.sum() - result.batches.num_decodes.sum()))
    prompts = int(workload.prompt_len.sum())
    assert max(longest[:2]) < 0.055 < 5e-5 * workload.prompt_len.min(), longest
    assert again[0] < prompts + 17 * 12 and again[1] < prompts + 17 * 12
    assert again[2] > 1.8 * prompts and longest[2] < 0.5, longest


def test_it_stays_if_the_replica_dies_to_which_its_cache_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `deploy/moves/mover.py` has it: no token waits for that."""
    monkeypatch.setattr(Router, "goes_on_at", lambda router, here, *given: 1 - here)
    workload = long_prompts(1, 0.5)
    link = Link(0.002, 5e-5)
    alone = served(workload, link, replicas=2).requests
    assert alone.moves[0] == 1
    begun = float(alone.times.first_token[0])
    assert begun + link.seconds(int(workload.prompt_len[0])) > begun + 0.05
    fault = Fault(int(alone.replica[0]), begun + 0.03, notice=5.0)
    stayed = served(workload, link, replicas=2, faults=(fault,)).requests
    gaps, _ = stayed.tbt
    assert stayed.finished.all() and stayed.moves[0] == 0 and gaps.max() < 0.055


@pytest.mark.parametrize("dead", [(0, 1), (2, 3)])
def test_where_nobody_of_a_role_is_up_the_others_do_its_work(dead: tuple[int, ...]) -> None:
    workload = long_prompts(40, 6.0)
    faults = tuple(Fault(one, 0.5, notice=0.2) for one in dead)
    requests = served(workload, LINK, roles=(2, 2), faults=faults).requests
    assert requests.finished.all() and not requests.failed.any()
    assert not np.isin(requests.replica[10:], dead).any()


def test_moves_keep_tokens_in_time_that_prompts_would_delay() -> None:
    workload = long_prompts(200, 12.0)
    together, moved = (served(workload, link).attained.mean() for link in (None, LINK))
    assert moved > together + 0.2, (together, moved)


def behind(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, link: Link | None = LINK, **more: Any
) -> tuple[SimulationResult, list[bool]]:
    """What comes of it, and whether each that was behind and moved had begun."""
    moved, find = list[bool](), Router.behind

    def finds(router: Router, here: int, there: list[Sent], now: float) -> list[tuple[int, int]]:
        found = find(router, here, there, now)
        moved.extend(there[number].begun for number, _ in found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Router, "behind", finds)
        return served(workload, link, **more), moved


def with_targets_of(lengths: str, rate: float | None, ttft: float, tbt: float) -> Workload:
    arrivals = "all" if rate is None else "poisson"
    drawn = WorkloadSpec(lengths, arrivals=arrivals, rate=rate).make_workload(0)
    return drawn.with_terms(with_targets(drawn.terms, SLO(ttft=ttft, tbt=tbt)))


@pytest.mark.parametrize(
    ("workload", "begun"),
    [
        (with_targets_of("fixed:200x300x60", 40.0, 1.0, 0.08), True),
        (with_targets_of("fixed:6000x20x24", None, 6.0, 0.2), False),
    ],
)
def test_what_is_behind_at_a_slow_replica_moves(
    workload: Workload, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = (Fault(0, 0.6, slowdown=10.0),)
    better, moved = behind(workload, monkeypatch, faults=faults)
    assert better.requests.finished.all() and begun in moved
    monkeypatch.setattr(Router, "behind", lambda *args: [])
    stay = served(workload, LINK, faults=faults)
    gain = better.attained.mean() - stay.attained.mean()
    assert gain > 0.1, (better.attained.mean(), stay.attained.mean())


@pytest.mark.parametrize("interval", [0.0, 0.5])
def test_nothing_moves_where_nothing_is_behind(
    interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = with_targets_of("fixed:200x50x60", 20.0, 5.0, 0.5)
    assert behind(workload, monkeypatch, interval=interval)[1] == []


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
