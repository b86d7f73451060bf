"""Layers that keep a state say the same bits, whatever else is served and whatever becomes of their
caches: of snapshots of states, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.sched.cache.groups.state_pool import StatePool
from tests.engine.drafts.conftest import Known
from tests.engine.harness import engine, wait_until_idle
from tests.exact.conftest import FIELDS
from tests.exact.kinds import BFLOAT16, write
from tests.exact.questions import Question, alone, differing, questions, together
from tests.exact.test_windows import SCARCE
from tests.exact.test_windows import WAYS as OF_WINDOWS

WAYS: dict[str, dict[str, Any]] = {
    **OF_WINDOWS,
    "preempted in chunks": OF_WINDOWS["preempted in chunks"] | {"scheduler__policy": "sarathi"},
}

# Models, fields of their engines, and so few blocks that whoever preempts, does.
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "next": ("qwen3_next", {}, 80),
    "5": ("qwen3_5", BFLOAT16, 150),
    "next, int8": ("qwen3_next", {"cache__dtype": "int8"}, 190),
}
QUICK = {"next": ("preempted in chunks", "swapped out")}
Kept = Callable[[str], tuple[Path, dict[str, Any], list[Any]]]


def stateful(running: Engine) -> StatePool:
    pool = running._scheduler.pool
    assert isinstance(pool, StatePool)
    return pool


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """A model's files, the fields of its engines, and what it answers alone."""
    known: dict[str, tuple[Path, dict[str, Any], list[Any]]] = {}

    def of(kind: str) -> tuple[Path, dict[str, Any], list[Any]]:
        if kind not in known:
            model, fields, _ = KINDS[kind]
            path, fields = write(tmp_path_factory.mktemp(model), model), {**FIELDS, **fields}
            with engine(path, **fields) as running:
                known[kind] = path, fields, alone(running, questions())
        return known[kind]

    return of


@pytest.mark.promise(45)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(k, w, marks=() if w in QUICK.get(k, ()) else pytest.mark.slow)
        for k in KINDS
        for w in WAYS
    ],
)
def test_way(kept: Kept, kind: str, way: str) -> None:
    path, fields, expected = kept(kind)
    fields = {**fields, **WAYS[way]}
    scarce = fields.pop(SCARCE, False)
    if scarce:
        fields["cache__num_blocks"] = KINDS[kind][2]
    with engine(path, **fields) as running:
        assert not differing(together(running, questions()), expected)
        if scarce:
            assert running.stats().preemptions or running.stats().slots_restored
        wait_until_idle(running)
        assert not stateful(running).num_used


@pytest.mark.promise(45)
@pytest.mark.usefixtures("eager")
def test_drafted(
    kept: Kept, proposing: Callable[[Known], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts of any length, half of which have a wrong token, beside snapshots."""
    path, fields, expected = kept("next")
    asked = questions()
    proposing({q.prompt: a[0][0] for q, a in zip(asked, expected, strict=True) if not q.pooling})
    fields = {**fields, "cache__prefix_caching": True, "cache__block_size": 4}
    went_back: list[int] = []
    settle = StatePool.settle

    def watched(self: StatePool, rows: np.ndarray, accepted: np.ndarray) -> Any:
        found = settle(self, rows, accepted)
        went_back.append(len(found[0]))
        return found

    monkeypatch.setattr(StatePool, "settle", watched)
    with engine(path, **fields, scheduler__policy="sarathi+spec") as running:
        for _ in range(2):
            assert not differing(together(running, asked), expected)
        assert 0 in went_back and sum(went_back) > 9
        wait_until_idle(running)
        assert not stateful(running).num_used


@pytest.mark.promise(45)
@pytest.mark.parametrize("overlap", [True, False])
def test_beginnings_that_are_found(kept: Kept, overlap: bool) -> None:
    """As far as the last snapshot, also behind others' ends, and of answers."""
    path, fields, expected = kept("next")
    asked = questions()
    fields = {**fields, "cache__prefix_caching": True, "cache__block_size": 8}
    with engine(path, **fields, engine__overlap=overlap) as running:
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
@pytest.mark.parametrize("policy", ["sarathi", "vllm"])
def test_prefixes_beside_little_room(kept: Kept, policy: str) -> None:
    """Pages and snapshots come and go while rows read them."""
    path, fields, expected = kept("next")
    asked = questions()
    order = random.Random(2).sample(range(len(asked)), len(asked))
    few = {"cache__num_blocks": KINDS["next"][2], "cache__prefix_caching": True}
    with engine(path, **fields, **few, scheduler__policy=policy) as running:
        for _ in range(3):
            found = together(running, [asked[i] for i in order])
            assert not differing(found, [expected[i] for i in order])
        assert running.stats().prefix_cache_evicted > 0
