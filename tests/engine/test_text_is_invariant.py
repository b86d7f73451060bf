"""Batching, chunking, preemption, policy and overlap never change greedy text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine import build
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import policies
from jaxserve.sched.table import State
from tests.engine.harness import engine, generate

FAMILIES = ("opt", "llama")
# What is done to the requests; "alone" is what the others must equal.
TREATMENTS: dict[str, dict[str, Any]] = {
    "sarathi": {"scheduler__policy": "sarathi"},
    "vllm": {"scheduler__policy": "vllm"},
    "without overlap": {"engine__overlap": False},
    "chunks of 5": {"scheduler__max_prefill_tokens": 5},
    "chunks of 1": {"scheduler__max_prefill_tokens": 1},
    "preempted": {"cache__num_blocks": 36, "scheduler__policy": "vllm"},
    "preempted in chunks": {"cache__num_blocks": 36, "scheduler__max_prefill_tokens": 7},
    "blocks of 16": {"cache__block_size": 16},
}
PREEMPTING = ("preempted", "preempted in chunks")
DEPLOYABLE = [entry.name for entry in policies().values() if entry.deployable]


def prompts(count: int = 32) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 96) for _ in range(rng.randint(1, 30))] for _ in range(count)]


SAMPLING = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone(shapes: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Each prompt served with nothing beside it."""
    texts = {}
    for family in FAMILIES:
        with engine(shapes[family], scheduler__max_rows=32) as running:
            texts[family] = [generate(running, [p], **SAMPLING)[0] for p in prompts()]
    return texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [7, 32])
def test_batch_size(
    shapes: dict[str, Path], alone: dict[str, list[list[int]]], family: str, count: int
) -> None:
    with engine(shapes[family], scheduler__max_rows=32) as running:
        assert generate(running, prompts()[:count], **SAMPLING) == alone[family][:count]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_treatment(
    shapes: dict[str, Path], alone: dict[str, list[list[int]]], family: str, treatment: str
) -> None:
    with engine(shapes[family], **TREATMENTS[treatment]) as running:
        texts = generate(running, prompts(), **SAMPLING)
        preemptions = running.stats().preemptions
    assert texts == alone[family]
    assert len({tuple(t) for t in texts}) > 16, "the model says too little to tell texts apart"
    assert (preemptions > 0) == (treatment in PREEMPTING)


@pytest.mark.parametrize("policy", DEPLOYABLE)
def test_policy(shapes: dict[str, Path], alone: dict[str, list[list[int]]], policy: str) -> None:
    """Little memory, so that all of those that preempt do."""
    with engine(
        shapes["opt"], scheduler__policy=policy, cache__num_blocks=36, scheduler__max_rows=16
    ) as running:
        assert running.info().policy == policy
        assert generate(running, prompts(), **SAMPLING) == alone["opt"]


@pytest.mark.parametrize("treatment", PREEMPTING)
def test_seeded_text_survives_preemption(
    shapes: dict[str, Path], roomy: Any, treatment: str
) -> None:
    sampling = {**SAMPLING, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.5}
    expected = generate(roomy, prompts(), **sampling)
    with engine(shapes["opt"], **TREATMENTS[treatment]) as running:
        assert generate(running, prompts(), **sampling) == expected
        assert running.stats().preemptions > 0


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
    shapes: dict[str, Path], alone: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a refill's single tokens only the last is the one that the device sampled last."""
    monkeypatch.setattr(build, "make_policy", lambda name: OneByOne())
    with engine(shapes["opt"]) as running:
        assert generate(running, prompts(3), **SAMPLING) == alone["opt"][:3]
        assert running.stats().preemptions == 3
