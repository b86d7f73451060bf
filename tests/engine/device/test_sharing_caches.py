"""Requests that share blocks, write over each other's tokens, and bring them back from the host
never change what is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.engine.startup.choices import policy_choice
from tests.engine.conftest import Texts
from tests.engine.harness import SAMPLING, SCARCE, engine, generate, prompts, wait_until_idle
from tests.sched.cache.invariants import check_host, check_pool
from tests.sharing_caches import SharingCaches

COUNT = 10


@pytest.mark.promise(3)
@pytest.mark.parametrize(
    ("family", "host_gib", "hidden"),
    [("opt", 2e-5, {"cache__rho": "0"}), ("llama", 5e-5, {})],
    ids=["little host memory", "rotary, KV alone"],
)
def test_text_survives_any_sequence_of_sharing(
    shapes: dict[str, Path],
    alone: Texts,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    host_gib: float,
    hidden: dict[str, Any],
) -> None:
    policy, did = SharingCaches(), Counter[str]()
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: policy)
    expected, asked = alone(family)[:COUNT], prompts()[:COUNT]
    fields: dict[str, Any] = {**SCARCE, **hidden, "cache__host_gib": host_gib}
    with engine(shapes[family], **fields) as running:

        @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
        @given(lots=st.lists(st.integers(0, 10**6), min_size=50, max_size=50))
        def check(lots: list[int]) -> None:
            policy.lots = lots
            assert generate(running, asked, **SAMPLING) == expected
            did.update(policy.did)
            wait_until_idle(running)
            host, pool = running._scheduler.host, running._scheduler.pool
            assert host.num_used == 0 and pool.num_free == pool.num_blocks
            check_host(host)
            check_pool(pool)

        check()
    for what in ("join", "checkpoint", "cut", "restore", "elsewhere", "drop"):
        assert did[what] > 0, (what, did)
