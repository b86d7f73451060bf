"""vLLM's scheduler with the choice of a policy, on a small likeness of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.plan import BatchPlan, Checkpoint, Preempt
from jaxserve.sched.state.request_table import HELD, RUNNING, WAITING
from jaxserve.vllm.metrics import MISSED, REQUESTS
from jaxserve.vllm.mirror import LOOK, ManagerPool
from tests.vllm import fake
from tests.vllm.fake import Request, RequestStatus

POLICIES = ("goodput", "sarathi", "edf", "fastgen", "qoserve", "autellix")


@pytest.fixture(autouse=True, scope="module")
def _vllm() -> Iterator[None]:
    with fake.installed():
        yield


def made(policy: str = "sarathi", **options: Any) -> Any:
    from jaxserve.vllm import Scheduler

    config, cache = fake.configs(policy, **options)
    return Scheduler(config, kv_cache_config=cache)


def step(scheduler: Any) -> dict[str, int]:
    """Serves a step. Returns its tokens by request."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, None)
    return dict(output.num_scheduled_tokens)


def agrees(scheduler: Any) -> None:
    """What the policy would see is vLLM's state."""
    mirror, table = scheduler._mirror, scheduler._mirror.table
    mirror.follow(scheduler.running, list(scheduler.waiting))
    for request in scheduler.requests.values():
        row = mirror._rows[request.request_id]
        runs = request.status == RequestStatus.RUNNING
        assert table.state[row] == (RUNNING if runs else WAITING)
        assert table.received[row] == request.num_output_tokens
        assert table.pending(np.array([row])) == request.num_tokens - request.num_computed_tokens
        held = scheduler.kv_cache_manager.held.get(request.request_id, [])
        assert mirror.pool.held[row] == len(held) and mirror.pool.private(row) == 2 * len(held)
    assert mirror.pool.num_free == 2 * scheduler.kv_cache_manager.free_blocks


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20), st.booleans()), max_size=12),
    st.integers(12, 30),
    st.sets(st.integers(0, 11), max_size=2),
)
def test_every_request_ends(
    policy: str, asked: list[tuple[int, int, bool]], blocks: int, aborted: set[int]
) -> None:
    scheduler = made(policy, blocks=blocks)
    for i, (length, most, targets) in enumerate(asked):
        said = {"ttft_ms": 100, "tbt_ms": 20} if targets else {}
        scheduler.add_request(Request(str(i), length, most, **said))
        step(scheduler)
        agrees(scheduler)
    for i in aborted:
        if str(i) in scheduler.requests:
            scheduler.finish_requests(str(i), RequestStatus.FINISHED_ABORTED)
    for _ in range(1000):
        if not scheduler.requests:
            break
        step(scheduler)
        agrees(scheduler)
    assert not scheduler.requests and not len(scheduler._mirror) and not scheduler._failed
    assert scheduler.kv_cache_manager.free_blocks == blocks - 1
    assert scheduler._mirror.table.num_free == scheduler._mirror.table.capacity


class Fixed:
    """A policy with given plans: tokens by name, and who is preempted before."""

    def __init__(self, scheduler: Any, *plans: dict[str, int], preempts: tuple[str, ...] = ()):
        self.scheduler, self.plans, self.preempts = scheduler, list(plans), preempts

    def __call__(self, view: Any, now: float) -> BatchPlan:
        rows, plan = self.scheduler._mirror._rows, self.plans.pop(0)
        who = np.array([rows[name] for name in plan], np.int64)
        counts = np.array(list(plan.values()), np.int64)
        end = view.table.computed[who] + counts
        gone = np.array([rows[name] for name in self.preempts], np.int64)
        operations = (Preempt.whole(gone),) if len(gone) else ()
        return BatchPlan(who, counts, end, np.zeros_like(who), operations)


def planned(monkeypatch: pytest.MonkeyPatch, scheduler: Any, *plans: Any, **options: Any) -> None:
    policy = type(scheduler._mirror.policy)
    fixed = Fixed(scheduler, *plans, **options)
    monkeypatch.setattr(policy, "plan", lambda _, view, now: fixed(view, now))


