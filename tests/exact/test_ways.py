"""A request has the bits that it has alone by whatever way it is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.pallas_kernels.cpu import numba_ffi
from jaxserve.sched.request import Grammar
from tests.engine.drafts.conftest import Known
from tests.engine.harness import BOX, engine, wait_until_idle
from tests.engine.lora import peft
from tests.exact.conftest import Quietly
from tests.exact.questions import Question, alone, differing, together

WIDE, NARROW = "whole, bfloat16", "opt"
FEW_BLOCKS = {"cache__num_blocks": 44}
WAYS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "prompts in chunks of 7": {"scheduler__max_prefill_tokens": 7},
    "prompts in chunks of 5": {"scheduler__max_prefill_tokens": 5},
    "prompts token by token": {"scheduler__max_prefill_tokens": 1},
    "preempted": {"scheduler__policy": "vllm", **FEW_BLOCKS},
    "preempted in chunks": {"scheduler__max_prefill_tokens": 6, **FEW_BLOCKS},
    "swapped out": {
        "scheduler__policy": "fastserve",
        "scheduler__params": {"quantum": 1.0},
        "cache__host_gib": 0.001,
        **FEW_BLOCKS,
    },
    "other buckets": {"engine__row_buckets": (2, 5, 8), "engine__token_buckets": (9, 40, 64)},
    "blocks of 16": {"cache__block_size": 16},
    "without overlap": {"engine__overlap": False},
    "with room for adapters": {"lora__max_loras": 2, "lora__max_rank": 8},
    **{
        f"by {policy}": {"scheduler__policy": policy, **FEW_BLOCKS}
        for policy in ("accelgen", "bros", "fairbatching", "infermax", "orca", "slidingserve")
    },
}
QUICK = {
    WIDE: (
        "preempted in chunks",
        "swapped out",
        "by bros",
    ),
    NARROW: ("preempted", "other buckets", "blocks of 16"),
}


def ways() -> Iterator[Any]:
    """All of them of one kind, the others of which are slow."""
    for kind, quick in QUICK.items():
        for way in WAYS if kind == WIDE else quick:
            yield pytest.param(kind, way, marks=() if way in quick else pytest.mark.slow)


@pytest.mark.promise(45)
@pytest.mark.parametrize(("kind", "way"), [*ways()])
def test_way(quietly: Quietly, kind: str, way: str) -> None:
    quiet = quietly(kind)
    with engine(quiet.path, **{**quiet.fields, **WAYS[way]}) as running:
        assert not differing(together(running, quiet.asked), quiet.answers)
        if FEW_BLOCKS.items() <= WAYS[way].items() and way != "by orca":  # which takes nobody's
            assert running.stats().preemptions or running.stats().slots_restored


@pytest.mark.promise(45)
def test_beginnings_that_are_found(quietly: Quietly) -> None:
    """Of another's prompt, of several lengths; then all of it, with its text."""
    quiet = quietly(NARROW)
    with engine(quiet.path, **quiet.fields, cache__prefix_caching=True) as running:
        others = [
            Question((*question.prompt[:most], 3 + number % 50), {"max_tokens": 2})
            for number, question in enumerate(quiet.asked)
            for most in (5, 16, 27)
        ]
        together(running, others)
        for _ in range(2):
            assert not differing(together(running, quiet.asked), quiet.answers)
        assert sum(running.stats().prefix_cache_hits.values()) > 200


@pytest.mark.promise(45)
@pytest.mark.usefixtures("eager")
def test_drafted(quietly: Quietly, proposing: Callable[[Known], None]) -> None:
    """With drafts of any length, half of which have a wrong token."""
    quiet = quietly(NARROW)
    texts = {q.prompt: a for q, a in zip(quiet.asked, quiet.answers, strict=True) if not q.pooling}
    proposing({prompt: answer[0][0] for prompt, answer in texts.items()})
    fields = {"scheduler__policy": "sarathi+spec", "scheduler__max_prefill_tokens": 24}
    with engine(quiet.path, **{**quiet.fields, **fields}) as running:
        assert not differing(together(running, quiet.asked), quiet.answers)


@pytest.mark.promise(45)
def test_beside_adapters(quietly: Quietly, tmp_path: Path) -> None:
    """Rows of two adapters, and of none, in one batch."""
    quiet = quietly(WIDE)
    paths = {
        "one": str(peft.write(tmp_path / "one", quiet.path)),
        "two": str(peft.write(tmp_path / "two", quiet.path, rank=7, seed=2)),
    }
    asked = [
        dataclasses.replace(question, adapter=("one", "two", "")[number % 3])
        for number, question in enumerate(quiet.asked)
    ]
    fields = {"lora__max_loras": 2, "lora__max_rank": 8, "lora__adapters": paths}
    with engine(quiet.path, **quiet.fields, **fields) as running:
        expected = alone(running, asked)
        assert not differing(together(running, asked), expected)
    differ = differing(expected, quiet.answers)
    assert [number for number, one in enumerate(asked) if one.adapter] == differ


@contextmanager
def no_helpers() -> Iterator[None]:
    """Calls of kernels are shared with no other thread."""
    room = numba_ffi._helpers[0]
    count = room[-(room.ctypes.data // 8) % numba_ffi._HELPER :][:1]
    before = int(count[0])
    count[0] = 0
    try:
        yield
    finally:
        count[0] = before


TEXTS = (
    ("Once upon a time there was a dog. The dog", {}),
    ("Lily and Tom", {"temperature": 0.8, "seed": 3, "top_p": 0.9}),
    ("A name:", {"grammar": Grammar.regex("[A-Z][a-z]{3,9} (and|or) [A-Z][a-z]+")}),
    ("{", {"grammar": Grammar.json_object(), "temperature": 1.0, "seed": 4}),
    ("One day, " * 30, {"prompt_logprobs": 1}),
    ("The end. " * 17, {"n": 2, "temperature": 1.0, "seed": 8}),
)


@pytest.mark.promise(45)
def test_real_text_grammars_and_threads() -> None:
    """The model in the box, with one thread and with all that there are."""
    fields: dict[str, Any] = {
        "model__load_format": "auto",
        "scheduler__max_rows": 8,
        "engine__row_buckets": (1, 8),
        "engine__token_buckets": (32, 128),
        "scheduler__max_batch_tokens": 128,
        "scheduler__max_prefill_tokens": 128,
    }
    with engine(BOX, **fields) as running:
        asked = [
            Question(tuple(running.encode(text)), {"logprobs": 4, "max_tokens": 20, **sampling})
            for text, sampling in TEXTS
        ]
        with no_helpers():
            expected = alone(running, asked)
            wait_until_idle(running)
        assert not differing(alone(running, asked), expected)
        assert not differing(together(running, asked), expected)
        with no_helpers():
            assert not differing(together(running, asked), expected)
            wait_until_idle(running)
