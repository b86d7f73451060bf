"""Best-effort requests whose blocks real-time ones fill from the other end, write what they write
alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import Observer, StepStats
from jaxserve.sched.request import Tier
from tests.engine.conftest import Texts
from tests.engine.harness import SAMPLING, SCARCE, Stream, engine, prompts, send

SMALL = {"cache__host_gib": 2e-5}  # some dozen slots
LARGE = {"cache__host_gib": 0.001}


class RealTime(Observer):
    """Sends a real-time request after every third step, until there are no more. streams: theirs.
    shared: the most blocks that two requests filled."""

    def __init__(self, on: Engine, waiting: list[list[int]]) -> None:
        self.streams: list[Stream] = []
        self.shared = 0
        self._engine, self._waiting, self._steps = on, waiting, 0
        on.add_observer(self)

    def on_step(self, stats: StepStats) -> None:
        self._steps += 1
        self.shared = max(self.shared, self._engine.stats().blocks["kv", "shared"])
        if self._waiting and self._steps % 3 == 0:
            prompt = self._waiting.pop(0)
            self.streams.append(send(self._engine, prompt, **SAMPLING)[1])


@pytest.mark.parametrize("host", [SMALL, LARGE, {}], ids=["little host", "host", "no host"])
@pytest.mark.parametrize("overlap", [True, False])
def test_text_survives_sharing_blocks(
    shapes: dict[str, Path], alone: Texts, host: dict[str, Any], overlap: bool
) -> None:
    expected, asked = alone("opt"), prompts()
    half = len(asked) // 2
    fields = {"scheduler__policy": "bros", "engine__overlap": overlap, **SCARCE, **host}
    with engine(shapes["opt"], **fields) as running:
        realtime = RealTime(running, asked[half:])
        batch = [
            send(running, prompt, tier=Tier.BEST_EFFORT, **SAMPLING)[1] for prompt in asked[:half]
        ]
        assert [stream.wait().tokens() for stream in batch] == expected[:half]
        found = [stream.wait().tokens() for stream in realtime.streams]
        assert found == expected[half : half + len(found)] and found
        stats = running.stats()
        assert realtime.shared > 0 and stats.host_slots_used == 0
        if host is not LARGE:
            assert stats.host_full > 0
        if host:
            assert min(stats.slots_checkpointed, stats.slots_restored) > 0
