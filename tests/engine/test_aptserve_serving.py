"""Apt-Serve's policies, for real: both kinds of cache under load, and the text of KV caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import engine, generate, send
from tests.engine.test_text_is_invariant import SAMPLING, prompts


@pytest.fixture(scope="module")
def expected(shapes: dict[str, Path]) -> list[list[int]]:
    with engine(shapes["opt"], scheduler__max_rows=32) as running:
        return generate(running, prompts(), **SAMPLING)


@pytest.mark.parametrize("policy", ["aptserve", "aptserve_s"])
def test_both_kinds_are_in_use_under_load(
    shapes: dict[str, Path], expected: list[list[int]], policy: str
) -> None:
    counted: list[dict[tuple[str, str], int]] = []
    with engine(
        shapes["opt"],
        scheduler__policy=policy,
        scheduler__max_rows=16,
        cache__num_blocks=120,
        cache__rho="1e-7",
    ) as running:
        streams = [
            send(running, prompt, lambda _: counted.append(running.stats().blocks), **SAMPLING)[1]
            for prompt in prompts()
        ]
        assert [stream.wait().tokens() for stream in streams] == expected
    assert any(blocks["hidden", "realtime"] and blocks["kv", "realtime"] for blocks in counted)