def test_a_step_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = made(blocks=40)
    for name in "abc":
        scheduler.add_request(Request(name, 6, 5))
    planned(monkeypatch, scheduler, {"b": 6}, {"c": 2, "b": 1}, {"c": 4})
    assert [step(scheduler) for _ in range(3)] == [{"b": 6}, {"b": 1, "c": 2}, {"c": 4}]
    assert [one.request_id for one in scheduler.running] == ["c", "b"]
    assert [one.request_id for one in scheduler.waiting] == ["a"]


def test_a_plan_preempts(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = made(blocks=4)
    for name in "ab":
        scheduler.add_request(Request(name, 8, 5))
    planned(monkeypatch, scheduler, {"a": 8})
    step(scheduler)
    planned(monkeypatch, scheduler, {"b": 8}, preempts=("a",))
    assert step(scheduler) == {"b": 8}
    assert scheduler.requests["a"].status == RequestStatus.PREEMPTED
    agrees(scheduler)
    assert scheduler._mirror.preemptions == 1


def test_a_request_for_which_vllm_has_no_blocks_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = made(blocks=4)
    for name in "ab":
        scheduler.add_request(Request(name, 8, 5))
    planned(monkeypatch, scheduler, {"a": 4, "b": 4}, {"b": 4})
    scheduler.kv_cache_manager.free_blocks = 1
    assert step(scheduler) == {"a": 4}
    agrees(scheduler)
    assert step(scheduler) == {}
    assert step(scheduler) == {}, "vLLM plans this step, as nothing came of the one before"


@pytest.mark.parametrize("broken", [RuntimeError("no"), Checkpoint(*3 * (np.zeros(0, int),))])
def test_vllm_goes_on_without_a_policy_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: Any
) -> None:
    def fails(*_: Any) -> BatchPlan:
        if isinstance(broken, Exception):
            raise broken
        return BatchPlan(operations=(broken,))

    scheduler = made()
    monkeypatch.setattr(type(scheduler._mirror.policy), "plan", fails)
    scheduler.add_request(Request("a", 5, 3))
    with caplog.at_level(logging.ERROR):
        steps = [step(scheduler) for _ in range(3)]
    assert steps == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert caplog.text.count("Policy sarathi has failed") == 1
    assert not len(scheduler._mirror)


def test_steps_have_no_more_adapters_than_vllm_allows() -> None:
    scheduler = made("goodput", blocks=40, lora_config=SimpleNamespace(max_loras=2))
    for i in range(8):
        scheduler.add_request(Request(str(i), 2, 4, adapter=i % 4))
    while scheduler.requests:
        step(scheduler)  # the likeness checks
    assert not scheduler._failed


def test_requests_wait_for_their_grammar() -> None:
    scheduler = made()
    first, second = Request("a", 4, 2), Request("b", 4, 2)
    first.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    first.grammar_is_ready = False
    scheduler.add_request(first)
    scheduler.add_request(second)
    assert step(scheduler) == {"b": 4}
    assert scheduler._mirror.table.state[scheduler._mirror._rows["a"]] == HELD
    first.grammar_is_ready = True
    assert step(scheduler) == {"b": 1, "a": 4}


def test_each_turn_of_a_session_has_a_verdict() -> None:
    scheduler = made()
    request = Request("a", 4, 9, ttft_ms=1e6)
    scheduler.add_request(request)
    step(scheduler)
    before = count(tier="realtime", verdict="met")
    scheduler._update_request_as_session(request, 3)
    assert count(tier="realtime", verdict="met") == before + 1
    assert scheduler._mirror.table.prompt_len[scheduler._mirror._rows["a"]] == 8
    agrees(scheduler)
    while scheduler.requests:
        step(scheduler)
        agrees(scheduler)
    assert count(tier="realtime", verdict="met") == before + 2


def test_nothing_runs_while_vllm_is_paused() -> None:
    scheduler = made()
    scheduler.add_request(Request("a", 4, 2))
    scheduler._pause_state = fake.PauseState.PAUSED_ALL
    assert step(scheduler) == {}
    scheduler._pause_state = fake.PauseState.UNPAUSED
    assert [step(scheduler) for _ in range(3)] == [{"a": 4}, {"a": 1}, {}]


