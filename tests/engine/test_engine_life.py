"""What becomes of callers when the engine fails, never starts, shuts down, or has no place for
them."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.device.executor import StepHandle
from jaxserve.engine.engine import Engine
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.request_places import RequestPlaces
from jaxserve.sched import registry
from jaxserve.sched.request import InvalidRequest, Request, SamplingParams
from jaxserve.sched.scheduler import Scheduler
from tests.cost_models import FLAT
from tests.engine.harness import SCARCE, TIMEOUT, engine, send


class FailingHandle:
    def __init__(self, handle: StepHandle) -> None:
        self._handle = handle

    def result(self) -> None:
        self._handle.result()
        raise RuntimeError("the device is on fire")


def test_a_failure_ends_every_call_and_refuses_new_ones(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"]) as running:
        streams = [send(running, [3], max_tokens=2)[1] for _ in range(4)]
        for stream in streams:
            stream.wait()
        failures: list[BaseException] = []
        running.add_failure_listener(failures.append)
        executor = running.executor
        submit = executor.submit

        def failing(*args: Any, **kwargs: Any) -> FailingHandle:
            return FailingHandle(submit(*args, **kwargs))

        executor.submit = failing  # type: ignore[assignment, method-assign]
        streams = []
        refused = 0
        for _ in range(5):
            try:
                streams.append(send(running, [3], max_tokens=9)[1])
            except EngineStopped:
                refused += 1
        for stream in streams:
            last = stream.wait().last()
            assert last.finish_reason == FinishReason.ERROR
            assert "on fire" in last.error
        assert streams and len(streams) + refused == 5
        assert len(failures) == 1
        running.add_failure_listener(failures.append)
        assert len(failures) == 2, "told at once of what has happened already"
        with pytest.raises(EngineStopped, match="failed"):
            send(running, [3], max_tokens=1)
        assert running.drain(TIMEOUT)


PREEMPTS_FOR_EVER = """
from jaxserve.sched.unified.policy_spec import where
from jaxserve.sched.registry import register
from jaxserve.sched.unified.unified_policy import Group, Phase, UnifiedPolicy

@register("unfair", summary="those who wait preempt those who run", source="none")
def unfair():
    groups = (Group(Phase.WAITING, preempts=True), Group(Phase.RUNNING))
    key = lambda r: where(r.waiting, 0, 1)
    return UnifiedPolicy(groups, mixed_batches=True, chunked=True, key=key)
"""


def test_a_policy_that_gets_nowhere_fails_its_requests(
    shapes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    path = tmp_path / "mine.py"
    path.write_text(PREEMPTS_FOR_EVER)
    options: dict[str, Any] = {"scheduler__policy": f"{path}:unfair", **SCARCE}
    with engine(shapes["opt"], scheduler__max_prefill_tokens=4, **options) as running:
        # Of 72 tokens; prompts take ten steps.
        streams = [send(running, [3] * 40, max_tokens=9)[1] for _ in range(2)]
        for stream in streams:
            last = stream.wait().last()
            assert last.finish_reason == FinishReason.ERROR
            problem = rf"InvalidPlan: policy {path}:unfair: by step \d+ it has preempted a request"
            assert re.match(problem, last.error)
        assert running.stats().steps < 1000
        _, alone = send(running, [3] * 40, max_tokens=9, ignore_eos=True)
        assert alone.wait().reason is FinishReason.LENGTH, "it is no reason to refuse others"


def test_an_engine_that_never_started_lets_its_callers_go(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"]) as running:
        idle = Engine(
            running.executor,
            running._scheduler,
            running.tokenizer,
            running.info(),
            cost_model=running._cost_model,
            eos_ids=(),
        )
        _, stream = send(idle, [3], max_tokens=3)
        idle.stop()
        assert stream.wait().reason == FinishReason.CANCELLED
        with pytest.raises(EngineStopped):
            send(idle, [3], max_tokens=3)
        with pytest.raises(InvalidRequest, match="n: 16 continuations; at most"):
            small = Engine(
                running.executor,
                Scheduler(
                    running._scheduler.policy,
                    running._scheduler.view.limits,
                    num_blocks=8,
                    block_size=4,
                    max_model_len=8,
                    capacity=4,
                    cost_model=FLAT,
                ),
                running.tokenizer,
                running.info(),
                cost_model=running._cost_model,
                eos_ids=(),
            )
            send(small, [3], max_tokens=3, n=16)


def test_drain_lets_requests_finish_and_takes_no_more(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"]) as running:
        streams = [send(running, [3, 4], max_tokens=20, ignore_eos=True)[1] for _ in range(5)]
        assert running.drain(TIMEOUT)
        assert [s.wait().reason for s in streams] == [FinishReason.LENGTH] * 5
        with pytest.raises(EngineStopped, match="shutting down"):
            send(running, [3], max_tokens=1)


def test_drain_cancels_what_outlasts_the_grace(shapes: dict[str, Path]) -> None:
    with engine(shapes["opt"]) as running:
        inside = threading.Event()

        def hold(output: Output) -> None:
            """Until the grace is over and the engine is told to cancel."""
            if output.finish_reason is not None:
                return  # that it was cancelled
            inside.set()
            with running._wake:
                running._wake.wait_for(lambda: running._inbox, TIMEOUT)

        _, stream = send(running, [3, 4], hold, max_tokens=40, ignore_eos=True)
        assert inside.wait(TIMEOUT)
        assert not running.drain(0.01)
        assert stream.wait().reason == FinishReason.CANCELLED


def ask(name: str, tenant: str = "", n: int = 1, weight: float | None = None) -> Request:
    return Request(name, (0,), SamplingParams(4, n=n), tenant=tenant, weight=weight)


def fill(places: RequestPlaces, tenant: str, most: int = 1000) -> int:
    """How many more it gets."""
    for number in range(most):
        try:
            places.reserve(ask(f"{tenant}/{len(places)}/{number}", tenant))
        except QueueFull:
            return number
    raise AssertionError("nobody is refused")


@pytest.mark.parametrize("tenant", ["", "alone"])
def test_who_is_alone_may_have_all_of_them(tenant: str) -> None:
    places = RequestPlaces(16)
    assert fill(places, tenant) == 16


def test_where_others_come_one_leaves_some() -> None:
    places = RequestPlaces(80)
    places.reserve(ask("first", "light"))
    assert fill(places, "heavy") == 70
    assert places.end("first")
    with pytest.raises(QueueFull, match="70 continuations of key heavy are queued or running, its"):
        places.reserve(ask("more", "heavy"))
    assert fill(places, "light") > 5


def test_places_come_back_as_continuations_end() -> None:
    places = RequestPlaces(4)
    places.reserve(ask("a", n=3))
    with pytest.raises(QueueFull, match="4 continuations are queued or running"):
        places.reserve(ask("b", n=2))
    with pytest.raises(InvalidRequest, match="already being served"):
        places.reserve(ask("a"))
    with pytest.raises(InvalidRequest, match="n: 5 continuations; at most 4"):
        places.check(ask("c", n=5))
    assert [places.end("a") for _ in range(3)] == [False, False, True]
    assert not places
    places.reserve(ask("b", n=4))
    assert places.ids == ["b"]
    places.clear()
    assert not places.ids and fill(places, "") == 4


def test_a_small_queue_still_takes_each_tenants_first() -> None:
    places = RequestPlaces(2)
    places.reserve(ask("a", "one", n=1))
    places.reserve(ask("b", "two", n=1))
    assert len(places) == 2
