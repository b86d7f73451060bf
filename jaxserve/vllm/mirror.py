"""A scheduler of ours that mirrors vLLM's: a policy plans on it, and what vLLM then does is booked.

Nothing is counted twice. Before a plan, tokens and blocks are read from vLLM's requests and its
manager of KV cache; after it, the step is what vLLM has scheduled, whatever was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.block_sizes import PLANES
from jaxserve.sched.cache.cache_kinds import KV, LEFT
from jaxserve.sched.cost.cost_model import CostModel
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.request import Request, Tier
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo.verdict import Verdict, judge
from jaxserve.sched.state.growing_table import FIRST_ROWS, GrowingTable
from jaxserve.sched.state.request_table import DRAINING, FREE, HELD, RUNNING, WAITING, RequestTable
from jaxserve.sched.step import Step

LOOK = 64  # waiting requests whose cached prefixes a plan looks up
_KV = int(PLANES[KV])  # blocks of ours in one of vLLM's, which has K and V


class ManagerPool(BlockPool):
    """What policies ask of a pool, by vLLM's manager of KV cache. Only vLLM takes blocks and gives
    them back; here they have no ids.

    Args:
        manager: A `KVCacheManager` with one group of layers.
        num_blocks: Blocks of vLLM's.
        block_size: Tokens of a block.
        max_owners: Rows that may hold blocks.
        width: Most blocks of a row in a plane.

    Attributes:
        names: By row, the request's id.
    """

    def __init__(
        self, manager: Any, num_blocks: int, block_size: int, max_owners: int, width: int
    ) -> None:
        super().__init__(_KV * num_blocks, block_size, max_owners, 0)
        self.width, self.names = width, dict[int, str]()
        self._manager = manager

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may take, including cached ones that no request holds."""
        return _KV * int(self._manager.block_pool.get_num_free_blocks())

    def private(self, rows: np.ndarray | int) -> np.ndarray:
        """See `BlockPool`. Counted when it is asked for, since few plans ask."""
        each = [self._alone(row) for row in np.atleast_1d(rows).tolist()]
        return np.reshape(np.array(each, np.int64), np.shape(rows))

    def _alone(self, row: int) -> int:
        blocks = self._manager.get_blocks(self.names[row]).blocks[0]
        return _KV * sum(block.ref_cnt == 1 for block in blocks)

    def find(self, row: int, blocks: Sequence[Any]) -> None:
        """Notes the blocks that a waiting row would find cached. Those that others hold cost it
        nothing; the others count as free until it takes them."""
        self._reading[row] = sum(block.ref_cnt > 0 for block in blocks)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(np.where(self.held[rows] > 0, 0, self._reading[rows]))

    def open_caches(self, rows: np.ndarray, kinds: Any, directions: Any = LEFT) -> None:
        """Does nothing: they are K and V, filled from the left."""

    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Does nothing: vLLM has taken the blocks."""

    def release(self, row: int) -> None:
        """Notes that vLLM has taken the row's blocks back."""
        self.held[row] = self._reading[row] = 0

    def release_all(self, rows: np.ndarray) -> None:
        """See `release`."""
        self.held[rows] = self._reading[rows] = 0


@dataclass
class _Served:
    """A request, and when its tokens came."""

    request: Request
    times: list[float] = field(default_factory=list)


