"""Whatever the policy, a mixture of experts and adapters say what they say by any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.registry import policies
from tests.engine.harness import SAMPLING, SCARCE, engine, generate, prompts, send
from tests.engine.lora import peft

pytestmark = pytest.mark.slow
NAMES = ("one", "two", "")


def by_policy(path: Path, **fields: Any) -> Iterator[tuple[str, Any]]:
    """An engine with each deployable policy, where memory is scarce."""
    for name, entry in policies().items():
        if entry.deployable:
            with engine(path, scheduler__policy=name, **SCARCE, **fields) as running:
                yield name, running


@pytest.mark.promise(2)
def test_experts(shapes: dict[str, Path], one_executor: None) -> None:
    with engine(shapes["moe"]) as running:
        want = generate(running, prompts(12), **SAMPLING)
    assert len({tuple(text) for text in want}) > 6
    preempting = 0
    for name, running in by_policy(shapes["moe"]):
        assert generate(running, prompts(12), **SAMPLING) == want, name
        preempting += running.stats().preemptions > 0
    assert preempting > 8


@pytest.mark.promise(2)
def test_adapters(shapes: dict[str, Path], tmp_path: Path, one_executor: None) -> None:
    base, count = shapes["opt"], 12
    folders = {name: peft.write(tmp_path / name, base, seed=i) for i, name in enumerate(NAMES[:2])}
    asked = prompts(count), SAMPLING["max_tokens"]
    texts = {name: peft.merged_texts(base, folder, *asked) for name, folder in folders.items()}
    with engine(base) as running:
        texts[""] = generate(running, prompts(count), **SAMPLING)
    given = {"lora__adapters": {name: str(folder) for name, folder in folders.items()}}
    for name, running in by_policy(base, lora__max_rank=8, **given):
        streams = [
            send(running, prompt, adapter=NAMES[i % 3], **SAMPLING)[1]
            for i, prompt in enumerate(prompts(count))
        ]
        found = [stream.wait().tokens() for stream in streams]
        assert found == [texts[NAMES[i % 3]][i] for i in range(count)], name
