"""What other threads read of a running engine: its counts may be one step apart."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.step_loop import StepLoop
from jaxserve.engine.ttft_estimator import LiveTtftEstimator
from jaxserve.sched.cache.pool_map import pool_map
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo.tiers import blocks_used
from jaxserve.sched.state.request_table import State


class EngineSnapshot:
    """Each of them is taken while the engine runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_loop: StepLoop,
        compiles: CompileCounter,
        ttft_estimator: LiveTtftEstimator,
    ) -> None:
        self._scheduler, self._step_loop, self._ttft_estimator = (
            scheduler,
            step_loop,
            ttft_estimator,
        )
        self._compiles = compiles

    def stats(self, queued: int, step_time_error: float) -> EngineStats:
        """queued: requests that the engine has not taken in yet."""
        scheduler = self._scheduler
        table, pool, host = scheduler.table, scheduler.pool, scheduler.host
        failures = self._step_loop.failures
        return EngineStats(
            waiting=int(np.isin(table.state, (State.WAITING, State.HELD)).sum()) + queued,
            running=int(np.isin(table.state, (State.RUNNING, State.DRAINING)).sum()),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks=blocks_used(pool, table.tier),
            host_slots_total=host.capacity,
            host_slots_used=host.num_used,
            slots_checkpointed=host.num_saved,
            slots_restored=host.num_restored,
            host_full=host.num_full,
            preemptions=scheduler.preemptions,
            compiles_after_warmup=self._compiles.count,
            steps=self._step_loop.steps,
            step_time_error=step_time_error,
            expected_wait=self._ttft_estimator.by_tier(),
            request_failures=failures.requests,
            step_failures=failures.steps,
            observer_failures=failures.observers,
        )

    def block_map(self) -> np.ndarray:
        """What each block holds, uint8 [num_blocks] of `sched.pool_map.BlockUse`."""
        return pool_map(self._scheduler.pool, self._scheduler.table.tier)

    def live_counts(self) -> dict[tuple[str, str, bool], int]:
        """Continuations by (SLO class, tier, whether they hold cache)."""
        held = self._scheduler.pool.held
        return Counter(
            (one.request.slo_class, one.request.tier.name.lower(), bool(held[row]))
            for row, one in list(self._step_loop.live.items())
        )
