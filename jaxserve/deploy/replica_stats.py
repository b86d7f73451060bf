"""A replica's reports: a `Snapshot` for routers, and a `Load` for the autoscaler."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxserve.deploy.load import Load
from jaxserve.engine.stats import Observer, RequestStats, StepStats
from jaxserve.sched.request import Request
from jaxserve.sched.routing.snapshot import Snapshot
from jaxserve.sched.routing.take_snapshot import Lately, constant_fields, take_snapshot
from jaxserve.server.requests.engine_client import EngineClient

WINDOW_S = 60.0
"""How long a request counts towards attainment, and its TTFT target towards the usual one."""


class ReplicaStats(Observer):
    """Observes the engine, on its thread, for `snapshot` and `load`, which any thread may call.

    Args:
        engine: the engine, to which it adds itself as an observer.
        clock: the engine's clock, in seconds.
        wall: a clock that all replicas and routers share, in seconds.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._clock, self._wall = engine, clock, wall
        self._lock = threading.Lock()
        self._learned = Lately()
        self._stepped = 0.0, 0.0  # the last step's time on both clocks
        self._asked: dict[int, Request] = {}
        self._targets: deque[tuple[float, float]] = deque()  # when, and the TTFT
        self._ended: deque[tuple[float, str, bool]] = deque()  # when, class, whether targets met
        engine.add_observer(self)

    def on_arrival(self, number: int, request: Request) -> None:
        """Keeps the request and its TTFT target."""
        with self._lock:
            self._asked[number] = request
            if request.slo.ttft is not None:
                self._targets.append((self._clock(), request.slo.ttft))

    def on_step(self, stats: StepStats) -> None:
        """Compares the step's time with the predicted one."""
        if stats.predicted_time > 0:
            self._learned.stepped(stats.device_time / stats.predicted_time)

    def on_finish(self, stats: RequestStats) -> None:
        """Keeps the request's output length, and whether it met its targets."""
        with self._lock:
            asked = self._asked.pop(stats.number, None)
            if stats.output_tokens:
                self._learned.ended(np.array([stats.output_tokens]))
            if asked is not None and asked.slo.ttft is not None and stats.ttft is not None:
                self._learned.began(1, int(stats.ttft <= asked.slo.ttft))
            if stats.verdict is not None:
                verdict = stats.verdict
                self._ended.append((self._clock(), verdict.slo_class, verdict.met))

    def snapshot(self, *, draining: bool = False) -> Snapshot:
        """The state now, or at the end of the last step while one is running. draining: whether the
        replica takes no more requests, whatever the engine says."""
        backlog, info, stats = self._engine.backlog(), self._engine.info(), self._engine.stats()
        unfinished = stats.waiting + stats.running
        cost, blocks = backlog.cost_model, info.num_blocks
        known = constant_fields(cost, backlog.policy, backlog.limits, blocks, info.block_size)
        taken = take_snapshot(backlog, unfinished, known, self._learned, draining=draining)
        at = self._wall()
        # An idle replica has not changed since, and a stopped one will not change. The time of a
        # step is said alike each time, however far apart the clocks are read: a later one is news.
        if unfinished and not draining:
            if self._stepped[0] != backlog.time:
                self._stepped = backlog.time, at - (self._clock() - backlog.time)
            _, at = self._stepped
        return replace(taken, time=at)

    def load(self) -> Load:
        """The load over the last WINDOW_S seconds."""
        stats, backlog = self._engine.stats(), self._engine.backlog()
        since = self._clock() - WINDOW_S
        with self._lock:
            for seen in (self._targets, self._ended):
                while seen and seen[0][0] < since:
                    seen.popleft()
            targets = [target for _, target in self._targets]
            ended = [(name, met) for _, name, met in self._ended]
        usual = statistics.median(targets) if targets else None
        return Load(
            wait_share=0.0 if usual is None else stats.expected_wait["realtime"] / usual,
            busy=max(
                stats.running / backlog.max_rows, 1.0 - stats.blocks_free / stats.blocks_total
            ),
            waiting=stats.waiting / backlog.max_rows,
            ended={name: sum(one == name for one, _ in ended) for name, _ in ended},
            met={name: sum(met for one, met in ended if one == name) for name, _ in ended},
        )