class Mirror(Scheduler):
    """The requests of a vLLM engine as a policy sees them. "Requests" are vLLM's unless it says
    otherwise; times are in seconds on one clock.

    Args:
        policy: Plans.
        limits: Those of vLLM's scheduler.
        manager: Its `KVCacheManager`.
        num_blocks: Blocks that requests may hold.
        block_size: Tokens of a block.
        max_model_len: Tokens of the longest request.
        cost_model: Predicts steps.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        manager: Any,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        cost_model: CostModel,
    ) -> None:
        self._manager, self._next = manager, 0
        self._rows: dict[str, int] = {}
        self._served: dict[int, _Served] = {}
        super().__init__(
            policy,
            limits,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            capacity=FIRST_ROWS,
            cost_model=cost_model,
            checked=False,  # checks need the ids of blocks; vLLM makes its own
        )

    def _make_table(self, capacity: int) -> RequestTable:
        return GrowingTable(capacity)

    def _make_pool(
        self, num_blocks: int, block_size: int, capacity: int, width: int
    ) -> ManagerPool:
        self.blocks = ManagerPool(self._manager, num_blocks, block_size, capacity, width)
        return self.blocks

    def __len__(self) -> int:
        return len(self._rows)

    def enter(self, request: Request, **options: Any) -> None:
        """Adds a request of ours, which has the id of one of vLLM's. options: of `add`."""
        row = self.add(request, **options)
        self._rows[request.id], self.blocks.names[row] = row, request.id
        self._served[row] = _Served(request)

    def name(self, row: int) -> str:
        """The id of the request in that row."""
        return self.blocks.names[row]

    def follow(self, running: Sequence[Any], waiting: Sequence[Any]) -> None:
        """Reads where vLLM is. Policies do not see requests that are neither of these.

        Args:
            running: Requests that may be scheduled and hold a cache.
            waiting: Requests that may start.
        """
        table, rows, manager = self.table, self._rows_of(running), self._manager
        if len(rows):
            table.computed[rows] = [one.num_computed_tokens for one in running]
            table.generated[rows] = [
                one.num_output_tokens + one.num_output_placeholders for one in running
            ]
            self.pool.held[rows] = [
                len(manager.get_blocks(one.request_id).blocks[0]) for one in running
            ]
        states = np.full(table.capacity, HELD, np.int8)
        states[self._rows_of(waiting)] = WAITING
        goes_on = table.generated[rows] < table.max_tokens[rows]
        states[rows] = np.where(goes_on, RUNNING, DRAINING)
        moved = np.flatnonzero((table.state != FREE) & (table.state != states))
        for state in np.unique(states[moved]).tolist():
            table.move(moved[states[moved] == state], state)
        for i in range(self._next, self._next + min(LOOK, len(waiting))):
            self._look(waiting[i % len(waiting)])
        self._next = (self._next + LOOK) % max(len(waiting), 1)

    def _look(self, request: Any) -> None:
        """Looks up the cached prefix of a waiting request. vLLM does again when it starts."""
        row = self._rows[request.request_id]
        blocks, tokens, *_ = self._manager.get_computed_blocks(request)
        self.blocks.find(row, blocks.blocks[0])
        self.table.computed[row], self.table.generated[row] = tokens, request.num_output_tokens

    def lose(self, request: Any) -> None:
        """Notes that a running request has lost its cache."""
        rows = np.array([self._rows[request.request_id]])
        self._preempt(BatchPlan(), Preempt.whole(rows))
        self._progress.note(0, 0, rows)

    def book_actual(self, batch: Sequence[tuple[Any, int, int]], plan: BatchPlan) -> Step:
        """Books what vLLM has scheduled.

        Args:
            batch: Each request, how many tokens it computes, and how many of them are drafts.
            plan: Whom the policy gives up.

        Returns:
            The step.
        """
        table, zeros = self.table, np.zeros(len(batch), np.int64)
        rows = self._rows_of([request for request, _, _ in batch])
        counts = zeros + [count for _, count, _ in batch]
        drafts = zeros + [drafts for _, _, drafts in batch]
        end = zeros + [request.num_computed_tokens for request, _, _ in batch]
        table.computed[rows] = end - counts
        table.move(rows[table.state[rows] == HELD], WAITING)  # vLLM's choice, not the policy's
        actual = BatchPlan(
            rows,
            counts,
            reserve=end,
            kinds=zeros,
            drafts=drafts if drafts.any() else None,
            missed=plan.missed,
            relegated=plan.relegated,
        )
        return self.book(actual)

    def take(self, requests: Sequence[Any], now: float) -> None:
        """Notes the tokens that have come since the last time."""
        rows, counts = [], []
        for request in requests:
            row = self._rows[request.request_id]
            times = self._served[row].times
            if (new := request.num_output_tokens - len(times)) > 0:
                times.extend([now] * new)
                rows.append(row)
                counts.append(new)
        if rows:
            several = None if max(counts) == 1 else np.array(counts)
            self.table.receive(np.array(rows), now, several)

    def leave(
        self, request: Any, now: float, *, complete: bool, failed: bool
    ) -> tuple[Tier, Verdict | None] | None:
        """Ends a request.

        Args:
            request: The request.
            now: Seconds.
            complete: Whether its output ended by itself or at its limit.
            failed: Whether vLLM could not serve it.

        Returns:
            Its tier, and the verdict on its targets, None without any; None if it is not here.
        """
        if request.request_id not in self._rows:
            return None
        self.take([request], now)
        row = self._rows.pop(request.request_id)
        served = self._served.pop(row)
        complete = complete and bool(served.times)
        self.finish(row, complete=complete, now=now)
        del self.blocks.names[row]
        verdict = judge(served.request, served.times, now, complete=complete, failed=failed)
        return served.request.tier, verdict

    def _rows_of(self, requests: Sequence[Any]) -> np.ndarray:
        return np.array([self._rows[one.request_id] for one in requests], np.int64)
