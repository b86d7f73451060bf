"""Batching, chunking, preemption, policy and overlap never change greedy text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.stats import Observer, RequestStats, StepRecorder
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.request import SLO, Request
from jaxserve.sched.state.request_table import State
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from tests.engine.conftest import Texts
from tests.engine.harness import SAMPLING, SCARCE, engine, generate, prompts, send

# What is done to the requests; "alone" is what the others must equal. tests/exact has more of it,
# by the bits, and for models of every kind.
TREATMENTS: dict[str, dict[str, Any]] = {
    "without overlap": {"engine__overlap": False},
    "chunks of 5": {"scheduler__max_prefill_tokens": 5},
    "preempted": {**SCARCE, "scheduler__policy": "vllm"},
    "preempted in chunks": {**SCARCE, "scheduler__max_prefill_tokens": 7},
}
PREEMPTING = ("preempted", "preempted in chunks")
# Whether it preempts where memory is scarce. With sarathi and vllm above, and Apt-Serve's below,
# all that a batch may look like; the others order the same, and the slow lane has all of them
# (test_every_policy.py).
POLICIES = {
    "sarathi_nocp": True,
    "accelgen": True,
    "goodput": True,
    "bros": True,
    "fastgen": True,
    "fairbatching": True,
    "orca": False,
    "qoserve": True,
    "slidingserve": True,
}


@pytest.mark.promise(1)
def test_all_at_once(roomy: Engine, alone: Texts) -> None:
    texts = generate(roomy, prompts(), **SAMPLING)
    assert texts == alone("opt")
    assert len({tuple(t) for t in texts}) > 16, "the model says too little to tell texts apart"


@pytest.mark.promise(1)
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_treatment(shapes: dict[str, Path], alone: Texts, treatment: str) -> None:
    with engine(shapes["opt"], **TREATMENTS[treatment]) as running:
        assert generate(running, prompts(), **SAMPLING) == alone("opt")
        assert (running.stats().preemptions > 0) == (treatment in PREEMPTING)


@pytest.mark.promise(2)
def test_policies(shapes: dict[str, Path], alone: Texts, one_executor: None) -> None:
    expected = alone("opt")[:16]
    for policy, preempts in POLICIES.items():
        with engine(shapes["opt"], scheduler__policy=policy, **SCARCE) as running:
            assert running.info().policy == policy
            assert generate(running, prompts(16), **SAMPLING) == expected, policy
            assert (running.stats().preemptions > 0) == preempts, policy


@pytest.mark.promise(2)
def test_both_kinds_of_cache_under_load(shapes: dict[str, Path], alone: Texts) -> None:
    counted: list[dict[tuple[str, str], int]] = []
    fields = {"scheduler__policy": "aptserve", "cache__rho": "1e-7", **SCARCE}
    with engine(shapes["opt"], **fields) as running:
        streams = [
            send(running, prompt, lambda _: counted.append(running.stats().blocks), **SAMPLING)[1]
            for prompt in prompts()
        ]
        assert [stream.wait().tokens() for stream in streams] == alone("opt")
        assert running.stats().preemptions > 0
    assert any(blocks["hidden", "realtime"] and blocks["kv", "realtime"] for blocks in counted)


def test_every_kind_of_batch_is_served() -> None:
    """A policy that plans as none of those here does needs a case of its own."""

    def kind(name: str) -> tuple[object, ...]:
        policy = make_policy(name)
        if not isinstance(policy, UnifiedPolicy):
            return (type(policy),)
        return policy.mixed_batches, policy.chunked, policy.reserve

    served = {kind(name) for name in (*POLICIES, "sarathi", "vllm", "aptserve")}
    assert {kind(e.name) for e in policies().values() if e.deployable} == served


class GivingUp(Policy):
    """Sarathi, but it gives up whoever has a target and two tokens, again and again."""

    def __init__(self) -> None:
        self._policy = make_policy("sarathi")

    def plan(self, view: View, now: float) -> BatchPlan:
        table, plan = view.table, self._policy.plan(view, now)
        rows = table.in_state(State.RUNNING)
        rows = rows[(table.received[rows] > 1) & table.has_targets(rows)]
        return dataclasses.replace(plan, missed=rows, relegated=rows[::2])


class Observed(Observer):
    """given_up: requests that were, in that order. ended: of each that has, whether it was."""

    def __init__(self) -> None:
        self.given_up: list[Request] = []
        self.ended: list[bool] = []

    def on_given_up(self, request: Request) -> None:
        self.given_up.append(request)

    def on_finish(self, stats: RequestStats) -> None:
        self.ended.append(stats.given_up)


def test_who_is_given_up_is_told_once_and_gets_the_same_text(
    shapes: dict[str, Path], alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: GivingUp())
    asked, slo = prompts(8), SLO(jct=1e3)
    with engine(shapes["opt"]) as running:
        running.add_observer(observer := Observed())
        streams = [
            send(running, prompt, slo=slo if i % 2 else None, **SAMPLING)[1]
            for i, prompt in enumerate(asked)
        ]
        assert [stream.wait().tokens() for stream in streams] == alone("opt")[:8]
    for i, stream in enumerate(streams):
        told = [output for output in stream.outputs if output.expected_missed]
        assert len(told) == i % 2, "once, and nobody without targets"
        assert all(output.finish_reason is None for output in told)
    assert len(observer.given_up) == 4 and sorted(observer.ended) == [False] * 4 + [True] * 4
    verdict = streams[1].last().verdict
    assert verdict is not None and verdict.met, "what came of it is another thing"


class OneByOne(Policy):
    """Computes a token a step, and preempts each request once, after five tokens of output."""

    def plan(self, view: View, now: float) -> BatchPlan:
        table = view.table
        running, waiting = table.in_state(State.RUNNING), table.in_state(State.WAITING)
        again = running[(table.generated[running] == 5) & (table.preemptions[running] == 0)]
        if len(again):
            return BatchPlan(operations=(Preempt.whole(again),))
        rows = (running if len(running) else waiting)[:1]
        one = np.ones(1, np.int64)
        return BatchPlan(rows, one, table.computed[rows] + one, 0 * one)


def test_refilled_token_by_token(
    shapes: dict[str, Path], alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a refill's single tokens only the last is the one that the device sampled last."""
    expected = alone("opt")[:3]
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: OneByOne())
    told = StepRecorder()
    with engine(shapes["opt"]) as running:
        running.add_observer(told)
        streams = [send(running, prompt, **SAMPLING)[1] for prompt in prompts(3)]
        assert [stream.wait().tokens() for stream in streams] == expected
        assert running.stats().preemptions == 3
    for timings in (stream.last().timings for stream in streams):
        assert timings is not None
        (when,) = timings.preempted
        assert timings.ttft < when < timings.total
    assert sum(step.preemptions for step in told.steps) == 3, "there was no batch when it preempted"
