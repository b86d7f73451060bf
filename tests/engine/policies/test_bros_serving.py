"""Real-time and best-effort requests under `bros`: what each writes is what it writes alone."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policies.bros.bros import Bros
from jaxserve.sched.policy import View
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from tests.engine.conftest import Texts
from tests.engine.harness import (
    SAMPLING,
    SCARCE,
    TIMEOUT,
    Stream,
    engine,
    prompts,
    wait_until_idle,
)


@pytest.mark.parametrize(
    ("fields", "done"),
    [
        ({"cache__host_gib": 1e-3}, {"Join", "Checkpoint", "Restore"}),
        pytest.param(
            {"cache__host_gib": 1e-3, "engine__overlap": False},
            {"Join", "Checkpoint", "Restore"},
            marks=pytest.mark.slow,
        ),
        ({"cache__host_gib": 1e-5}, {"Join", "Checkpoint", "Restore", "cut"}),
        pytest.param({"cache__host_gib": 0.0}, {"Join", "cut"}, marks=pytest.mark.slow),
        ({"cache__host_gib": 1e-3, "scheduler__max_rows": 6}, {"Checkpoint", "Preempt", "Restore"}),
        ({"scheduler__params": {"sharing": False}}, {"Preempt"}),
        ({"scheduler__params": {"floor": 200.0}, "cache__host_gib": 1e-3}, {"Join"}),
    ],
    ids=[
        "shared",
        "no overlap",
        "little host memory",
        "no host memory",
        "few places",
        "not shared",
        "floor",
    ],
)
def test_both_tiers_write_what_they_write_alone(
    shapes: dict[str, Path],
    alone: Texts,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    done: set[str],
) -> None:
    did, plan = Counter[str](), Bros.plan

    def watched(self: Bros, view: View, now: float) -> BatchPlan:
        made = plan(self, view, now)
        for op in made.operations:
            cut = isinstance(op, Preempt) and op.keep.any()
            did["cut" if cut else type(op).__name__] += 1
        return made

    monkeypatch.setattr(Bros, "plan", watched)
    fields = {**SCARCE, "scheduler__max_rows": 32, "scheduler__policy": "bros", **fields}
    asked, params = prompts(), SamplingParams(**SAMPLING)
    with engine(shapes["opt"], **fields) as running:
        streams, writing = dict[int, Stream](), threading.Event()
        for number in [*range(0, 32, 2), *range(1, 32, 2)]:
            tier, stream = Tier(1 - number % 2), Stream(on_output=lambda _: writing.set())
            slo = SLO(ttft=30.0, tbt=30.0) if tier is Tier.REALTIME else SLO()
            running.submit(Request(str(number), tuple(asked[number]), params, slo, tier), stream)
            streams[number] = stream
            if number == 30:  # all of them best-effort so far
                assert writing.wait(TIMEOUT)
        texts = [streams[number].wait().tokens() for number in range(32)]
        wait_until_idle(running)
        scheduler, stats = running._scheduler, running.stats()
        assert scheduler.host.num_used == 0
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert (stats.slots_checkpointed > 0) == ("Checkpoint" in did)
    assert (stats.slots_restored > 0) == ("Restore" in did)
    little = fields.get("cache__host_gib", 0.0) < 1e-3
    assert (stats.host_full > 0) == (little and scheduler.policy.moves_cache)
    assert texts == alone("opt")
    assert done <= did.keys(), did
