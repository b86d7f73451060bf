"""Apt-Serve's policies, for real: both kinds of cache, preempted, and the text of KV caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Texts
from tests.engine.harness import SAMPLING, SCARCE, engine, prompts, send


@pytest.mark.parametrize("policy", ["aptserve", "aptserve_s", "aptserve_fcfs"])
def test_both_kinds_are_in_use_under_load(
    shapes: dict[str, Path], alone: Texts, policy: str
) -> None:
    counted: list[dict[tuple[str, str], int]] = []
    with engine(shapes["opt"], scheduler__policy=policy, cache__rho="1e-7", **SCARCE) as running:
        streams = [
            send(running, prompt, lambda _: counted.append(running.stats().blocks), **SAMPLING)[1]
            for prompt in prompts()
        ]
        assert [stream.wait().tokens() for stream in streams] == alone("opt")
        assert running.stats().preemptions > 0
    assert any(blocks["hidden", "realtime"] and blocks["kv", "realtime"] for blocks in counted)
