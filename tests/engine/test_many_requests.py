"""More requests of both tiers than a pool holds go through it; `make soak` has thousands."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import Observer, StepStats
from jaxserve.sched.request import Tier
from tests.engine.conftest import Texts
from tests.engine.harness import SCARCE, TIMEOUT, Stream, engine, prompts, send
from tests.sched.cache.invariants import check_host, check_pool

COUNT = 150
AT_ONCE = 40  # requests, those that wait included
CANCELLED = 0.03
HOST = {"cache__host_gib": 1e-5}  # forty slots, so that it is full now and then


class Seen(Observer):
    """The most blocks that two requests shared at any step."""

    def __init__(self, on: Engine) -> None:
        self.shared = 0
        self._engine = on
        on.add_observer(self)

    def on_step(self, stats: StepStats) -> None:
        self.shared = max(self.shared, self._engine.stats().blocks["kv", "shared"])


@pytest.mark.promise(1)
def test_every_request_is_answered_as_if_it_were_alone(
    shapes: dict[str, Path], alone: Texts
) -> None:
    rng, expected, asked = np.random.default_rng(0), alone("opt"), prompts()
    places, done = threading.Semaphore(AT_ONCE), list[tuple[Stream, list[int]]]()

    def ended(output: Output) -> None:
        if output.finish_reason is not None:
            places.release()

    with engine(shapes["opt"], scheduler__policy="bros", **HOST, **SCARCE) as running:
        seen = Seen(running)
        for _ in range(COUNT):
            which, length = int(rng.integers(len(asked))), int(rng.integers(1, 25))
            tier = Tier(int(rng.integers(2)))
            assert places.acquire(timeout=TIMEOUT), "nobody ends any more"
            sampling = {"max_tokens": length, "ignore_eos": True}
            name, stream = send(running, asked[which], ended, tier=tier, **sampling)
            done.append((stream, expected[which][:length]))
            if rng.random() < CANCELLED:
                running.cancel(name)
        for stream, text in done:
            found = stream.wait().tokens()
            if stream.reason is FinishReason.CANCELLED:
                text = text[: len(found)]
            assert found == text
        stats = running.stats()
        check_pool(running._scheduler.pool)
        check_host(running._scheduler.host)
        assert stats.host_slots_used == 0
        assert min(stats.preemptions, seen.shared) > 0
        assert min(stats.slots_checkpointed, stats.slots_restored, stats.host_full) > 0
