"""Drafts never change text, whatever is drafted, by whomever, and however much of it is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.drafts.draft import Draft
from jaxserve.engine.drafts.drafting import Drafting
from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import StepRecorder
from jaxserve.sched.speculation import choice
from jaxserve.sched.speculation.choice import MOST
from tests.engine.conftest import Texts
from tests.engine.harness import (
    SAMPLING,
    engine,
    generate,
    prompts,
    wait_until_idle,
)

SPEC = {"scheduler__policy": "sarathi+spec", "engine__token_buckets": (16, 64)}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drafts are taken as far as they fit, whether they pay or not; how many varies."""
    rng = np.random.default_rng(5)

    def choose(batch: Any, rows: np.ndarray, most: np.ndarray, view: Any, now: float) -> np.ndarray:
        room = min(view.padding.rows[-1], view.limits.max_batch_tokens) - batch.num_rows
        room = min(room, view.limits.max_batch_tokens - int(batch.features.num_tokens))
        wanted = np.minimum(rng.integers(0, MOST + 1, len(rows)), most)
        return np.diff(np.minimum(np.cumsum(wanted), max(room, 0)), prepend=0)

    monkeypatch.setattr(choice, "_choose", choose)
    yield


Proposing = Callable[[dict[tuple[int, ...], list[int]]], None]


@pytest.fixture
def proposing(monkeypatch: pytest.MonkeyPatch) -> Proposing:
    """Has every continuation propose what its prompt is known to be continued with, now and then
    with a wrong token in it."""
    rng = random.Random(3)

    def install(texts: dict[tuple[int, ...], list[int]]) -> None:
        def init(self: Any, prompt: Sequence[int], *rest: Any) -> None:
            self.text, self.known = texts[tuple(prompt)], 0

        def append(self: Any, token: int) -> None:
            self.known += 1

        def propose(self: Any, most: int, estimate: Any) -> Draft | None:
            tokens = list(self.text[self.known : self.known + most])
            if tokens and rng.random() < 0.5:
                tokens[rng.randrange(len(tokens))] = rng.randrange(3, 96)
            return Draft(tuple(tokens), "known") if tokens else None

        for name, method in {"__init__": init, "append": append, "propose": propose}.items():
            monkeypatch.setattr(Drafting, name, method)
        monkeypatch.setattr(Drafting, "end", lambda self, tokens: None)

    return install


def served(on: Engine, asked: Sequence[Sequence[int]], **sampling: Any) -> tuple[list[Any], int]:
    """The texts, and how many drafted tokens were right."""
    recorder = StepRecorder()
    on.add_observer(recorder)
    texts = generate(on, asked, **sampling)
    wait_until_idle(on)
    steps = recorder.steps
    assert sum(step.num_draft_tokens for step in steps) >= sum(step.num_accepted for step in steps)
    return texts, sum(step.num_accepted for step in steps)


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "counted": {
        "temperature": 0.7,
        "seed": 5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.3,
        "min_tokens": 9,
        "top_k": 20,
        "top_p": 0.9,
        "logit_bias": ((7, 2.0), (11, -5.0)),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_text_is_what_it_is_without(
    shapes: dict[str, Path], roomy: Engine, eager: None, proposing: Proposing, variant: str
) -> None:
    sampling = {**SAMPLING, **VARIANTS[variant], "ignore_eos": False}
    asked = prompts(16)
    expected = generate(roomy, asked, **sampling)
    wait_until_idle(roomy)
    proposing({tuple(a): text for a, text in zip(asked, expected, strict=True)})
    with engine(shapes["opt"], **SPEC) as running:
        texts, accepted = served(running, asked, **sampling)
    assert texts == expected
    assert accepted > 60


def test_own_repetitions_are_drafted(shapes: dict[str, Path], alone: Texts, eager: None) -> None:
    with engine(shapes["llama"], **SPEC) as running:
        texts, accepted = served(running, prompts(), **SAMPLING)
    assert texts == alone("llama")
    assert accepted > 0
