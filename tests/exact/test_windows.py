"""Layers that give blocks behind their window back say what they say with all blocks kept: the same
bits, whatever else is served and whatever becomes of their caches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.choices import group_choice
from jaxserve.sched.cache.groups.windowed_pool import WindowedPool
from tests.engine.drafts.conftest import Known
from tests.engine.harness import engine, wait_until_idle
from tests.exact.conftest import FIELDS
from tests.exact.kinds import write
from tests.exact.questions import Question, alone, differing, questions, together

# Windows of 9 or fewer, prompts of up to 40. With so few blocks whoever preempts, does.
MODELS = {"gemma3": 170, "gemma2": 90, "gpt_oss": 60}
SCARCE = "scarce"
WAYS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "prompts in chunks of 7": {"scheduler__max_prefill_tokens": 7},
    "prompts token by token": {"scheduler__max_prefill_tokens": 1},
    "preempted": {"scheduler__policy": "vllm", SCARCE: True},
    "preempted in chunks": {"scheduler__max_prefill_tokens": 6, SCARCE: True},
    "swapped out": {
        "scheduler__policy": "fastserve",
        "scheduler__params": {"quantum": 1.0},
        "cache__host_gib": 0.001,
        SCARCE: True,
    },
    "small blocks": {"cache__block_size": 2, "cache__num_blocks": 2048},
    "without overlap": {"engine__overlap": False},
}
QUICK = {"gemma3": ("preempted in chunks", "swapped out")}


def windowed(running: Engine) -> WindowedPool:
    pool = running._scheduler.pool
    assert isinstance(pool, WindowedPool)
    return pool


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """A model's files, and what it answers alone with all blocks kept."""
    known: dict[str, tuple[Path, list[Any]]] = {}

    def of(model: str) -> tuple[Path, list[Any]]:
        if model not in known:
            path = write(tmp_path_factory.mktemp(model), model)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group_choice, "layer_groups", lambda model: None)
                with engine(path, **FIELDS) as running:
                    assert running._scheduler.groups is None
                    known[model] = path, alone(running, questions())
        return known[model]

    return of


@pytest.mark.promise(45)
@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(m, w, marks=() if w in QUICK.get(m, ()) else pytest.mark.slow)
        for m in MODELS
        for w in WAYS
    ],
)
def test_way(kept: Callable[[str], tuple[Path, list[Any]]], model: str, way: str) -> None:
    path, expected = kept(model)
    fields = {**FIELDS, **WAYS[way]}
    scarce = fields.pop(SCARCE, False)
    if scarce:
        fields["cache__num_blocks"] = MODELS[model]
    with engine(path, **fields) as running:
        pool = windowed(running)
        assert not differing(together(running, questions()), expected)
        if scarce:
            assert running.stats().preemptions or running.stats().slots_restored
        wait_until_idle(running)
        assert pool._in_windows == 0


@pytest.mark.promise(45)
def test_beginnings_that_are_found(kept: Callable[[str], tuple[Path, list[Any]]]) -> None:
    """As far as their last window is there, also behind others' ends."""
    path, expected = kept("gemma3")
    asked = questions()
    with engine(path, **FIELDS, cache__prefix_caching=True) as running:
        others = [
            Question((*question.prompt[:most], 3 + number % 50), {"max_tokens": 2})
            for number, question in enumerate(asked)
            for most in (5, 16, 27)
        ]
        together(running, others)
        for _ in range(2):
            assert not differing(together(running, asked), expected)
        assert sum(running.stats().prefix_cache_hits.values()) > 100
        wait_until_idle(running)
        cache = running._scheduler.cache
        assert cache is not None and any(page.beside is not None for page in cache.pages())


@pytest.mark.promise(45)
def test_prefixes_beside_little_room(kept: Callable[[str], tuple[Path, list[Any]]]) -> None:
    """Pages come and go while rows read them."""
    path, expected = kept("gemma3")
    asked = questions()
    order = random.Random(2).sample(range(len(asked)), len(asked))
    few = {"cache__num_blocks": MODELS["gemma3"]}
    fields = {**FIELDS, **few, "cache__prefix_caching": True}
    with engine(path, **fields) as running:
        for _ in range(3):
            found = together(running, [asked[i] for i in order])
            assert not differing(found, [expected[i] for i in order])
        assert running.stats().prefix_cache_evicted > 0


@pytest.mark.promise(45)
@pytest.mark.usefixtures("eager")
def test_drafted(
    kept: Callable[[str], tuple[Path, list[Any]]], proposing: Callable[[Known], None]
) -> None:
    """With drafts of any length, half of which have a wrong token, across the ends of windows."""
    path, expected = kept("gpt_oss")
    asked = questions()
    texts = {q.prompt: a for q, a in zip(asked, expected, strict=True) if not q.pooling}
    proposing({prompt: answer[0][0] for prompt, answer in texts.items()})
    fields = {"scheduler__policy": "sarathi+spec", "scheduler__max_prefill_tokens": 24}
    with engine(path, **{**FIELDS, **fields}) as running:
        windowed(running)
        assert not differing(together(running, asked), expected)
