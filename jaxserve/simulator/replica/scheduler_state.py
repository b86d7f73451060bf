"""The scheduler's state in a simulation: the engine's own, with as many rows as live requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.growing_table import FIRST_ROWS, GrowingTable
from jaxserve.sched.state.request_table import RequestTable
from jaxserve.simulator.replica.counted_pool import CountedPool


class SimulatedScheduler(Scheduler):
    """A scheduler with a growing table; everything else is as in the engine.

    Args:
        policy: The policy.
        limits: C, P and rows.
        watch: Called with the policy's view before each plan.
        options: Options of `Scheduler`.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        watch: Callable[[View], None] | None = None,
        **options: Any,
    ) -> None:
        self._watch = watch
        super().__init__(policy, limits, capacity=FIRST_ROWS, **options)
        self.view: SeedTrackingView = SeedTrackingView.from_view(self.view)

    def _make_table(self, capacity: int) -> RequestTable:
        return GrowingTable(capacity)

    def _make_pool(self, num_blocks: int, block_size: int, capacity: int, width: int) -> BlockPool:
        # Checking a plan needs ids, and so do prefix caching and groups of layers.
        counts = self.policy.counts_blocks and not self.checked and self.cache is None
        if counts and self.groups is None:
            return CountedPool(num_blocks, block_size, capacity, width)
        return super()._make_pool(num_blocks, block_size, capacity, width)

    def plan(self, *args: Any) -> BatchPlan:
        """See `Scheduler.plan`."""
        if self._watch is not None:
            self._watch(self.view)
        return super().plan(*args)

    def advance(self, rows: np.ndarray, steps: np.ndarray) -> None:
        """Books steps[i] decodes of each row at once, all of them in the latest of their batches.
        Makes no room for them."""
        table = self.table
        table.computed[rows] += steps
        table.generated[rows] += steps
        if self.programs.num_calls:
            self.programs.charge(rows, steps)
        latest = rows[steps == steps.max()]
        order = self._batch_order
        table.last_batch_order[latest] = np.arange(order, order + len(latest))
        self._batch_order += len(latest)
        self._progress.advance(int(steps.max()))

    def receive_several(self, rows: np.ndarray, counts: np.ndarray, times: np.ndarray) -> None:
        """Calls of `receive` at each of these times: row i at the first counts[i] of them. All rows
        have tokens already.

        Args:
            rows: int64 [n].
            counts: int64 [n], 1 or more.
            times: float64 [k], ascending, seconds.
        """
        if not len(times):
            return
        table, gaps, more = self.table, np.diff(times), counts - 1
        first = times[0] - table.last_token[rows]
        longest = np.concatenate([[0.0], np.maximum.accumulate(gaps)])
        table.longest_gap[rows] = np.maximum(table.longest_gap[rows], first)
        table.longest_gap[rows] = np.maximum(table.longest_gap[rows], longest[more])
        timed = np.flatnonzero(table.tbt[rows] < np.inf)
        if len(timed):
            mine, target = rows[timed], table.tbt[rows[timed], None]
            counted = np.arange(len(gaps)) < more[timed, None]
            table.late_gaps[mine] += ((gaps > target) & counted).sum(axis=1)
            table.late_gaps[mine] += first[timed] > target[:, 0]
        table.received[rows] += counts
        table.last_token[rows] = times[more]


@dataclass(frozen=True)
class SeedTrackingView(View):
    """A view that notes whether its policy has drawn random numbers.

    Attributes:
        seed_reads: How often the policy has asked for the seed.
    """

    seed_reads: Counter[str] = field(default_factory=Counter)

    @property
    def seed_read(self) -> bool:
        """Whether the policy has asked for the seed."""
        return self.seed_reads.total() > 0

    def policy_seed(self) -> int:
        """See `View.policy_seed`."""
        self.seed_reads["policy"] += 1
        return super().policy_seed()

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Requests for the seed in this context are not counted."""
        before = self.seed_reads["policy"]
        yield
        self.seed_reads["policy"] = before

    @classmethod
    def from_view(cls, view: View) -> SeedTrackingView:
        """The view with tracking."""
        return cls(**{one.name: getattr(view, one.name) for one in fields(view)})
