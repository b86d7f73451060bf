"""The engine's load, for clients that are refused: totals over all clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.server.requests.engine_client import EngineClient

LOAD_HEADER = "endpoint-load-metrics"
"""ORCA's header, which load balancers read (https://github.com/envoyproxy/envoy/issues/6614)."""
_FRESH_S = 0.1


@dataclass(frozen=True)
class EngineLoad:
    """The load at one moment.

    Attributes:
        running: continuations in the batch.
        waiting: continuations in the queue.
        kv_cache_usage: share of the pool's blocks in use.
    """

    running: int
    waiting: int
    kv_cache_usage: float

    def header(self) -> str:
        """The value of LOAD_HEADER; its metrics have vLLM's names, as at /metrics."""
        values = {
            "kv_cache_usage_perc": self.kv_cache_usage,
            "num_requests_waiting": self.waiting,
            "num_requests_running": self.running,
        }
        return "TEXT " + ", ".join(
            f"named_metrics.{name}={value:g}" for name, value in values.items()
        )


class LoadMeter:
    """Asks the engine for its load, at most ten times a second however many calls are refused. Used
    on the event loop's thread.

    Args:
        engine: the engine.
        clock: seconds.
    """

    def __init__(self, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._load: EngineLoad | None = None
        self._until = 0.0

    def __call__(self) -> EngineLoad:
        """The load, at most a moment old."""
        now = self._clock()
        if self._load is None or now >= self._until:
            stats = self._engine.stats()
            self._load = EngineLoad(stats.running, stats.waiting, round(stats.kv_cache_usage, 4))
            self._until = now + _FRESH_S
        return self._load
