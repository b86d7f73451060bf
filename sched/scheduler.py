"""The one owner of the request table and the block accounting, for the engine and the simulator.

`schedule` asks the policy for a plan, checks it, and books it: from then on the planned tokens
count as computed and the tokens that the step will sample as generated, although the device may
still be at work. What arrives late is told with `receive`, what ends early with `finish`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.kinds import CacheKind
from jaxserve.sched.plan import BatchPlan, InvalidPlan
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.request import Request
from jaxserve.sched.table import DRAINING, RUNNING, WAITING, RequestTable

if TYPE_CHECKING:
    from jaxserve.sched.cost_model import CostModel


class Scheduler:
    """Rows of the table name the requests. Not thread-safe: one thread plans.

    cost_model, seed, rho: what the policy sees of them, see `View`.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        capacity: int,
        cost_model: CostModel | None = None,
        seed: int = 0,
        rho: float | None = None,
    ) -> None:
        width = -(-max_model_len // block_size)
        self.policy = policy
        self.table = RequestTable(capacity)
        self.pool = BlockPool(num_blocks, block_size, capacity, width)
        self.view = View(self.table, self.pool, limits, cost_model, seed, rho)
        self.preemptions = 0
        self._served = 0

    def add(self, request: Request) -> int:
        """The row of a new, waiting request. IndexError when the table is full."""
        return self.table.add(request)

    def schedule(self, now: float) -> tuple[BatchPlan, np.ndarray]:
        """The next plan, booked, and which of its rows sample a token, bool [len(plan)].

        InvalidPlan if the policy over-commits; nothing is booked then.
        """
        plan = self.policy.plan(self.view, now)
        self._check(plan)
        table, rows = self.table, plan.rows
        if len(plan.preempt):
            self._preempt(plan.preempt)
        starts = np.flatnonzero(table.state[rows] == WAITING)
        if len(starts):
            for i in starts.tolist():
                self.pool.open(int(rows[i]), CacheKind(int(plan.kinds[i])))
            table.kind[rows[starts]] = plan.kinds[starts]
            table.move(rows[starts], RUNNING)
        if len(plan.project):
            self.pool.widen(plan.project)
            table.kind[plan.project] = CacheKind.KV
        self.pool.grow_all(rows, plan.reserve)
        table.computed[rows] += plan.num_tokens
        table.last_batch_order[rows] = np.arange(self._served, self._served + len(rows))
        self._served += len(rows)
        emits = table.pending(rows) == 0
        table.generated[rows] += emits
        return plan, emits

    def release_finished(self, plan: BatchPlan) -> np.ndarray:
        """Frees the blocks of the plan's requests that need no further step, and returns their
        rows. Called once the step is launched: later steps run after it, so the blocks can go to
        others at once."""
        table = self.table
        done = plan.rows[table.generated[plan.rows] >= table.max_tokens[plan.rows]]
        if len(done):
            for row in done.tolist():
                self.pool.release(row)
            table.move(done, DRAINING)
        return done

    def receive(self, rows: np.ndarray, now: float) -> None:
        """A token of each of these rows has reached the host."""
        self.table.received[rows] += 1
        self.table.last_token[rows] = now

    def finish(self, row: int) -> None:
        """The request is over, whatever its state: its blocks and its row are free. If it has
        written anything, its length counts among `RequestTable.output_lengths`."""
        if self.pool.held[row]:
            self.pool.release(row)
        if self.table.received[row]:
            self.table.output_lengths.add(int(self.table.received[row]))
        self.table.remove(row)

    def _preempt(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self.pool.release(row)
        table, count = self.table, len(rows)
        table.computed[rows] = 0
        table.preemptions[rows] += 1
        table.preempted_order[rows] = np.arange(self.preemptions + 1, self.preemptions + count + 1)
        table.move(rows, WAITING)
        self.preemptions += count

    def _check(self, plan: BatchPlan) -> None:
        table, limits, rows, tokens = self.table, self.view.limits, plan.rows, plan.num_tokens
        state = table.state[rows]
        waiting, running = state == WAITING, state == RUNNING
        holders = len(table.in_state(RUNNING)) + int(np.count_nonzero(waiting))
        free = self.pool.num_free
        if len(plan.preempt):
            _demand(_different(plan.preempt, table.capacity), "a row is preempted twice")
            _demand(not np.isin(rows, plan.preempt).any(), "a row is planned and preempted")
            cached = table.state[plan.preempt] == RUNNING
            _demand(cached.all(), "a row without cache is preempted")
            holders -= len(plan.preempt)
            free += sum(self.pool.returned_by(row) for row in plan.preempt.tolist())
        _demand(_different(rows, table.capacity), "a row is planned twice")
        _demand((waiting | running).all(), "a row that has nothing to compute is planned")
        _demand((np.diff((tokens == 1).astype(np.int8)) <= 0).all(), "chunks before single tokens")
        pending = table.pending(rows)
        _demand(((tokens > 0) & (tokens <= pending)).all(), "more tokens than are pending")
        _demand((plan.reserve >= table.computed[rows] + tokens).all(), "less room than tokens")
        _demand(plan.total_tokens <= limits.max_batch_tokens, "more tokens than max_batch_tokens")
        _demand(holders <= limits.max_rows, "more requests than max_rows hold cache")
        needed = self.pool.needed(rows, plan.reserve, plan.kinds)
        _demand(needed.sum() <= free, "more blocks than are free")
        hidden = plan.kinds == CacheKind.HIDDEN
        _demand(
            self.view.rho is not None or not hidden.any(),
            "hidden caches are planned where there are none",
        )
        widens = running & ~hidden & (table.kind[rows] == CacheKind.HIDDEN)
        _demand(
            np.array_equal(np.sort(rows[widens]), np.sort(plan.project)),
            "rows that go from hidden to KV are not those to be projected",
        )
        same_kind = (table.kind[rows] == plan.kinds) | waiting | widens
        _demand(same_kind.all(), "a KV cache becomes hidden without being preempted")


def _different(rows: np.ndarray, capacity: int) -> bool:
    last = np.empty(capacity, np.int64)
    order = np.arange(len(rows))
    last[rows] = order
    return bool((last[rows] == order).all())


def _demand(condition: bool | np.bool_, problem: str) -> None:
    if not condition:
        raise InvalidPlan(problem)