def count(**labels: str) -> float:
    return float(REQUESTS.labels(**labels)._value.get())


def test_verdicts_are_counted() -> None:
    tiers = [("realtime", one) for one in ("met", "missed", "none")] + [("best_effort", "none")]
    before = [count(tier=tier, verdict=verdict) for tier, verdict in tiers]
    late = MISSED.labels("ttft")._value.get()
    scheduler = made()
    scheduler.add_request(Request("a", 4, 2, ttft_ms=1e6))
    scheduler.add_request(Request("b", 4, 2, ttft_ms=1e-6))
    scheduler.add_request(Request("c", 4, 2, tier="realtime"))
    scheduler.add_request(Request("d", 4, 2))
    while scheduler.requests:
        step(scheduler)
    after = [count(tier=tier, verdict=verdict) for tier, verdict in tiers]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1, 1]
    assert MISSED.labels("ttft")._value.get() == late + 1


def test_wrong_targets_end_a_request_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = made()
    request = Request("a", 4, 5, ttft_ms="soon")
    scheduler.add_request(request)
    step(scheduler)
    assert request.status == RequestStatus.FINISHED_ERROR and not len(scheduler._mirror)
    assert "Request a is refused: ttft_ms: must be a number" in caplog.text


def test_the_door_refuses_wrong_targets() -> None:
    from jaxserve.vllm import Targets

    said = SimpleNamespace(extra_args={"tbt_ms": 5})
    Targets.validate_params(said)
    said.extra_args["tier"] = "gold"
    with pytest.raises(ValueError, match="tier: must be realtime or best_effort"):
        Targets.validate_params(said)
    processor = Targets(None, None, False)
    assert processor.is_argmax_invariant() and processor.apply(said) is said


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "--pipeline-parallel"),
        ({"additional_config": {"jaxserve": {"policy": "bros"}}}, "policy 'bros' cannot run"),
    ],
)
def test_what_it_cannot_do_is_refused_at_the_start(changes: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made(**changes)


def test_models_with_windows_are_refused() -> None:
    from jaxserve.vllm import Scheduler

    config, cache = fake.configs("sarathi")
    cache.kv_cache_groups *= 2
    with pytest.raises(ValueError, match="models with windows or states"):
        Scheduler(config, kv_cache_config=cache)


def test_an_asynchronous_engine_gets_an_asynchronous_scheduler() -> None:
    config, _ = fake.configs("sarathi")
    config.scheduler_config.async_scheduling = True
    assert isinstance(made(scheduler_config=config.scheduler_config), fake.AsyncScheduler)
    assert not isinstance(made(), fake.AsyncScheduler)


def test_cached_prefixes_are_looked_up_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = made()
    shared, own = SimpleNamespace(ref_cnt=2), SimpleNamespace(ref_cnt=0)
    asked: list[str] = []

    def hit(request: Request) -> tuple[Any, int, int]:
        asked.append(request.request_id)
        return SimpleNamespace(blocks=([shared, own],)), 8, 0

    monkeypatch.setattr(scheduler.kv_cache_manager, "get_computed_blocks", hit)
    requests = [Request(str(i), 12, 4) for i in range(LOOK + 5)]
    for request in requests:
        scheduler.add_request(request)
    mirror = scheduler._mirror
    mirror.follow([], requests)
    assert asked == [str(i) for i in range(LOOK)]
    mirror.follow([], requests)
    assert set(asked) == {one.request_id for one in requests}
    row = np.array([mirror._rows["3"]])
    assert mirror.table.computed[row] == 8
    # Of three blocks, K and V each, one is held by others; the other hit is taken from the free.
    assert mirror.pool.needed(row, np.array([12]), np.zeros(1, np.int64)) == 4


def test_a_pool_counts_what_only_one_row_holds() -> None:
    manager = fake.Manager(8)
    manager.held["a"] = [SimpleNamespace(ref_cnt=n) for n in (1, 2, 1)]
    pool = ManagerPool(manager, 8, fake.BLOCK, 4, 16)
    pool.names[2] = "a"
    assert pool.private(2) == 4 and pool.private(np.array([2, 2])).tolist() == [4, 4]
